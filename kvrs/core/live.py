"""An open stream: its journal, the policy's record of it, and what processes keep of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.streams import Stream
from kvrs.ids import InstanceId, StreamId


class Complete(msgspec.Struct, frozen=True):
    """Every token, the finish and the usage were sent; only the formal end is left."""


class CannotContinue(msgspec.Struct, frozen=True):
    """The rest of the stream could not be produced exactly, and the configuration refuses less."""

    cause: str


Outcome = Complete | act.GiveUp | CannotContinue


class StreamJournal(Protocol):
    """Facts about one stream. (`owner_epoch`, `attempt`) is its only writer; attempt 0 while there
    is none.
    """

    stream: StreamId
    arrived_s: float
    owner_epoch: int
    attempt: int
    deadlines: ev.Deadlines
    client: str  # Shares the queues with the others; empty: it is not known.
    tenant: str  # Its mark; all are the same where there are no tenants.
    name: str  # Key of the alias or adapter that it is of (`names.py`); empty: all have it.
    kept: tuple[ev.Kept, ...]  # KV of the stream as the proxy before this one knew it.

    @property
    def prompt_ids(self) -> Sequence[int] | None:
        """None until an engine has tokenised the prompt."""

    @property
    def prompt_tokens_guess(self) -> int:
        """Tokens of the prompt, estimated from its text while `prompt_ids` is None."""

    @property
    def max_tokens(self) -> int | None:
        """None: as many as the engine has room for."""

    @property
    def output_ids(self) -> Sequence[int]: ...

    @property
    def token_interval_s(self) -> float | None:
        """Mean time between two tokens; None: there are too few."""

    @property
    def finished(self) -> bool:
        """The client has all of the text."""

    @property
    def resumable(self) -> bool:
        """The client may resume the stream at another proxy."""

    @property
    def inexact(self) -> tuple[str, ...]:
        """Features that could not be continued exactly after a cut."""

    @property
    def replayed(self) -> tuple[str, ...]:
        """Features that only `Option.REPLAY` continues exactly."""


@dataclass(slots=True, eq=False)
class Copy:
    """The checkpoint of a stream at one agent."""

    pages: int = 0  # Leading full ones.
    lost: str | None = None  # Why the agent keeps nothing.


@dataclass(slots=True, eq=False)
class LiveStream:
    """A stream that has not ended. Drivers extend it with what they need to run attempts."""

    journal: StreamJournal
    state: Stream | None = None  # The policy's record, from its first attempt on.
    prefilled_at: tuple[InstanceId, ...] = ()  # May retain pages of this stream.
    copies: dict[InstanceId, Copy] = field(default_factory=dict)  # By agent.
    id: StreamId = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.journal.stream

    @property
    def plan(self) -> act.Plan | None:
        """The plan of the latest attempt; None: there was none."""
        return None if self.state is None else self.state.attempt.plan

    @property
    def stays_until_s(self) -> float | None:
        """Until when its attempt, which stays at an instance that re-forms, may be silent."""
        deadline = None if self.state is None else self.state.attempt.stay_deadline
        return None if deadline is None else deadline.until_s

    @property
    def produced_tokens(self) -> int:
        return len(self.journal.output_ids)

    @property
    def prompt_tokens(self) -> int:
        return 0 if self.journal.prompt_ids is None else len(self.journal.prompt_ids)

    @property
    def history_tokens(self) -> int:
        journal = self.journal
        return len(journal.prompt_ids or ()) + len(journal.output_ids)

    @property
    def remaining_tokens(self) -> int | None:
        """How many more the client wants; None: as many as the engine has room for."""
        most = self.journal.max_tokens
        return None if most is None else most - self.produced_tokens

    def note_prefilled(self, instance: InstanceId) -> None:
        if instance not in self.prefilled_at:
            self.prefilled_at = (*self.prefilled_at, instance)
