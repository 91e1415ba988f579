"""Types between a page port and the engine or agent behind it."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.cell_checksums import part_checksum
from kvrs.protocol.page_messages import (
    CheckpointClaim,
    HeldPages,
    Identity,
    PullRequest,
    StoreCode,
    TrafficClass,
)
from kvrs.protocol.parts import PagePart
from kvrs.protocol.tags import Tag
from kvrs.transfer.shared_memory.regions import Region

PAGES_SOCKET = "pages"  # Name of the socket in the directory of an agent's store.

__all__ = [
    "PAGES_SOCKET",
    "CheckpointClaim",
    "HeldPages",
    "Identity",
    "Incoming",
    "PagePlace",
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
    """The page port of an instance or an agent. Comes from the registry, never from a request."""

    instance: InstanceId
    node: NodeId
    host: str
    port: int
    # For a process of the own node: the directory of the node's agent, and the name of the socket
    # there that lends descriptors of its pages. None: no lending.
    directory: Path | None = None
    socket: str = PAGES_SOCKET


@dataclass(frozen=True, slots=True)
class PinnedPages:
    """The longest held prefix of a request."""

    pages: list[memoryview]
    tail: memoryview | None = None
    # Checksums of the leading pages, taken when they were stored, so that later damage is found.
    # Those of the other pages are computed when they are sent.
    checksums: Sequence[int] = ()
    # Checksums of each page's cells, by `cell_checksums`, if a part is requested.
    cells: Sequence[memoryview] = ()
    # The file with the full pages, if processes of this host may map it, and each one's offset.
    region: Region | None = None
    offsets: Sequence[int] = ()

    def checksum(self, index: int, part: PagePart | None) -> int | None:
        """Stored checksum of a page, or of its part; None: not stored."""
        if part is None:
            return self.checksums[index] if index < len(self.checksums) else None
        if index >= len(self.cells):
            return None
        return part_checksum(b"".join(part.runs(self.cells[index])))


class PageSource(Protocol):
    """The pages that a page server serves. All calls come from the event loop and must not block
    it for long.
    """

    def identity(self) -> Identity:
        """The owner of the pages as peers see it, at this moment."""
        ...

    def pinned(self, request: PullRequest) -> AbstractAsyncContextManager[PinnedPages]:
        """Pin the held pages before anything is awaited; then wait until their bytes are readable.
        They stay in place until the context ends.

        Raises:
            TransferError: the pages cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class PullResult:
    """Result of a pull. It counts pages with a correct checksum; later ones are undefined."""

    full_pages: int  # Leading pages of the request.
    tail: bool
    bytes: int
    seconds: float  # The caller's wait, including connecting.
    gone: bool  # The peer no longer holds the missing pages.
    error: str | None  # Reason of an early stop, unless pages are gone.


class Incoming(Protocol):
    """Pages of one range while they arrive. Several ranges, of one frame or of several
    connections, arrive at the same time, and two of them may bring the same page.
    """

    @property
    def views(self) -> Sequence[memoryview | None]:
        """Destination of each page. None: it is received and dropped (held already, fenced, full,
        or behind a gap).
        """
        ...

    def commit(self, index: int, checksum: int) -> None:
        """Make the page at `index` of the range visible: it is in its view, and its checksum is
        verified.

        Called in rising order of index, and not for those without a view.
        """
        ...

    async def settle(self) -> None:
        """Make the remaining pages visible: all have arrived.

        Raises:
            TransferError: the pages cannot be kept.
        """
        ...

    def end(self) -> HeldPages:
        """End the transfer after its last page or a failure, once: free what was not committed."""
        ...


# File of a page, and the offset in it.
PagePlace = tuple[Region, int]


class PageSink(Protocol):
    """The store behind the page server of an agent, or of an instance that keeps replicas. All
    calls come from the event loop and must not block it for long.
    """

    def adopt(self, client: Identity) -> None:
        """Let the agent adopt an authenticated client's fingerprint and page size, before these are
        compared with the agent's own; different ones are refused.
        """
        ...

    def offer(
        self, claim: CheckpointClaim, reserved_bytes: int, tags: tuple[Tag, ...]
    ) -> HeldPages: ...

    def begin(self, claim: CheckpointClaim, first_page: int, tags: tuple[Tag, ...]) -> Incoming: ...


@dataclass(frozen=True, slots=True)
class StoredPages:
    """A range of a stream's pages, at least one, to be sent to an agent; `pages` must not change
    while they are being sent.
    """

    claim: CheckpointClaim
    first_page: int
    tags: tuple[Tag, ...]
    pages: Sequence[memoryview]
