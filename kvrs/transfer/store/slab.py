"""Slab of a checkpoint store: one file of shared memory with a slot per page, which outlives the
process that fills it.

A slot is a header and a page behind it. The header has a sealed record and the checksums of the
page's cells. A slot's memory is allocated before its first use. A record is written after its page,
and cleared before its slot is written again. So whenever the process is killed, a readable record
names a page that was complete, and the page's checksum verifies that it still is. The next process
builds its index from the headers.
"""

import logging
import os
import struct
import time
from contextlib import suppress

import msgspec

from kvrs.protocol.frames import CHECKSUM_BYTES, cell_checksums, checksum, part_checksum
from kvrs.protocol.pages import TAG_BYTES, Identity, Tag
from kvrs.transfer.shared_memory.regions import Region, reserve
from kvrs.transfer.shared_memory.sealed import FACTS_AT, MORE_BYTES, sealed, unsealed
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
