"""Pages that other instances send for their streams, kept in this one's pool (KevlarFlow's replicas
at a peer): a stream that comes here after a loss finds them as those of its own cache.

What a page has in it follows from its tag, and senders have the cluster's secret and the same
fingerprint, so a late sender brings what is true all the same: no attempt has to be fenced.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrs.engine.staging import PagePool, StagedPages
from kvrs.ids import StreamId
from kvrs.protocol.page_messages import CheckpointClaim, HeldPages, Identity, StoreCode
from kvrs.protocol.tags import Tag
from kvrs.scheduling.pages import PageManager

_MAX_STREAMS = (
    4096  # Whose tags are known; beyond it the one that was quiet for longest is dropped.
)
_REPORTED_S = 2.0  # A change is in all reports of so long: proxies read them a few times a second.


@dataclass(slots=True)
class _Known:
    """A stream of another instance: its tags, and how many leading ones were here at the last
    look.
    """

    tags: list[Tag] = field(default_factory=list)
    held: int = 0


class PeerReplicas:
    """The `PageSink` of an instance. All methods run on its event loop."""

    def __init__(
        self,
        pages: PageManager,
        pool: PagePool,
        share: float,
        released: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`share`: of the pool's pages at most so many are replicas."""
        self._pages, self._pool = pages, pool
        self._released, self._clock = released, clock
        pages.replicas.most = int(share * pages.pages)
        self._known: OrderedDict[StreamId, _Known] = OrderedDict()
        self._changed_s: dict[StreamId, float] = {}

    # What the page server calls.

    def adopt(self, client: Identity) -> None:
        """The fingerprints are compared behind this."""

    def offer(self, claim: CheckpointClaim, reserved_bytes: int, tags: Sequence[Tag]) -> HeldPages:
        if not self._pages.replicas.most:
            return HeldPages(StoreCode.FULL, 0)
        self._know(claim.stream, 0, tags)
        self._known[claim.stream].held = 0  # Looked at anew, whatever has become of its pages.
        return self.held(claim.stream)

    def begin(
        self, claim: CheckpointClaim, first_page: int, tags: Sequence[Tag]
    ) -> "IncomingPages":
        has_gap = first_page > self.held(claim.stream).pages
        self._know(claim.stream, first_page, tags)
        taken: list[int | None] = []
        for tag in tags:
            page = None
            if not has_gap and not self._pages.holds(tag):
                page = self._pages.allocate_replica(claim.stream)
                has_gap = page is None
            taken.append(page)
        return IncomingPages(self, self._pages, self._pool, claim.stream, tags, taken)

    # What a range calls.

    def arrived(self, pages: Sequence[int], stream: StreamId) -> HeldPages:
        """These are not written any more."""
        self._pages.release(pages)
        self._released()
        self._changed_s[stream] = self._clock()
        return self.held(stream)

    # What reports say.

    def held(self, stream: StreamId) -> HeldPages:
        """How many leading pages of the stream are here. Of those that own streams have used since
        some may be gone: what is missing then is computed.
        """
        if (known := self._known.get(stream)) is None:
            return HeldPages(StoreCode.OK, 0)
        while known.held < len(known.tags) and self._pages.holds(known.tags[known.held]):
            known.held += 1
        return HeldPages(StoreCode.OK, known.held)

    def changed(self) -> Mapping[StreamId, int]:
        """Leading pages of the streams whose replicas have changed within the last seconds."""
        now_s, lost = self._clock(), self._pages.replicas.lost
        for stream in lost:
            if (known := self._known.get(stream)) is not None:
                known.held, self._changed_s[stream] = 0, now_s
        lost.clear()
        for stream, at_s in [*self._changed_s.items()]:
            if at_s < now_s - _REPORTED_S:
                del self._changed_s[stream]
        return {stream: self.held(stream).pages for stream in self._changed_s}

    def _know(self, stream: StreamId, first_page: int, tags: Sequence[Tag]) -> None:
        known = self._known.setdefault(stream, _Known())
        self._known.move_to_end(stream)
        if first_page <= len(known.tags):
            known.tags[first_page:] = tags
            known.held = min(known.held, first_page)
        while len(self._known) > _MAX_STREAMS:
            self._known.popitem(last=False)


class IncomingPages:
    """A range of pages on its way into the pool."""

    def __init__(
        self,
        replicas: PeerReplicas,
        pages: PageManager,
        pool: PagePool,
        stream: StreamId,
        tags: Sequence[Tag],
        taken: Sequence[int | None],
    ) -> None:
        """`taken`: of each tag the page that it comes into; None: it is dropped."""
        self._replicas, self._pages, self._stream = replicas, pages, stream
        self._taken = [page for page in taken if page is not None]
        self._tags = [tag for tag, page in zip(tags, taken, strict=True) if page is not None]
        self._staged: StagedPages = pool.stage(self._taken)
        views = iter(self._staged.views)
        self.views = [None if page is None else next(views) for page in taken]
        self._right = 0  # Leading pages whose checksums are right.

    def commit(self, index: int, checksum: int) -> None:
        self._right += 1

    async def settle(self) -> None:
        """Raises TransferError: the pool is gone, or has lost cells of these."""
        await self._staged.restore(self._right)
        for page, tag in zip(self._taken[: self._right], self._tags, strict=False):
            self._pages.register(page, tag)

    def end(self) -> HeldPages:
        self.views = []
        self._staged.free()
        return self._replicas.arrived(self._taken, self._stream)
