"""Checkpoint store of a node, behind its page server. Everything runs on the event loop.

Slab of a checkpoint store: one file of shared memory with a slot per page, which outlives the
process that fills it.

A slot is a header and a page behind it. The header has a sealed record and the checksums of the
page's cells. A slot's memory is allocated before its first use. A record is written after its page,
and cleared before its slot is written again. So whenever the process is killed, a readable record
names a page that was complete, and the page's checksum verifies that it still is. The next process
builds its index from the headers.
"""

import asyncio
import logging
import os
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.frames import CHECKSUM_BYTES, cell_checksums, checksum, part_checksum
from kvrs.protocol.pages import TAG_BYTES, CheckpointClaim, HeldPages, Identity, StoreCode, Tag
from kvrs.transfer.peers import PinnedPages, PullRequest
from kvrs.transfer.sealed import FACTS_AT, MORE_BYTES, sealed, unsealed
from kvrs.transfer.shared_memory import Region, reserve
from kvrs.transfer.store.book import CheckpointBook, IncomingRange
from kvrs.transfer.store.directory import SLAB, StoreDirectory

log = logging.getLogger(__name__)

_FORMAT = 4  # Format number of a slab; pages in a slab of another format are not adopted.
_FIRST_SLOT_AT = 4096  # Offset of the first slot, behind the header of the file.
_ALIGNMENT_BYTES = 64  # Alignment of records and pages.
# Tag, number of the write, checksum of the page, and checksum of the checksums of its cells.
_RECORD = struct.Struct("<16sQQQ")
_RECORD_BYTES = 64
assert _RECORD.size + MORE_BYTES <= _RECORD_BYTES
assert TAG_BYTES == 16

# Bytes allocated at a time, which takes the kernel a millisecond.
_GROWTH_BYTES = 1 << 22
_PROGRESS_S = 1.0


class PageKind(msgspec.Struct, frozen=True):
    """Properties that all pages of a slab have in common."""

    fingerprint: str
    page_bytes: int
    page_cells: int = 1
    format: int = _FORMAT

    @classmethod
    def of(cls, engine: Identity) -> "PageKind":
        return cls(engine.fingerprint, engine.page_bytes, engine.page_cells)


