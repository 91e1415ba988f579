"""Who pulls what from whom: the types between the page port and the engine behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.frames import Claim, Held, Identity, PullRequest, StoreCode, TrafficClass
from kvrs.protocol.tags import Tag

__all__ = [
    "Claim",
    "Held",
    "Identity",
    "Incoming",
    "PageSink",
    "PageSource",
    "Peer",
    "PinnedPages",
    "PullRequest",
    "PullResult",
    "StoreCode",
    "StoredPages",
    "TrafficClass",
]


@dataclass(frozen=True, slots=True)
class Peer:
    """Where the page port of an instance or an agent is. Comes from the registry, never from a request."""

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
    # Of the leading pages, as they were when they were stored: so that damage since then shows. Of the others it is taken now.
    checksums: Sequence[int] = ()


class PageSource(Protocol):
    """What an engine gives its page server. Both calls come from the event loop and must not block it for long."""

    async def pin(self, request: PullRequest) -> PinnedPages:
        """What is held is decided at once, before anything is awaited; then its bytes may take their time to get here.

        Raises:
            TransferError: they do not. Like whoever is cancelled meanwhile, the asker is left without, and nothing stays pinned.
        """
        ...

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


class Incoming(Protocol):
    """Pages of one run while they arrive. Several runs, of one frame or of several connections, arrive at the same time, and
    two of them may bring the same page.
    """

    @property
    def views(self) -> Sequence[memoryview | None]:
        """One per page: where to receive it. None: it is received and dropped (held already, fenced, full, or behind a gap)."""
        ...

    def commit(self, index: int, checksum: int) -> None:
        """The page at `index` of the run lies in its view and its checksum was verified: from now on it is visible.

        Called in rising order of index, and not for those without a view.
        """
        ...

    def end(self) -> Held:
        """Called once, always: after the last page or after a failure. Frees what was not committed."""
        ...


class PageSink(Protocol):
    """What an agent's store gives its page server. All calls come from the event loop and must not block it for long."""

    def adopt(self, client: Identity) -> None:
        """A client that knows the secret and means this agent is about to be met; then its fingerprint and page size are
        compared with those of the agent's identity, and it is refused if they differ. Here the agent may take them over.
        """
        ...

    def offer(self, claim: Claim, reserved_bytes: int, tags: tuple[Tag, ...]) -> Held: ...

    def begin(self, claim: Claim, first_page: int, tags: tuple[Tag, ...]) -> Incoming: ...


@dataclass(frozen=True, slots=True)
class StoredPages:
    """A run of a stream's pages, at least one, to be sent to an agent; `pages` must not change while they are being sent."""

    claim: Claim
    first_page: int
    tags: tuple[Tag, ...]
    pages: Sequence[memoryview]
