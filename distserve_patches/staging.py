"""Pages of a whole model in shared memory, which a stage's workers and its server exchange.

Every rank of a stage has a part of each page. A slot holds a whole page, `[layers, kv_heads, 2,
page_size_tokens, head_dim]`, with the same meaning for stages of any tensor and pipeline parallel
degree, and for the embedded engine.

The memory is an anonymous file of the server, which workers open through /proc. A file without a
name is freed with the last process that maps it, and needs no clean-up.
"""

import itertools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvrs.errors import TransferError

# Size of the pieces in which memory is allocated, and registered with a GPU's driver.
SEGMENT_BYTES = 64 << 20

_files = itertools.count()


@dataclass(frozen=True, slots=True)
class StagingFile:
    """The file for a worker: consecutive segments of slots."""

    path: str
    number: int  # Unique in the server: a path may be reused.
    page_bytes: int
    slots_per_segment: int

    @property
    def segment_bytes(self) -> int:
        whole = mmap.ALLOCATIONGRANULARITY
        return -(-self.slots_per_segment * self.page_bytes // whole) * whole

    def map(self, number: int) -> mmap.mmap:
        """Map one segment, shared.

        Raises:
            OSError: the server is gone.
        """
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            # An access beyond the end of the file kills the process.
            assert os.fstat(descriptor).st_size >= (number + 1) * self.segment_bytes, (
                f"there is no segment {number}"
            )
            return mmap.mmap(descriptor, self.segment_bytes, offset=number * self.segment_bytes)
        finally:
            os.close(descriptor)


class StagingSlots:
    """The slots in use and their bytes, at the server."""

    def __init__(self, page_bytes: int, max_slots: int) -> None:
        self._descriptor = os.memfd_create("kvrs-staging")
        self.file = StagingFile(
            path=f"/proc/{os.getpid()}/fd/{self._descriptor}",
            number=next(_files),
            page_bytes=page_bytes,
            slots_per_segment=max(1, min(SEGMENT_BYTES // page_bytes, max_slots)),
        )
        self._max_slots = max_slots
        self._segments: list[memoryview] = []
        self._free: list[int] = []
        self.in_use = 0

    def take(self, count: int) -> list[int]:
        """Take slots, with any contents.

        Raises:
            TransferError: too few free slots.
        """
        if count > self._max_slots - self.in_use:
            raise TransferError(
                f"{count} pages are to be staged where {self.in_use} of at most "
                f"{self._max_slots} are"
            )
        while len(self._free) < count:
            self._grow()
        self.in_use += count
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: Sequence[int]) -> None:
        self._free += slots
        self.in_use -= len(slots)

    def view(self, slot: int) -> memoryview:
        number, index = divmod(slot, self.file.slots_per_segment)
        return self._segments[number][
            index * self.file.page_bytes : (index + 1) * self.file.page_bytes
        ]

    @property
    def closed(self) -> bool:
        return self._descriptor < 0

    def close(self) -> None:
        """Let no new worker open the file. The memory is freed with its last view."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._segments.clear()

    def _grow(self) -> None:
        number = len(self._segments)
        # The system allocates the memory at the first write to a page.
        os.ftruncate(self._descriptor, (number + 1) * self.file.segment_bytes)
        self._segments.append(memoryview(self.file.map(number)))
        first = number * self.file.slots_per_segment
        # Slots with allocated memory are taken first.
        self._free[:0] = range(first + self.file.slots_per_segment - 1, first - 1, -1)
