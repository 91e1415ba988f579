"""Prediction of the wait of a new sequence until it is admitted, from the departures of others.

With w sequences waiting and a mean interval i between departures of a full engine, the wait is
(w + 1) * i: each departure admits one, in order. i is an exponentially weighted moving average;
before the first departure it is what r running sequences have taken at least, divided by r. Where
the next departure is overdue, that interval alone is longer: streams that began together end
together, and all that wait are then admitted soon after each other. Intervals count time in which
the engine computes: in a pause none departs, and all wait for its end alike.
"""

_WEIGHT = 0.2  # Of the latest interval: about the last ten count.


class AdmissionWaitEstimator:
    """Measures the interval between departures while the engine is full: `max_running` is reached,
    or all pages are in use.
    """

    def __init__(self) -> None:
        self._interval_s: float | None = None  # Moving average between two departures.
        # Time of the last departure, or since when the engine is full; None: it is not full.
        self._since_s: float | None = None
        self._departures = 0
        self._paused_s: float | None = None  # The beginning of a pause; None: the engine computes.

    def pause(self, now_s: float) -> None:
        """The engine computes nothing from now on, until `go_on`; it may do so already."""
        if self._paused_s is None:
            self._paused_s = now_s

    def go_on(self, now_s: float) -> None:
        """The engine computes again, or still."""
        if self._paused_s is not None and self._since_s is not None:
            self._since_s += now_s - max(self._paused_s, self._since_s)
        self._paused_s = None

    def observe(self, now_s: float, departures: int, full: bool) -> None:
        """Call after each admission. `departures`: how many admitted sequences have ended, ever;
        `full`: whether another one could not be admitted.
        """
        if (count := departures - self._departures) and self._since_s is not None:
            interval_s = self._open_s(now_s) / count
            before_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = before_s + (1 - (1 - _WEIGHT) ** count) * (interval_s - before_s)
        self._departures = departures
        if not full:
            self._since_s = None
        elif count or self._since_s is None:
            self._since_s = now_s

    def expected_s(self, now_s: float, waiting: int, running: int) -> float:
        """Predicted wait of a sequence that arrives now, behind `waiting` others, while `running`
        have places; in a pause, from its end on.
        """
        if self._since_s is None:
            return 0.0
        open_s, each_s = self._open_s(now_s), self._interval_s
        if each_s is None:
            each_s = open_s / max(1, running)
        return max(each_s, open_s) + waiting * each_s

    def _open_s(self, now_s: float) -> float:
        """Length of the interval that no departure has ended yet."""
        assert self._since_s is not None, "the engine is full"
        end_s = now_s if self._paused_s is None else self._paused_s
        return max(0.0, end_s - self._since_s)
