"""Memory of whole pages between vLLM's workers and the page port in its scheduler's process.

Every worker copies the cells of its own layers and heads, so that what is sent and fetched are
whole pages, whatever the ranks are. The memory has no name: workers open it through the process
that has it, and it ends with the last of them.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvrs.transfer.shared_memory.regions import Region

# At most so many bytes are copied each way beside one step of vLLM. On a CPU the step waits for
# them, for milliseconds; on a GPU they take as much of its memory.
_STEP_BYTES = 1 << 25


@dataclass(frozen=True, slots=True)
class StagingPlace:
    """Where a worker finds the memory."""

    pid: int
    descriptor: int
    pages: int
    page_bytes: int


class Staging:
    """The side of the scheduler's process. One thread takes and gives back slots of a page each."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        """Raises KvrsError: there is not so much memory."""
        self._region = Region.anonymous("kvrs-vllm-staging", pages * page_bytes)
        self._memory = memoryview(self._region.memory)
        self._page_bytes = page_bytes
        self._free = list(reversed(range(pages)))
        self.pages = pages
        self.place = StagingPlace(os.getpid(), self._region.descriptor, pages, page_bytes)

    @property
    def used(self) -> int:
        return self.pages - len(self._free)

    def take(self, count: int) -> list[int]:
        """At most so many slots; fewer where not as many are free."""
        return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def give_back(self, slots: Sequence[int]) -> None:
        self._free += slots

    def view(self, slot: int) -> memoryview:
        start = slot * self._page_bytes
        return self._memory[start : start + self._page_bytes]


def pages_per_step(page_bytes: int) -> int:
    """At most so many pages are copied one way beside one step."""
    return max(1, _STEP_BYTES // page_bytes)


def open_staging(place: StagingPlace) -> Region:
    """The same memory in a worker.

    Raises:
        OSError: the process has ended, or is another user's.
    """
    path = f"/proc/{place.pid}/fd/{place.descriptor}"
    return Region(os.open(path, os.O_RDWR | os.O_CLOEXEC))
