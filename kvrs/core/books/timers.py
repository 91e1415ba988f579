"""One alarm per stream, and one wake-up that is requested from the driver for the earliest of them.

A new `WakeAt` is requested only when the earliest alarm comes before the wake-up requested last; a
driver may keep one timer or many, and a superfluous wake-up does nothing.
"""

from heapq import heappop, heappush

from kvrs.core.model import actions as act
from kvrs.ids import StreamId

# Event loops round to milliseconds; an alarm that is this near counts as due, or it would be
# requested again and again.
SLACK_S = 0.005


class Timers:
    def __init__(self) -> None:
        self.alarms_s: dict[StreamId, float] = {}  # Of each stream that has one.
        # May hold alarms that were moved or cleared since.
        self.heap: list[tuple[float, int, StreamId]] = []
        self._count = 0  # Equal times are due in the order in which they were set.
        self._requested_s: float | None = None

    def set(self, stream: StreamId, at_s: float) -> None:
        self.alarms_s[stream] = at_s
        self._count += 1
        heappush(self.heap, (at_s, self._count, stream))

    def woken(self, now_s: float) -> None:
        """The driver's wake-up: the requested one if its time has come, else an older one that no
        longer matters.
        """
        if self._requested_s is not None and self._requested_s <= now_s + SLACK_S:
            self._requested_s = None

    def next_due(self, now_s: float) -> StreamId | None:
        """Take the next alarm that is due; None: no more are."""
        if not self.heap or self.heap[0][0] > now_s + SLACK_S:
            return None
        earliest_s = self._earliest_s()
        if earliest_s is None or earliest_s > now_s + SLACK_S:
            return None
        stream = heappop(self.heap)[2]
        del self.alarms_s[stream]
        return stream

    def next_wake(self, now_s: float) -> act.WakeAt | None:
        """The request to the driver without which the earliest alarm would be missed."""
        earliest_s = self._earliest_s()
        if earliest_s is None:
            return None
        requested_s = self._requested_s
        if requested_s is not None and now_s <= requested_s + SLACK_S and requested_s <= earliest_s:
            return None
        self._requested_s = earliest_s
        return act.WakeAt(earliest_s)

    def _earliest_s(self) -> float | None:
        while self.heap:
            at_s, _, stream = self.heap[0]
            if self.alarms_s.get(stream) == at_s:
                return at_s
            heappop(self.heap)
        return None


def is_past(at_s: float, now_s: float) -> bool:
    """An alarm for this time would be due now."""
    return at_s <= now_s + SLACK_S
