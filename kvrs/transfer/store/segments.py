"""Slots of one page each in shared memory: files that outlive the process that fills them.

A segment is a file of fixed size: a header, a table with one record per slot, one with the
checksums of each slot's cells, and the pages. Memory is given to a slot when it is used for the
first time. A record is written after its page and the checksums of its cells, is sealed, and is
cleared before its slot is written again. So at any moment of a kill, a record that can be read
names a page that was whole, and the page's own checksum verifies that it still is.
"""

import logging
import os
import struct
import time
from dataclasses import dataclass

from kvrs.protocol.cell_checksums import cell_checksums, part_checksum
from kvrs.protocol.frames import CHECKSUM_BYTES, checksum
from kvrs.protocol.tags import TAG_BYTES, Tag
from kvrs.transfer.peers import PagePlace
from kvrs.transfer.shared_memory.regions import Region, reserve
from kvrs.transfer.shared_memory.sealed import (
    FACTS_AT,
    MORE_BYTES,
    SealedBlocks,
    kind_of,
    sealed,
)
from kvrs.transfer.store.directory import StoreDirectory

log = logging.getLogger(__name__)

# A segment takes two file descriptors: few enough of them, and a torn one loses little.
_SEGMENTS = 64
_MIN_SEGMENT_BYTES = 1 << 22

# Slots get their memory in steps of about this much, which take the kernel a millisecond.
_GROWTH_BYTES = 1 << 22

_BLOCK_BYTES = 4096  # Pages begin at multiples of it.
_FORMAT = 3  # Of segments; those of other formats are not adopted.
# tag, number of the write, checksums of the page and of those of its cells
_RECORD = struct.Struct("<16sQQQ")
_RECORD_BYTES = 64
assert _RECORD.size + MORE_BYTES <= _RECORD_BYTES
assert TAG_BYTES == 16

