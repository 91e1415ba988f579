"""Sums of counters over the processes behind one port; each read shows one process."""

from collections.abc import Sequence

_MOST_PROCESSES = 256


class ProcessTotals:
    """Counts that never fall while an instance is in one epoch.

    The first process counts from its start, others from their first sighting: a process seen only
    once adds nothing.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._last: dict[float | None, Sequence[int]] = {}
        self._sums: list[int] = []

    def add(self, epoch: int, process: float | None, counts: Sequence[int]) -> list[int]:
        """Return the sums over all processes, after one process (named by its start time) has shown
        `counts`.
        """
        if epoch != self._epoch:
            self._epoch, self._last, self._sums = epoch, {process: counts}, [*counts]
        before = self._last.pop(process, counts)
        self._last[process] = counts
        if len(self._last) > _MOST_PROCESSES:
            del self._last[next(iter(self._last))]
        for at, (new, old) in enumerate(zip(counts, before, strict=True)):
            self._sums[at] += max(0, new - old)
        return [*self._sums]
