"""Pages of other instances' streams that a pool keeps for them, and the order in which it gives
them up (KevlarFlow: the replica of a neighbour, evicted before the own cache).

The stream that has brought nothing for longest loses its pages first, and each its last page first:
what is left of a history is always its front. A page that the own streams have used is a page of
the own cache, and no replica any more.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrs.ids import StreamId
from kvrs.protocol.page_messages import HeldPages, StoreCode
from kvrs.protocol.tags import Tag
from kvrs_engine.scheduling.page_parts import Cells, PageParts

_MAX_STREAMS = (
    4096  # Whose tags are known; beyond it the one that was quiet for longest is dropped.
)
_REPORTED_S = 2.0  # A change is in all reports of so long: proxies read them a few times a second.


class ReplicaPages:
    """Which pages are replicas, and of which stream. At most `most` are kept; 0: none."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.dropped = 0  # Given up since the start.
        # Streams that have lost pages since the last report.
        self.lost: dict[StreamId, None] = {}
        self._stream_of: dict[int, StreamId] = {}
        # Of each stream its pages as they came, also those that still arrive: True has no pin.
        self._pages: OrderedDict[StreamId, dict[int, bool]] = OrderedDict()
        self._idle = 0

    def __len__(self) -> int:
        return len(self._stream_of)

    def __contains__(self, page: int) -> bool:
        """The page is a replica without a pin."""
        stream = self._stream_of.get(page)
        return stream is not None and self._pages[stream][page]

    @property
    def idle(self) -> int:
        """How many have no pin: all but those that still arrive."""
        return self._idle

    def __bool__(self) -> bool:
        """There is one without a pin."""
        return bool(self._idle)

    def bring(self, page: int, stream: StreamId) -> None:
        """The stream's next page arrives in this one, which has a pin until it has."""
        assert page not in self._stream_of
        self._stream_of[page] = stream
        self._pages.setdefault(stream, {})[page] = False
        self._pages.move_to_end(stream)

    def settle(self, page: int) -> bool:
        """The page has lost its last pin. Returns whether it is a replica."""
        if (stream := self._stream_of.get(page)) is None:
            return False
        self._pages[stream][page] = True
        self._idle += 1
        return True

    def unsettle(self, page: int) -> None:
        """The page has a pin again, since more of it arrives."""
        if (stream := self._stream_of.get(page)) is not None:
            self._pages[stream][page] = False
            self._idle -= 1

    def leave(self, page: int) -> None:
        """The page is an own stream's, or did not arrive: no replica, if it was one."""
        if (stream := self._stream_of.pop(page, None)) is None:
            return
        pages = self._pages[stream]
        self._idle -= pages.pop(page)
        if not pages:
            del self._pages[stream]

    def victim(self, besides: StreamId | None = None) -> int | None:
        """Give up the page that is to go first, of a stream other than `besides`."""
        for stream, pages in self._pages.items():
            if stream == besides:
                continue
            # Those that still arrive are the last, and few.
            page = next((page for page in reversed(pages) if pages[page]), None)
            if page is not None:
                self.leave(page)
                self.dropped += 1
                self.lost[stream] = None
                return page
        return None

    def clear(self) -> list[int]:
        """No page is a replica any more; returns those without a pin."""
        idle = [page for pages in self._pages.values() for page in pages if pages[page]]
        self.lost |= dict.fromkeys(self._pages)
        self._pages.clear()
        self._stream_of.clear()
        self._idle = 0
        return idle

    def check(self) -> None:
        """Assert that the books agree."""
        assert all(self._pages.values()), "a stream without pages"
        listed = {page: stream for stream, pages in self._pages.items() for page in pages}
        assert listed == self._stream_of, "a replica of two streams, or of none"
        assert self._idle == sum(sum(pages.values()) for pages in self._pages.values())
        assert len(self) <= self.most, "more replicas than are allowed"


class ReplicaPool(Protocol):
    """The pages of an instance; `kvrs_engine.scheduling.pages.PageManager` is one."""

    pages: int
    replicas: ReplicaPages
    parts: PageParts

    def holds(self, tag: Tag) -> bool: ...
    def allocate_replica(self, stream: StreamId) -> int | None: ...
    def register(self, page: int, tag: Tag) -> int: ...
    def release(self, pages: Sequence[int]) -> None: ...


