"""Checkpoint store of a node, behind its page server. Everything runs on the event loop."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.pages import CheckpointClaim, HeldPages, Identity, StoreCode, Tag
from kvrs.transfer.peers import PinnedPages, PullRequest
from kvrs.transfer.store.book import CheckpointBook, IncomingRange
from kvrs.transfer.store.directory import StoreDirectory
from kvrs.transfer.store.slab import PageKind, Slab

log = logging.getLogger(__name__)

# Slots whose memory is allocated before their use: about the pages that a few engines send at a
# time.
_AHEAD_SLOTS = 128

_NO_PAGES = PageKind("", 0)


@dataclass(slots=True, eq=False)
class UnreportedChanges:
    """Changed streams, and denied streams, that were not yet reported to one watcher."""

    streams: set[StreamId]
    denied: dict[StreamId, None] = field(default_factory=dict)

    def take(self) -> tuple[list[StreamId], list[StreamId]]:
        """Return the changed streams, and the streams that found no room; both then count as
        reported.
        """
        taken = list(self.streams), list(self.denied)
        self.streams.clear()
        self.denied.clear()
        return taken


class _Shelf(NamedTuple):
    """Book and slab for pages of one kind: the slots' contents and their memory."""

    book: CheckpointBook
    slab: Slab


class _Incoming:
    """Memory for the arriving pages of one range, until the range ends."""

    def __init__(self, store: "HostStore", shelf: _Shelf, incoming: IncomingRange) -> None:
        self._store, self._shelf = store, shelf
        self._range = incoming
        self.views: list[memoryview | None] = [
            None if slot is None else shelf.slab.view(slot) for slot in incoming.slots
        ]

    def commit(self, index: int, checksum: int) -> None:
        slot = self._shelf.book.commit(self._range, index)
        if slot is not None:
            self._shelf.slab.write_record(slot, self._range.tags[index], checksum)

    async def settle(self) -> None:
        """Do nothing: each page has been visible since its arrival."""

    def end(self) -> HeldPages:
        self.views = []
        held = self._shelf.book.end(self._range)
        self._store.note(self._range.stream, held)
        return held


