"""The checkpoint store of a node, behind its page server. Everything runs on the event loop."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec import structs

from kvrs.ids import StreamId
from kvrs.protocol.page_messages import CheckpointClaim, HeldPages, Identity, StoreCode
from kvrs.protocol.tags import Tag
from kvrs.transfer.peers import PagePlace, PinnedPages, PullRequest
from kvrs.transfer.store.book import CheckpointBook, IncomingRange
from kvrs.transfer.store.directory import StoreDirectory, StoreState
from kvrs.transfer.store.segments import Segments, SlotLayout

log = logging.getLogger(__name__)

# About the pages that a few engines send at a time.
_AHEAD_SLOTS = 128


@dataclass(slots=True, eq=False)
class UnreportedChanges:
    """Changes that were not sent to one watcher yet."""

    streams: set[StreamId]
    denied: dict[StreamId, None] = field(default_factory=dict)

    def take(self) -> tuple[list[StreamId], list[StreamId]]:
        """Streams that changed, and streams that found no room; they count as sent then."""
        taken = list(self.streams), list(self.denied)
        self.streams.clear()
        self.denied.clear()
        return taken


@dataclass(frozen=True, slots=True)
class _Shelf:
    """Book and memory for pages of one fingerprint and size."""

    page_bytes: int
    book: CheckpointBook
    segments: Segments


class _Incoming:
    """Views into the slots of one range, until it ends."""

    def __init__(
        self, shelf: _Shelf, incoming: IncomingRange, ended: Callable[[StreamId, HeldPages], None]
    ) -> None:
        self._shelf = shelf
        self._range = incoming
        self._ended = ended
        self.views: list[memoryview | None] = [
            None if slot is None else shelf.segments.view(slot) for slot in incoming.slots
        ]

    def commit(self, index: int, checksum: int) -> None:
        slot = self._shelf.book.commit(self._range, index)
        if slot is not None:
            self._shelf.segments.write_record(slot, self._range.tags[index], checksum)

    async def settle(self) -> None:
        """Each page is visible since it came."""

    def end(self) -> HeldPages:
        self.views = []
        held = self._shelf.book.end(self._range)
        self._ended(self._range.stream, held)
        return held


class _NothingStored:
    """A range of which no page is stored."""

    def __init__(self, pages: int, held: HeldPages) -> None:
        self.views: list[memoryview | None] = [None] * pages
        self._held = held

    def commit(self, index: int, checksum: int) -> None:
        raise AssertionError("there is no view to commit")

    async def settle(self) -> None:
        """There is nothing to be seen."""

    def end(self) -> HeldPages:
        return self._held


class HostStore:
    """A `PageSource` and a `PageSink` over shared memory that outlives the process, until `clear`
    is called.
    """

    def __init__(
        self,
        directory: StoreDirectory,
        capacity_bytes: int,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Take over the pages that an earlier process left in the directory; all are read and
        verified.
        """
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._lease_s = lease_s
        self._clock = clock
        self._watchers: list[UnreportedChanges] = []
        self._is_short = False
        self._growing = asyncio.Event()
        left = directory.load_state() or StoreState(epoch=0)
        self._state = structs.replace(left, epoch=left.epoch + 1)
        # First, so that the next process does not take this epoch again, even if this one ends
        # here.
        directory.save_state(self._state)
        self._shelf = self._new_shelf() if self._state.page_bytes else None
        if self._shelf is None:
            directory.unlink_segments()
        else:
            self._shelf.book.adopt(self._shelf.segments.adopt())

    # State.

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model of these pages; empty before the first engine connected."""
        return self._state.fingerprint

    @property
    def page_bytes(self) -> int:
        return self._state.page_bytes

    @property
    def page_cells(self) -> int:
        return self._state.page_cells

    @property
    def reserved_bytes(self) -> int:
        return self._shelf.book.reserved_slots * self.page_bytes if self._shelf else 0

    @property
    def held_bytes(self) -> int:
        return self._shelf.book.held_slots * self.page_bytes if self._shelf else 0

    @property
    def checkpoints(self) -> int:
        return self._shelf.book.reservations if self._shelf else 0

    def held(self, stream: StreamId) -> int:
        """Leading pages of the stream that its reservation keeps here."""
        return self._shelf.book.held(stream) if self._shelf else 0

    @contextmanager
    def watched(self) -> Iterator[UnreportedChanges]:
        """Collect changes for a watcher, beginning with all present streams."""
        changes = UnreportedChanges(set(self._shelf.book.streams()) if self._shelf else set())
        self._watchers.append(changes)
        try:
            yield changes
        finally:
            self._watchers.remove(changes)

    # For the page server.

    def adopt(self, client: Identity) -> None:
        """Take over the fingerprint and page size of a client, unless something is reserved for
        others.
        """
        kind = (client.fingerprint, client.page_bytes, client.page_cells)
        if kind == (self.fingerprint, self.page_bytes, self.page_cells):
            return
        self.expire()
        if self.checkpoints:
            return
        # Connections that still read or write old pages refer to the old shelf; its memory is freed
        # with the last of them.
        state = StoreState(self._state.epoch, *kind)
        # First, for it may fail; segments of another kind than the state names are not adopted.
        self._directory.save_state(state)
        self._directory.unlink_segments()
        self._state = state
        self._shelf = self._new_shelf()
        log.info(
            "pages of a new kind",
            extra={"fingerprint": client.fingerprint, "page_bytes": client.page_bytes},
        )

    async def pin(self, request: PullRequest) -> PinnedPages:
        """Hard-pin the longest held prefix of the requested pages. Checkpoints have no partial
        pages.
        """
        shelf = self._shelf
        assert shelf is not None, "`adopt` comes before any request"
        slots = shelf.book.match(request.tags)
        segments = shelf.segments
        views = [segments.view(slot) for slot in slots]
        if request.part is not None:
            cells = [segments.cells(slot) for slot in slots]
            return PinnedPages(views, None, (shelf, slots), cells=cells)
        checksums = [segments.page_checksum(slot) for slot in slots]
        return PinnedPages(views, None, (shelf, slots), checksums)

    def unpin(self, pinned: PinnedPages) -> None:
        assert isinstance(pinned.token, tuple)
        shelf, slots = pinned.token
        assert isinstance(shelf, _Shelf)
        shelf.book.unpin(slots)

    def offer(
        self, claim: CheckpointClaim, reserved_bytes: int, tags: tuple[Tag, ...]
    ) -> HeldPages:
        """Reserve whole pages for `reserved_bytes`, until the lease that a proxy renews runs
        out.
        """
        shelf = self._shelf
        assert shelf is not None, "`adopt` comes before any request"
        need, until_s = -(-reserved_bytes // shelf.page_bytes), self._clock() + self._lease_s
        held = shelf.book.offer(claim, need, tags, until_s)
        if held.code is not StoreCode.OK:
            # Other reservations may have expired. To find out costs O(reservations), so only here.
            self.expire()
            held = shelf.book.offer(claim, need, tags, until_s)
        self._note(claim.stream, held)
        self._growing.set()
        return held

    def begin(
        self, claim: CheckpointClaim, first_page: int, tags: tuple[Tag, ...]
    ) -> "_Incoming | _NothingStored":
        shelf = self._shelf
        assert shelf is not None, "`adopt` comes before any request"
        incoming = shelf.book.begin(claim, first_page, tags)
        slots = [slot for slot in incoming.slots if slot is not None]
        try:
            shelf.segments.grow_to(max(slots, default=-1) + 1)
        except OSError as error:
            self._log_short(error)
            held = HeldPages(StoreCode.FULL, shelf.book.end(incoming).pages)
            self._note(claim.stream, held)
            return _NothingStored(len(tags), held)
        self._is_short = False
        self._growing.set()
        for slot in slots:
            shelf.segments.clear(slot)
        return _Incoming(shelf, incoming, self._note)

    def places(self, pinned: PinnedPages) -> list[PagePlace]:
        assert isinstance(pinned.token, tuple)
        shelf, slots = pinned.token
        return [shelf.segments.place(slot) for slot in slots]

    async def grow_ahead(self) -> None:
        """Allocate memory for pages before they arrive, off the event loop, until cancelled: the
        system takes too long to clear it for the event loop to wait.
        """
        while True:
            await self._growing.wait()
            self._growing.clear()
            try:
                while (shelf := self._shelf) is not None and shelf.book.reservations:
                    ahead = min(shelf.book.used_slots + _AHEAD_SLOTS, shelf.book.capacity_slots)
                    growth = shelf.segments.next_growth(ahead)
                    if growth is None:
                        break
                    await asyncio.to_thread(growth.allocate)
                    shelf.segments.grown(growth)
            except OSError as error:
                self._log_short(error)  # Pages that arrive now will raise it again.

    # For proxies and timers.

    def renew(self, streams: Iterable[StreamId], lease_s: float) -> list[StreamId]:
        """Extend reservations. Returns the streams that have none."""
        return (
            self._shelf.book.renew(streams, self._clock() + lease_s)
            if self._shelf
            else list(streams)
        )

    def release(self, streams: Iterable[StreamId], lease_s: float) -> None:
        """End those reservations, and fence their writers' late offers for `lease_s`."""
        ended = list(streams)
        if self._shelf:
            self._shelf.book.release(ended, self._clock() + lease_s)
        _note_all(self._watchers, ended)

    def expire(self) -> None:
        """End every reservation that was not renewed in time."""
        if self._shelf:
            _note_all(self._watchers, self._shelf.book.expire(self._clock()))

    def clear(self) -> None:
        """Delete everything: a clean end leaves nothing to adopt."""
        self._shelf = None
        self._directory.clear()

    def check(self) -> None:
        """Assert that the book is right. O(slots)."""
        if self._shelf:
            self._shelf.book.check()

    def _new_shelf(self) -> _Shelf:
        layout = SlotLayout(
            self._state.page_bytes,
            self._capacity_bytes // self._state.page_bytes,
            self._state.fingerprint,
            self._state.page_cells,
        )
        return _Shelf(
            layout.page_bytes, CheckpointBook(layout.slots), Segments(self._directory, layout)
        )

    def _log_short(self, error: OSError) -> None:
        if not self._is_short:
            log.error(
                "no memory for checkpoints: %s", error, extra={"directory": self._directory.path}
            )
        self._is_short = True

    def _note(self, stream: StreamId, held: HeldPages) -> None:
        for changes in self._watchers:
            changes.streams.add(stream)
            if held.code is StoreCode.FULL:
                changes.denied[stream] = None
            elif held.code is StoreCode.OK:
                # Another of its writers has found room since: prefill and decode both make offers.
                changes.denied.pop(stream, None)


def _note_all(watchers: Iterable[UnreportedChanges], streams: Iterable[StreamId]) -> None:
    for changes in watchers:
        changes.streams.update(streams)
