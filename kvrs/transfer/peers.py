"""Types between a page port and the engine or agent behind it."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.frames import part_checksum
from kvrs.protocol.pages import (
    CheckpointClaim,
    HeldPages,
    Identity,
    PagePart,
    PullRequest,
    StoreCode,
    Tag,
    TrafficClass,
)
from kvrs.transfer.shared_memory import Region

PAGES_SOCKET = "pages"  # Name of the socket for lending pages in the directory of an agent's store.

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
    """The page port of an instance or an agent. Its address comes from the configuration, never
    from a request.
    """

    instance: InstanceId
    node: NodeId
    host: str
    port: int
    # For a process of the own node: the directory of the node's agent, and the name of the socket
    # there that lends descriptors of its pages. None: the process lends no pages to this one.
    directory: Path | None = None
    socket: str = PAGES_SOCKET


@dataclass(frozen=True, slots=True)
class PinnedPages:
    """The pages of the longest prefix of a request's pages that the peer holds, pinned."""

    pages: list[memoryview]
    tail: memoryview | None = None
    # Checksums of the leading pages, taken when they were stored, so that later damage is found.
    # Those of the other pages are computed when they are sent.
    checksums: Sequence[int] = ()
    # Checksums of each page's cells, as `cell_checksums` returns them, if a part is requested; else
    # empty.
    cells: Sequence[memoryview] = ()
    # The file with the full pages, and the offset of each page in it; None: processes of this host
    # cannot map the pages.
    region: Region | None = None
    offsets: Sequence[int] = ()

    def checksum(self, index: int, part: PagePart | None) -> int | None:
        """Return the stored checksum of a page, or of its part; None: it is not stored and must be
        computed.
        """
        if part is None:
            return self.checksums[index] if index < len(self.checksums) else None
        if index >= len(self.cells):
            return None
        return part_checksum(b"".join(part.runs(self.cells[index])))


class PageSource(Protocol):
    """Source of the pages that a page server serves. All calls come from the event loop and must
    not block it for long.
    """

    def identity(self) -> Identity:
        """Return the identity of the pages' owner that peers get at this moment."""
        ...

    def pinned(self, request: PullRequest) -> AbstractAsyncContextManager[PinnedPages]:
        """Pin the longest held prefix of the requested pages before anything is awaited; then wait
        until their bytes are readable. The pages stay in place until the context ends.

        Raises:
            TransferError: the pages cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class PullResult:
    """Result of a pull: the pages with a correct checksum. The contents of later pages are
    undefined.
    """

    full_pages: int  # Number of the request's leading full pages that arrived.
    tail: bool
    bytes: int
    seconds: float  # Duration of the whole pull, including the time to connect.
    gone: bool  # True if the peer does not hold the missing pages.
    error: str | None  # Reason why the pull stopped early; None: it is complete, or pages are gone.


class Incoming(Protocol):
    """Pages of one range while they arrive. Several ranges, of one frame or of several
    connections, arrive at the same time, and two of them may bring the same page.
    """

    @property
    def views(self) -> Sequence[memoryview | None]:
        """Memory for each page. None: the page is received and dropped, because it is held already,
        its writer is fenced, the store is full, or a page before it is missing.
        """
        ...

    def commit(self, index: int, checksum: int) -> None:
        """Make the page at `index` of the range visible to readers; the caller has received it into
        its view and verified its checksum.

        The caller does so in rising order of index, and not for pages without a view.
        """
        ...

    async def settle(self) -> None:
        """Make visible the pages that are not yet so; the caller has received all.

        Raises:
            TransferError: the pages cannot be kept.
        """
        ...

    def end(self) -> HeldPages:
        """End the range, once, after its last page or a failure: free the memory of uncommitted
        pages, and return what is held of the stream.
        """
        ...


# The file that has a page, and the page's offset in the file.
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