@dataclass(slots=True)
class _Known:
    """A stream of another instance: its tags, and how many leading ones were here at the last
    look.
    """

    tags: list[Tag] = field(default_factory=list)
    held: dict[Cells | None, int] = field(default_factory=dict)  # By the part; None: whole ones.


@dataclass(frozen=True, slots=True)
class ReplicaRun:
    """A range of pages that arrives, or of these cells of them."""

    stream: StreamId
    tags: Sequence[Tag]
    taken: Sequence[int | None]  # Of each tag the page that it comes into; None: it is dropped.
    cells: Cells | None = None


class ReplicaBook:
    """The answers of an instance to those that send it pages, and its reports of them.

    Parts of a page come apart from each other, those of a stage from the host that computes it. A
    page is found and reported once it has all; before, what has come may be lent.

    What a page has in it follows from its tag, and senders have the cluster's secret and the same
    fingerprint, so a late sender brings what is true all the same: no attempt has to be fenced.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        share: float,
        clock: Callable[[], float],
        whole: Cells = frozenset(),
    ) -> None:
        """`share`: of the pool's pages at most so many are replicas; `whole`: all cells of a page,
        where parts come.
        """
        self._pool, self._clock, self._whole = pool, clock, whole
        pool.replicas.most = int(share * pool.pages)
        self._known: OrderedDict[StreamId, _Known] = OrderedDict()
        self._changed_s: dict[StreamId, float] = {}

    def offer(self, stream: StreamId, tags: Sequence[Tag], cells: Cells | None = None) -> HeldPages:
        """The stream's pages are to come, or these cells of each, as far as they are not here."""
        if not self._pool.replicas.most:
            return HeldPages(StoreCode.FULL, 0)
        self._know(stream, 0, tags)
        self._known[stream].held.clear()  # Looked at anew, whatever has become of its pages.
        return self.held(stream, cells)

    def begin(
        self,
        stream: StreamId,
        first_page: int,
        tags: Sequence[Tag],
        cells: Cells | None = None,
        most: int | None = None,
    ) -> ReplicaRun:
        """Take pages for these, up to the first for which there is none, at most so many; nothing
        behind a gap.
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
        """The whole page is in its place, and may be found; or its part is."""
        page = run.taken[index]
        assert page is not None
        if run.cells is None:
            self._pool.register(page, run.tags[index])
        else:
            self._pool.parts.brought(page, run.tags[index], run.cells)

    def end(self, run: ReplicaRun) -> HeldPages:
        """Nothing of it is written any more; what has not arrived is free."""
        taken = [page for page in run.taken if page is not None]
        if run.cells is None:
            self._pool.release(taken)
        for page in () if run.cells is None else reversed(taken):
            self._pool.parts.leave(page, self._whole)
        self._changed_s[run.stream] = self._clock()
        return self.held(run.stream, run.cells)

    def held(self, stream: StreamId, cells: Cells | None = None) -> HeldPages:
        """How many leading pages of the stream are here, or have these cells. Of those that own
        streams have used since some may be gone: what is missing then is computed.
        """
        if (known := self._known.get(stream)) is None:
            return HeldPages(StoreCode.OK, 0)
        held = known.held.get(cells, 0)
        while held < len(known.tags) and self._has(known.tags[held], cells):
            held += 1
        known.held[cells] = held
        return HeldPages(StoreCode.OK, held)

    def changed(self) -> Mapping[StreamId, int]:
        """Leading pages of the streams whose replicas have changed within the last seconds."""
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
        # Parts of a page come apart: of those that are known, another one may have been the last.
        overlap = known.tags[first_page : first_page + len(tags)]
        if overlap == [*tags[: len(overlap)]] and first_page <= len(known.tags):
            known.tags += tags[len(overlap) :]
        elif first_page <= len(known.tags):
            known.tags[first_page:] = tags
            known.held = {part: min(held, first_page) for part, held in known.held.items()}
        while len(self._known) > _MAX_STREAMS:
            self._known.popitem(last=False)
