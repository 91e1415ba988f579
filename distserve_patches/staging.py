"""Pages of a whole model in shared memory, by which a stage's workers and its server exchange them.

Every rank of a stage has a part of each page; a slot holds one page whole, `[layers, kv_heads, 2,
page_size_tokens, head_dim]`, so it means the same to stages of any tensor and pipeline parallel
degree, and to the embedded engine.

The memory is an anonymous file of the server, which workers open through /proc. It has no name, so
it is freed with the last process that has it mapped, however that ends, and needs no clean-up.
"""

import itertools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvrs.errors import TransferError

# Memory is got, and handed to a GPU's driver, in pieces of about this size.
SEGMENT_BYTES = 64 << 20

_files = itertools.count()


@dataclass(frozen=True, slots=True)
class StagingFile:
    """The file as a worker opens it: segments one behind the other, with slots in them."""

    path: str
    number: int  # Of all files of the server: a path may come back, with another file behind it.
    page_bytes: int
    slots_per_segment: int

    @property
    def segment_bytes(self) -> int:
        whole = mmap.ALLOCATIONGRANULARITY
        return -(-self.slots_per_segment * self.page_bytes // whole) * whole

    def map(self, number: int) -> mmap.mmap:
        """One segment, shared.

        Raises:
            OSError: the server is gone.
        """
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            # To touch a mapping beyond the end of its file kills the process.
            assert os.fstat(descriptor).st_size >= (number + 1) * self.segment_bytes, (
                f"there is no segment {number}"
            )
            return mmap.mmap(descriptor, self.segment_bytes, offset=number * self.segment_bytes)
        finally:
            os.close(descriptor)


class StagingSlots:
    """The server's side: the slots in use, and their bytes."""

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
        """That many slots, with anything in them.

        Raises:
            TransferError: that would be more than there may be.
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
        """Let no new worker open the file. The memory is freed with the last view of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._segments.clear()

    def _grow(self) -> None:
        number = len(self._segments)
        # The system gives the memory when a page is written for the first time.
        os.ftruncate(self._descriptor, (number + 1) * self.file.segment_bytes)
        self._segments.append(memoryview(self.file.map(number)))
        first = number * self.file.slots_per_segment
        # Those that have their memory already are taken first.
        self._free[:0] = range(first + self.file.slots_per_segment - 1, first - 1, -1)
