"""One alarm per stream, and one promise to be woken for the earliest of them.

The policy asks for a new `WakeAt` only when the earliest alarm comes before the wake-up that it was promised last; a
driver may keep one timer or many, and a wake-up too many does nothing.
"""

from heapq import heappop, heappush

from kvrs.ids import StreamId
from kvrs.policy.actions import WakeAt

# Event loops round to milliseconds; an alarm that is this near counts as due, or it would be asked for again and again.
SLACK_S = 0.005


class Timers:
    def __init__(self) -> None:
        self._alarm_s: dict[StreamId, float] = {}
        self._heap: list[tuple[float, int, StreamId]] = []  # May hold alarms that were moved or cleared since.
        self._count = 0  # Equal times ring in the order in which they were set.
        self._promised_s: float | None = None

    def set(self, stream: StreamId, at_s: float) -> None:
        self._alarm_s[stream] = at_s
        self._count += 1
        heappush(self._heap, (at_s, self._count, stream))

    def clear(self, stream: StreamId) -> None:
        self._alarm_s.pop(stream, None)

    def woken(self, now_s: float) -> None:
        """The driver woke us: for the promise if its time has come, else for an older one that no longer matters."""
        if self._promised_s is not None and self._promised_s <= now_s + SLACK_S:
            self._promised_s = None

    def next_due(self, now_s: float) -> StreamId | None:
        """Take the next alarm that rings; None: no more are due."""
        earliest_s = self._earliest_s()
        if earliest_s is None or earliest_s > now_s + SLACK_S:
            return None
        stream = heappop(self._heap)[2]
        del self._alarm_s[stream]
        return stream

    def promise(self, now_s: float) -> WakeAt | None:
        """What to ask of the driver so that the earliest alarm is not missed."""
        earliest_s = self._earliest_s()
        if earliest_s is None:
            return None
        promised_s = self._promised_s
        if promised_s is not None and now_s <= promised_s + SLACK_S and promised_s <= earliest_s:
            return None
        self._promised_s = earliest_s
        return WakeAt(earliest_s)

    def _earliest_s(self) -> float | None:
        while self._heap:
            at_s, _, stream = self._heap[0]
            if self._alarm_s.get(stream) == at_s:
                return at_s
            heappop(self._heap)
        return None


def is_past(at_s: float, now_s: float) -> bool:
    """Whether an alarm for this time would ring now."""
    return at_s <= now_s + SLACK_S
