"""Step times of an engine that counts its steps, or the intervals between tokens, in two counters.

A read takes what came since the read before. The median of the last few such means is reported, so
that a read in which the engine stood still, or compiled a kernel, does not count.
"""

from collections import deque
from statistics import median

_READS = 3
_LEAST = 4  # Fewer new steps wait for the next read.


class CountedSteps:
    def __init__(self) -> None:
        self._epoch = -1
        self._before = 0.0, 0.0
        self._means: deque[float] = deque(maxlen=_READS)

    def read(self, epoch: int, steps: float, seconds: float) -> float:
        """Return the time of a recent step, by the counts since the start of the process in this
        epoch; 0: not known, as what came before the first read is not recent.
        """
        if epoch != self._epoch:
            self._epoch, self._before = epoch, (steps, seconds)
            self._means.clear()
        before, before_s = self._before
        if not 0 <= steps - before < _LEAST:
            if steps > before and seconds > before_s:
                self._means.append((seconds - before_s) / (steps - before))
            self._before = steps, seconds
        return median(self._means) if self._means else 0.0