class HostStore:
    """A `PageSource` and a `PageSink` over shared memory that outlives the process, until `clear`
    is called.
    """

    def __init__(
        self,
        holder: InstanceId,
        node: NodeId,
        directory: StoreDirectory,
        capacity_bytes: int,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        """Adopt the pages that an earlier process left in the directory; all are read and verified.
        `holder`: id of the node's agent, under which it holds checkpoints.

        Raises:
            OSError: the directory cannot be used.
        """
        self._holder, self._node = holder, node
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._lease_s = lease_s
        self._clock = clock
        self._watchers: list[UnreportedChanges] = []
        self._is_short = False
        self._growing = asyncio.Event()
        # The wall clock gives later processes higher epochs. No file could record earlier epochs: a
        # clean end leaves no file, nor does a restart of the machine.
        self.epoch = time.time_ns() // 1_000_000
        self._shelf: _Shelf | None = None  # Book and memory; None: no engine has connected yet.
        if (slab := Slab.open(directory, capacity_bytes)) is not None:
            self._shelf = _Shelf(CheckpointBook(slab.slots), slab)
            self._shelf.book.adopt(slab.adopt())

    # The methods below read the store's state.

    @property
    def kind(self) -> PageKind:
        """Kind of the stored pages; `_NO_PAGES` before the first engine has connected."""
        return self._shelf.slab.kind if self._shelf else _NO_PAGES

    def identity(self) -> Identity:
        """Return the agent's identity that peers get at this moment."""
        return Identity(
            instance=self._holder,
            node=self._node,
            epoch=self.epoch,
            fingerprint=self.kind.fingerprint,
            page_bytes=self.kind.page_bytes,
            page_cells=self.kind.page_cells,
        )

    @property
    def reserved_bytes(self) -> int:
        return self._shelf.book.reserved_slots * self.kind.page_bytes if self._shelf else 0

    @property
    def held_bytes(self) -> int:
        return self._shelf.book.held_slots * self.kind.page_bytes if self._shelf else 0

    @property
    def checkpoints(self) -> int:
        return self._shelf.book.reservations if self._shelf else 0

    def held(self, stream: StreamId) -> int:
        """Return the number of the stream's complete leading pages; 0: none, or no reservation."""
        return self._shelf.book.held(stream) if self._shelf else 0

    @contextmanager
    def watched(self) -> Iterator[UnreportedChanges]:
        """Collect changes for a watcher during the block, beginning with all streams with a
        reservation.
        """
        changes = UnreportedChanges(set(self._shelf.book.streams()) if self._shelf else set())
        self._watchers.append(changes)
        try:
            yield changes
        finally:
            self._watchers.remove(changes)

    # The page server calls the methods below.

    def adopt(self, client: Identity) -> None:
        """Adopt a client's fingerprint and page size, and drop pages of another kind; keep the
        present kind while reservations exist.
        """
        kind = PageKind.of(client)
        if kind == self.kind:
            return
        self.expire()
        if self.checkpoints:
            return
        # Connections that still read or write old pages keep the old shelf, whose memory is freed
        # with the last of them.
        slab = Slab.make(self._directory, kind, self._capacity_bytes)
        self._shelf = _Shelf(CheckpointBook(slab.slots), slab)
        log.info(
            "pages of a new kind",
            extra={"fingerprint": client.fingerprint, "page_bytes": client.page_bytes},
        )

    @asynccontextmanager
    async def pinned(self, request: PullRequest) -> AsyncIterator[PinnedPages]:
        """Pin the longest held prefix of the requested pages. Checkpoints have no partial pages."""
        shelf = self._shelf
        assert shelf is not None, "`adopt` comes before any request"
        slab, slots = shelf.slab, shelf.book.match(request.tags)
        whole = request.part is None
        try:
            yield PinnedPages(
                [slab.view(slot) for slot in slots],
                checksums=[slab.page_checksum(slot) for slot in slots] if whole else (),
                cells=() if whole else [slab.cells(slot) for slot in slots],
                region=slab.region,
                offsets=[slab.offset(slot) for slot in slots],
            )
        finally:
            shelf.book.unpin(slots)

    def offer(
        self, claim: CheckpointClaim, reserved_bytes: int, tags: tuple[Tag, ...]
    ) -> HeldPages:
        """Reserve whole pages for `reserved_bytes`, until the lease expires; a proxy renews it."""
        shelf = self._shelf
        assert shelf is not None, "`adopt` comes before any request"
        need, until_s = (
            -(-reserved_bytes // shelf.slab.kind.page_bytes),
            self._clock() + self._lease_s,
        )
        held = shelf.book.offer(claim, need, tags, until_s)
        if held.code is not StoreCode.OK:
            # Other reservations may have expired. The check costs O(reservations), so it is made
            # only here.
            self.expire()
            held = shelf.book.offer(claim, need, tags, until_s)
        self.note(claim.stream, held)
        self._growing.set()
        return held

    def begin(self, claim: CheckpointClaim, first_page: int, tags: tuple[Tag, ...]) -> _Incoming:
        shelf = self._shelf
        assert shelf is not None, "`adopt` comes before any request"
        incoming = shelf.book.begin(claim, first_page, tags)
        slots = [slot for slot in incoming.slots if slot is not None]
        try:
            shelf.slab.grow_to(max(slots, default=-1) + 1)
        except OSError as error:
            self._log_short(error)
            shelf.book.refuse(incoming)
        else:
            self._is_short = False
            self._growing.set()
            for slot in slots:
                shelf.slab.clear(slot)
        return _Incoming(self, shelf, incoming)

    async def grow_ahead(self) -> None:
        """Allocate memory for pages before they arrive, in a thread, until cancelled: the kernel's
        clearing of memory would delay arriving pages.
        """
        while True:
            await self._growing.wait()
            self._growing.clear()
            try:
                while (shelf := self._shelf) is not None and shelf.book.reservations:
                    ahead = min(shelf.book.used_slots + _AHEAD_SLOTS, shelf.slab.slots)
                    if shelf.slab.grown >= ahead:
                        break
                    await asyncio.to_thread(shelf.slab.grow)
            except OSError as error:
                # Pages that arrive later meet the same error, and are refused.
                self._log_short(error)

    # Proxies and timers call the methods below.

    def renew(self, streams: Iterable[StreamId], lease_s: float) -> list[StreamId]:
        """Extend reservations; return the streams without one."""
        return (
            self._shelf.book.renew(streams, self._clock() + lease_s)
            if self._shelf
            else list(streams)
        )

    def release(self, streams: Iterable[StreamId], lease_s: float) -> None:
        """End reservations, and fence their writers' late offers for `lease_s`."""
        ended = list(streams)
        if self._shelf:
            self._shelf.book.release(ended, self._clock() + lease_s)
        _note_all(self._watchers, ended)

    def expire(self) -> None:
        """End every reservation that was not renewed in time."""
        if self._shelf:
            _note_all(self._watchers, self._shelf.book.expire(self._clock()))

    def clear(self) -> None:
        """Delete all pages and the files: after a clean end the next agent has nothing to adopt."""
        self._shelf = None
        self._directory.clear()

    def check(self) -> None:
        """Assert that the book's indexes agree. O(slots)."""
        if self._shelf:
            self._shelf.book.check()

    def _log_short(self, error: OSError) -> None:
        if not self._is_short:
            log.error(
                "no memory for checkpoints: %s", error, extra={"directory": self._directory.path}
            )
        self._is_short = True

    def note(self, stream: StreamId, held: HeldPages) -> None:
        """Note the answer to a stream's writer as a change for all watchers."""
        for changes in self._watchers:
            changes.streams.add(stream)
            if held.code is StoreCode.FULL:
                changes.denied[stream] = None
            elif held.code is StoreCode.OK:
                # The stream's other writer may have found room: a prefill and a decode instance
                # both make offers.
                changes.denied.pop(stream, None)


def _note_all(watchers: Iterable[UnreportedChanges], streams: Iterable[StreamId]) -> None:
    for changes in watchers:
        changes.streams.update(streams)
