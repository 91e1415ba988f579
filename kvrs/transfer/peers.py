"""Who pulls what from whom: the types between the page port and the engine behind it."""

from dataclasses import dataclass
from typing import Protocol

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.frames import Identity, PullRequest

__all__ = ["Identity", "PageSource", "Peer", "PinnedPages", "PullRequest", "PullResult"]


@dataclass(frozen=True, slots=True)
class Peer:
    """Where an instance's page port is. Comes from the registry, never from a request."""

    instance: InstanceId
    node: NodeId
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class PinnedPages:
    """The longest leading run of a request that is held, in place until it is unpinned; `token` is the source's own."""

    pages: list[memoryview]
    tail: memoryview | None
    token: object


class PageSource(Protocol):
    """What an engine gives its page server. Both calls come from the event loop and must not block it for long."""

    def pin(self, request: PullRequest) -> PinnedPages: ...

    def unpin(self, pinned: PinnedPages) -> None: ...


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a pull brought. Only pages whose checksum was right count; those after them may hold anything."""

    full_pages: int  # Leading pages of the request.
    tail: bool
    bytes: int
    seconds: float  # As the caller waited, connecting included.
    gone: bool  # The peer no longer holds what is missing.
    error: str | None  # Why it stopped early, unless that is all.
