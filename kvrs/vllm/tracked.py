"""Records of requests that the scheduler's thread and the thread of the port share.

Each field has one thread that writes it; the other reads it later, or is called with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrs.ids import StreamId
from kvrs.protocol.instance import SourceRange
from kvrs.protocol.tags import Tag


class LiveRequest(Protocol):
    """vLLM's request, as far as it is read here."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...


@dataclass(slots=True, eq=False)
class SavedStream:
    """One attempt at a stream whose pages go to agents. The page port's thread writes it."""

    request_id: str
    stream: StreamId
    attempt: tuple[int, int]
    tags: list[Tag]
    history_tokens: int
    computed_tokens: int = 0
    is_ended: bool = False  # Nothing more is computed; what is left may still be sent.


@dataclass(frozen=True, slots=True)
class FilledPages:
    """Further full pages of a stream: their tags, and how many tokens it then has computed."""

    saved: SavedStream
    tags: list[Tag]
    computed_tokens: int


@dataclass(slots=True, eq=False)
class Restore:
    """Pages that are fetched for a request before vLLM is promised any. The port's thread fills
    `slots` in the order of the pages, each when its page has arrived and was verified; the
    scheduler's thread decides how many are used.
    """

    stream: StreamId
    attempt: tuple[int, int]
    tags: list[Tag]
    sources: Sequence[SourceRange]
    deadline_s: float
    first_page: int
    slot_token: int  # Under which it is fetched, and which an agent may end; 0: none.
    slots: list[int] = field(default_factory=list)
    is_over: bool = False  # Nothing more arrives.
    fault: str = ""  # Why no more has come, as far as that is known.


@dataclass(slots=True, eq=False)
class CopyRequest:
    """Pages of a request, to be copied to slots in vLLM's next step that runs it, or in any step
    once it has ended.
    """

    request_id: str
    first_page: int
    slots: list[int]
    # Called once, in the port's thread: how many leading pages there are.
    copied: Callable[[int], None]


@dataclass(slots=True)
class Counts:
    """Since the start."""

    pages_saved: int = 0
    pages_loaded: int = 0
