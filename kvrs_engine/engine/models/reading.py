"""The rate and the progress of reading a model's weights from disk."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvrs.profiles import catalog

_LATE_S = 1.0  # Tolerated delay of the previous reading, beyond twice its expected time.


class WeightReading:
    """One reading of a model's weights by one thread; other threads may read its progress."""

    def __init__(
        self,
        total_bytes: int,
        bytes_per_s: float | None = None,
        after: "WeightReading | None" = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`bytes_per_s` limits the rate; None: no limit. A limited reading begins when `after` has
        ended or is much too late.
        """
        self.total_bytes, self.bytes_per_s = total_bytes, bytes_per_s
        self._after, self._clock, self._sleep = after, clock, sleep
        self._over = threading.Event()
        self._began_s: float | None = None
        self._there_s = 0.0  # Time at which the model can be used; set by `end`.
        self._read_bytes = 0

    @property
    def expected_s(self) -> float:
        """Expected duration, without `after`; 0: not known."""
        return self.total_bytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def is_shorter_than(self, other: "WeightReading") -> bool:
        if self.bytes_per_s and other.bytes_per_s:
            return self.expected_s < other.expected_s
        return self.total_bytes < other.total_bytes

    def begin(self) -> None:
        """Begin the reading; further calls do nothing."""
        if self._began_s is not None:
            return
        if self.bytes_per_s is not None and self._after is not None:
            self._after.wait(2 * self._after.expected_s + _LATE_S)
        self._began_s = self._clock()

    def took(self, count_bytes: int) -> None:
        """Note further bytes, and sleep as the rate requires."""
        self._read_bytes += count_bytes
        if self.bytes_per_s is not None and self._began_s is not None:
            due_s = self._began_s + self._read_bytes / self.bytes_per_s
            self._sleep(max(0.0, due_s - self._clock()))

    def end(self, there_in_s: float = 0.0) -> None:
        """End the reading, complete or not; the model can be used in `there_in_s`."""
        self._there_s = self._clock() + there_in_s
        self._over.set()

    def wait(self, max_s: float) -> None:
        self._over.wait(max_s)

    def left_s(self) -> float | None:
        """Return the predicted time until the model can be used, by the rate so far and the limit;
        None: not known.
        """
        if self._over.is_set():
            return max(0.0, self._there_s - self._clock())
        if self._began_s is None:
            if not self.expected_s:
                return None
            before_s = self._after.left_s() if self._after is not None else 0.0
            return None if before_s is None else before_s + self.expected_s
        if not self._read_bytes:
            return self.expected_s or None
        # `_read_bytes` may be ahead of the rate limit.
        took_s = self._clock() - self._began_s
        as_before_s = took_s * (self.total_bytes / self._read_bytes - 1)
        return max(0.0, as_before_s, self.expected_s - took_s)


def reading_of(
    directory: Path,
    disk_bytes_per_s: float | None,
    pace: str | None = None,
    after: WeightReading | None = None,
) -> WeightReading:
    """Return the reading of a model at the given rate. With a profile (`pace`), the reading takes
    as long as the profile's model would. Raises ConfigError as `catalog.load` does.
    """
    total_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if disk_bytes_per_s is not None and pace is not None:
        disk_bytes_per_s *= total_bytes / catalog.load(pace).weight_bytes
    return WeightReading(total_bytes, disk_bytes_per_s, after)
