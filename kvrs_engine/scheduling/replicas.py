"""The book of the streams of other instances whose pages this instance keeps as replicas.

The pages themselves, and the order of their eviction, are in `replica_pages.py`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrs.ids import StreamId
from kvrs.protocol.pages import HeldPages, StoreCode, Tag
from kvrs_engine.scheduling.page_parts import Cells
from kvrs_engine.scheduling.pages import PageManager

_MAX_STREAMS = 4096  # Limit of streams with known tags; the least recently active one is dropped.
_REPORTED_S = 2.0  # Time for which reports repeat a change; proxies read them several times.


@dataclass(slots=True)
class _Known:
    """A stream of another instance."""

    tags: list[Tag] = field(default_factory=list)
    # Number of leading pages held at the last check, by part; None: whole pages.
    held: dict[Cells | None, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaRun:
    """An arriving range of pages, or of the given cells of these pages."""

    stream: StreamId
    tags: Sequence[Tag]
    taken: Sequence[int | None]  # Destination page of each tag; None: the data is dropped.
    cells: Cells | None = None


class ReplicaBook:
    """Accepts replica pages from other instances and reports them.

    The parts of a page arrive separately, each from the host of its pipeline stage. A page is found
    and reported once it is whole; its parts may be lent before.

    A page's tag determines its content, and senders have the cluster's secret and the same
    fingerprint, so pages of a late sender are right too: no attempt has to be fenced.
    """

    def __init__(
        self,
        pool: PageManager,
        share: float,
        clock: Callable[[], float],
        whole: Cells = frozenset(),
    ) -> None:
        """`share` limits the part of the pool for replicas; `whole` has all cells of a page, if
        pages arrive in parts.
        """
        self._pool, self._clock, self._whole = pool, clock, whole
        pool.replicas.most = int(share * pool.pages)
        self._known: OrderedDict[StreamId, _Known] = OrderedDict()
        self._changed_s: dict[StreamId, float] = {}

    def offer(self, stream: StreamId, tags: Sequence[Tag], cells: Cells | None = None) -> HeldPages:
        """Answer an offer of the stream's pages (or of these cells): the number already held."""
        if not self._pool.replicas.most:
            return HeldPages(StoreCode.FULL, 0)
        self._know(stream, 0, tags)
        self._known[stream].held.clear()  # Count again: pages may be gone.
        return self.held(stream, cells)

    def begin(
        self,
        stream: StreamId,
        first_page: int,
        tags: Sequence[Tag],
        cells: Cells | None = None,
        most: int | None = None,
    ) -> ReplicaRun:
        """Allocate pages for arriving data, at most `most`, up to the first that cannot be
        allocated; data after a gap is dropped.
        """
        self._look_at_lost()
        has_gap = first_page > self.held(stream, cells).pages
        self._know(stream, first_page, tags)
        taken: list[int | None] = []
        left = len(tags) if most is None else most
        for tag in tags:
            page = None
            if not has_gap and not self._has(tag, cells):
                if left and cells is None:
                    page = self._pool.allocate_replica(stream)
                elif left:
                    page = self._pool.parts.expect(stream, tag, self._whole)
                has_gap = page is None
                left -= 1
            taken.append(page)
        return ReplicaRun(stream, tags, taken, cells)

    def arrived(self, run: ReplicaRun, index: int) -> None:
        """Note that a page of the run, or its part, has arrived."""
        page = run.taken[index]
        assert page is not None
        if run.cells is None:
            self._pool.register(page, run.tags[index])
        else:
            self._pool.parts.brought(page, run.tags[index], run.cells)

    def end(self, run: ReplicaRun) -> HeldPages:
        """End a run, free the pages that did not arrive, and return the number of held pages."""
        taken = [page for page in run.taken if page is not None]
        if run.cells is None:
            self._pool.release(taken)
        for page in () if run.cells is None else reversed(taken):
            self._pool.parts.leave(page, self._whole)
        self._changed_s[run.stream] = self._clock()
        return self.held(run.stream, run.cells)

    def held(self, stream: StreamId, cells: Cells | None = None) -> HeldPages:
        """Return the number of leading pages of the stream that are held, or have these cells. Some
        may be gone if own streams have used them.
        """
        if (known := self._known.get(stream)) is None:
            return HeldPages(StoreCode.OK, 0)
        held = known.held.get(cells, 0)
        while held < len(known.tags) and self._has(known.tags[held], cells):
            held += 1
        known.held[cells] = held
        return HeldPages(StoreCode.OK, held)

    def changed(self) -> Mapping[StreamId, int]:
        """Return the held leading pages of streams that have changed within `_REPORTED_S`."""
        self._look_at_lost()
        now_s = self._clock()
        for stream, at_s in [*self._changed_s.items()]:
            if at_s < now_s - _REPORTED_S:
                del self._changed_s[stream]
        return {stream: self.held(stream).pages for stream in self._changed_s}

    def _look_at_lost(self) -> None:
        lost = self._pool.replicas.lost
        for stream in lost:
            if (known := self._known.get(stream)) is not None:
                self._changed_s[stream] = self._clock()
                known.held.clear()
        lost.clear()

    def _has(self, tag: Tag, cells: Cells | None) -> bool:
        return self._pool.holds(tag) if cells is None else self._pool.parts.has(tag, cells)

    def _know(self, stream: StreamId, first_page: int, tags: Sequence[Tag]) -> None:
        known = self._known.setdefault(stream, _Known())
        self._known.move_to_end(stream)
        # Parts of a page arrive separately: another part may have ended further ahead.
        overlap = known.tags[first_page : first_page + len(tags)]
        if overlap == [*tags[: len(overlap)]] and first_page <= len(known.tags):
            known.tags += tags[len(overlap) :]
        elif first_page <= len(known.tags):
            known.tags[first_page:] = tags
            known.held = {part: min(held, first_page) for part, held in known.held.items()}
        while len(self._known) > _MAX_STREAMS:
            self._known.popitem(last=False)