class Slab:
    """Pages by the number of their slot. The caller ensures that no slot is read while written."""

    def __init__(self, descriptor: int, kind: PageKind, capacity_bytes: int) -> None:
        """Take over the descriptor, which is closed also if this raises.

        Raises:
            OSError: the file cannot have this size.
        """
        self.kind = kind
        self.slots = capacity_bytes // kind.page_bytes
        # Offset of the page within its slot.
        self._page_at = _aligned(_RECORD_BYTES + kind.page_cells * CHECKSUM_BYTES)
        self._slot_bytes = self._page_at + _aligned(kind.page_bytes)
        size_bytes = self._at(self.slots)
        try:
            # A file is never cut short: a read behind its end ends a process that has it mapped.
            if os.fstat(descriptor).st_size < size_bytes:
                os.ftruncate(descriptor, size_bytes)
        except OSError:
            os.close(descriptor)
            raise
        self.region = Region(descriptor)
        self.region.drop(size_bytes)
        self._bytes = memoryview(self.region.memory)
        self.grown = 0  # Slots below this number have allocated memory.
        self._writes = 0

    @classmethod
    def make(cls, directory: StoreDirectory, kind: PageKind, capacity_bytes: int) -> "Slab":
        """Make an empty slab in the place of an existing one. Raises OSError: the file cannot be
        made.
        """
        header = sealed(msgspec.json.encode(kind))
        assert len(header) <= _FIRST_SLOT_AT, "the fingerprint is too long"
        new = f"{SLAB}.new"
        descriptor = directory.open_own(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            reserve(descriptor, 0, _FIRST_SLOT_AT)
            os.pwrite(descriptor, header, 0)
        except OSError:
            os.close(descriptor)
            directory.unlink(new)
            raise
        slab = cls(descriptor, kind, capacity_bytes)
        directory.rename(new, SLAB)
        return slab

    @classmethod
    def open(cls, directory: StoreDirectory, capacity_bytes: int) -> "Slab | None":
        """Open the slab that an earlier process left, with as many slots as `capacity_bytes`
        allows; None: there is none that can be used. A useless slab is unlinked.
        """
        try:
            descriptor = directory.open_own(SLAB, os.O_RDWR)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("checkpoints are not adopted: %s", error)
            directory.unlink(SLAB)
            return None
        kind = None
        with suppress(msgspec.DecodeError):
            facts = unsealed(os.pread(descriptor, _FIRST_SLOT_AT, 0))
            kind = None if facts is None else msgspec.json.decode(facts, type=PageKind)
        if kind is None or kind.format != _FORMAT:
            log.warning("checkpoints are not adopted: torn, or of another format")
            os.close(descriptor)
            directory.unlink(SLAB)
            return None
        return cls(descriptor, kind, capacity_bytes)

    def adopt(self) -> list[tuple[int, Tag]]:
        """Verify the pages that an earlier process left; return slot and tag of each complete page,
        the oldest write first.
        """
        found: list[tuple[int, int, Tag]] = []
        torn = 0
        started_s = logged_s = time.monotonic()
        for slot in range(self.slots):
            # The record is read by `pread`, because a read through the mapping would allocate an
            # unused slot's memory.
            if not any(os.pread(self.region.descriptor, _RECORD_BYTES, self._at(slot))):
                continue
            self.grown = slot + 1
            if (page := self._verified(slot)) is not None:
                found.append(page)
            else:
                torn += 1
            if time.monotonic() - logged_s > _PROGRESS_S:
                logged_s = time.monotonic()
                log.info(
                    "verifying checkpoints",
                    extra={"pages": len(found), "for_s": round(logged_s - started_s, 1)},
                )
        if found or torn:
            log.info("checkpoints adopted", extra={"pages": len(found), "torn": torn})
        self._writes = max((write for write, _, _ in found), default=0)
        return [(slot, tag) for _, slot, tag in sorted(found)]

    def grow_to(self, slots: int) -> None:
        """Allocate memory for the slots below this number. Raises OSError: as `grow`."""
        while self.grown < slots:
            self.grow()

    def grow(self) -> None:
        """Allocate memory for the next slots, `_GROWTH_BYTES` or one slot; any thread may call
        this.

        Raises:
            OSError: no more memory. A write into an unallocated mapped page would kill the process,
                so memory is allocated here.
        """
        first = self.grown
        stop = min(self.slots, first + max(1, _GROWTH_BYTES // self._slot_bytes))
        start = self._at(first)
        reserve(self.region.descriptor, start, self._at(stop) - start)
        self.grown = max(self.grown, stop)

    def view(self, slot: int) -> memoryview:
        start = self.offset(slot)
        return self._bytes[start : start + self.kind.page_bytes]

    def offset(self, slot: int) -> int:
        """Offset of the slot's page in the file."""
        return self._at(slot) + self._page_at

    def cells(self, slot: int) -> memoryview:
        """Checksums of the cells of the slot's page, computed when the page was stored."""
        start = self._at(slot) + _RECORD_BYTES
        return self._bytes[start : start + self.kind.page_cells * CHECKSUM_BYTES]

    def clear(self, slot: int) -> None:
        """Clear a slot's record. The caller does so before the slot is written."""
        self._record(slot)[:] = bytes(_RECORD_BYTES)

    def write_record(self, slot: int, tag: Tag, page_checksum: int) -> None:
        """Write a slot's record. The caller does so after the page was written."""
        self._writes += 1
        cells = cell_checksums(self.view(slot), self.kind.page_cells)
        self.cells(slot)[:] = cells
        facts = _RECORD.pack(tag, self._writes, page_checksum, part_checksum(cells))
        block = sealed(facts, slot)
        self._record(slot)[: len(block)] = block

    def page_checksum(self, slot: int) -> int:
        """Return the checksum of the slot's page that `write_record` was given."""
        _, _, page_checksum, _ = _RECORD.unpack_from(self._bytes, self._at(slot) + FACTS_AT)
        return int(page_checksum)

    def _at(self, slot: int) -> int:
        return _FIRST_SLOT_AT + slot * self._slot_bytes

    def _record(self, slot: int) -> memoryview:
        return self._bytes[self._at(slot) : self._at(slot) + _RECORD_BYTES]

    def _verified(self, slot: int) -> tuple[int, int, Tag] | None:
        """Return write number, slot and tag if the slot has a complete, correct page; else None."""
        if (facts := unsealed(self._record(slot), slot)) is None or len(facts) != _RECORD.size:
            return None
        tag, write, page_checksum, of_cells = _RECORD.unpack(facts)
        if part_checksum(self.cells(slot)) != of_cells:
            return None
        return (write, slot, Tag(tag)) if checksum(self.view(slot)) == page_checksum else None


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


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