_PROGRESS_S = 1.0


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layout of slots in segments. Segments of another layout are not adopted."""

    page_bytes: int
    slots: int  # Of the whole store.
    fingerprint: str
    page_cells: int = 1

    @property
    def slots_per_segment(self) -> int:
        return max(1, -(-self.slots // _SEGMENTS), _MIN_SEGMENT_BYTES // self.page_bytes)

    @property
    def cells_bytes(self) -> int:
        """Size of the checksums of one slot's cells."""
        return self.page_cells * CHECKSUM_BYTES

    @property
    def cells_at(self) -> int:
        return _BLOCK_BYTES + self.slots_per_segment * _RECORD_BYTES

    @property
    def pages_at(self) -> int:
        end = self.cells_at + self.slots_per_segment * self.cells_bytes
        return -(-end // _BLOCK_BYTES) * _BLOCK_BYTES

    @property
    def segment_bytes(self) -> int:
        return self.pages_at + self.slots_per_segment * self.page_bytes

    def header(self, number: int) -> bytes:
        sizes = self.page_bytes, self.page_cells, self.slots_per_segment
        return sealed(kind_of("segment", _FORMAT, number, *sizes, self.fingerprint).encode())


@dataclass(frozen=True, slots=True)
class Growth:
    """One step of memory allocation."""

    region: Region
    offset: int
    size_bytes: int
    slots: int  # Those below this number have memory afterwards.

    def allocate(self) -> None:
        """To be called once; a thread of its own may do it, and it may be done twice. Raises
        OSError.
        """
        reserve(self.region.descriptor, self.offset, self.size_bytes)


class _Segment:
    def __init__(self, descriptor: int) -> None:
        self.region = Region(descriptor)
        self.bytes = memoryview(self.region.memory)
        self.records = SealedBlocks(self.bytes, _BLOCK_BYTES, _RECORD_BYTES)


class Segments:
    """The slots of a store, by number. The caller ensures that no slot is read while it is
    written.
    """

    def __init__(self, directory: StoreDirectory, layout: SlotLayout) -> None:
        self._directory = directory
        self._layout = layout
        # Once, since each page is looked up by them.
        self._per_segment, self._pages_at = layout.slots_per_segment, layout.pages_at
        self._page_bytes = layout.page_bytes
        self._segments: dict[int, _Segment] = {}
        self._grown = 0  # Slots below this number have memory.
        self._writes = 0

    def adopt(self) -> list[tuple[int, Tag]]:
        """Slots and tags of the whole pages that an earlier process left, oldest first. Unusable
        segments are unlinked.
        """
        found: list[tuple[int, int, Tag]] = []
        torn = 0
        started_s = logged_s = time.monotonic()
        for number in self._directory.segments():
            segment = self._open(number)
            if segment is None:
                self._directory.unlink_segment(number)
                continue
            self._segments[number] = segment
            for index in range(self._layout.slots_per_segment):
                if segment.records.is_clear(index):
                    continue
                slot = number * self._layout.slots_per_segment + index
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
        """Let the slots below this number have memory.

        Raises:
            OSError: there is no more. A write into a mapped page without memory would kill the
                process, so it is allocated here.
        """
        while (growth := self.next_growth(slots)) is not None:
            growth.allocate()
            self.grown(growth)

    def next_growth(self, slots: int) -> Growth | None:
        """The next step to where the slots below this number have memory; None: they have it.
        Raises OSError.
        """
        layout = self._layout
        first = self._grown
        if first >= slots:
            return None
        number, index = divmod(first, layout.slots_per_segment)
        if number not in self._segments:
            self._segments[number] = self._make(number)
        count = min(
            max(1, _GROWTH_BYTES // layout.page_bytes),
            layout.slots_per_segment - index,
            layout.slots - first,
        )
        offset = layout.pages_at + index * layout.page_bytes
        region = self._segments[number].region
        return Growth(region, offset, count * layout.page_bytes, first + count)

    def grown(self, growth: Growth) -> None:
        """The step was done."""
        self._grown = max(self._grown, growth.slots)

    def view(self, slot: int) -> memoryview:
        segment, index = self._found(slot)
        start = self._pages_at + index * self._page_bytes
        return segment.bytes[start : start + self._page_bytes]

    def place(self, slot: int) -> PagePlace:
        segment, index = self._found(slot)
        return segment.region, self._pages_at + index * self._page_bytes

    def clear(self, slot: int) -> None:
        """The slot holds nothing: to be called before it is written."""
        segment, index = self._found(slot)
        segment.records.clear(index)

    def cells(self, slot: int) -> memoryview:
        """The checksums of a page's cells, from when it was stored."""
        segment, index = self._found(slot)
        size = self._layout.cells_bytes
        start = self._layout.cells_at + index * size
        return segment.bytes[start : start + size]

    def write_record(self, slot: int, tag: Tag, page_checksum: int) -> None:
        """The slot holds that page: to be called after it was written."""
        self._writes += 1
        cells = cell_checksums(self.view(slot), self._layout.page_cells)
        self.cells(slot)[:] = cells
        segment, index = self._found(slot)
        facts = _RECORD.pack(tag, self._writes, page_checksum, part_checksum(cells))
        segment.records.write(index, facts)

    def page_checksum(self, slot: int) -> int:
        """The checksum that `write_record` was given for the page in that slot."""
        segment, index = self._found(slot)
        start = _BLOCK_BYTES + index * _RECORD_BYTES + FACTS_AT
        _, _, page_checksum, _ = _RECORD.unpack_from(segment.bytes, start)
        return int(page_checksum)

    def _found(self, slot: int) -> tuple[_Segment, int]:
        """The segment of a slot, and which of that it is."""
        number, index = divmod(slot, self._per_segment)
        return self._segments[number], index

    def _make(self, number: int) -> _Segment:
        fd = self._directory.open_segment(number, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            os.ftruncate(fd, self._layout.segment_bytes)
            reserve(fd, 0, self._layout.pages_at)
            os.pwrite(fd, self._layout.header(number), 0)
        except OSError:
            os.close(fd)
            self._directory.unlink_segment(number)
            raise
        return _Segment(fd)

    def _open(self, number: int) -> _Segment | None:
        """A segment of an earlier process, if it is of this user, whole and of this layout."""
        try:
            fd = self._directory.open_segment(number, os.O_RDWR)
        except OSError as error:
            log.warning("segment %d is not adopted: %s", number, error)
            return None
        header = self._layout.header(number)
        if (
            number * self._layout.slots_per_segment >= self._layout.slots
            or os.fstat(fd).st_size != self._layout.segment_bytes
            or os.pread(fd, len(header), 0) != header
        ):
            os.close(fd)
            log.warning("segment %d is not adopted: torn, or of another layout", number)
            return None
        return _Segment(fd)

    def _verified(self, slot: int) -> tuple[int, int, Tag] | None:
        """Write number, slot and tag of a page that is whole."""
        segment, index = self._found(slot)
        facts = segment.records.read(index)
        if slot >= self._layout.slots or facts is None:
            return None
        tag, write, page_checksum, of_cells = _RECORD.unpack(facts)
        if part_checksum(self.cells(slot)) != of_cells:
            return None
        return (write, slot, Tag(tag)) if checksum(self.view(slot)) == page_checksum else None
