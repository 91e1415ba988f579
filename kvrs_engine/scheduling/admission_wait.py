"""The predicted wait of a new sequence until its admission, from the departures of other sequences.

With w waiting sequences and a mean interval i between departures of a full engine, the wait is
(w + 1) * i, because each departure admits one sequence. i is an exponentially weighted moving
average; before the first departure, it is the time since the engine became full, divided by the
number of running sequences. If the next departure is overdue, only the first interval is longer:
streams that began together end together. Intervals do not include pauses of the engine.
"""

_WEIGHT = 0.2  # Weight of the latest interval: about the last ten count.


class AdmissionWaitEstimator:
    """Measures the interval between departures while the engine is full: `max_running` is reached,
    or all pages are in use.
    """

    def __init__(self) -> None:
        self._interval_s: float | None = None  # Moving average between two departures.
        # Time of the last departure, or when the engine became full; None: not full.
        self._since_s: float | None = None
        self._departures = 0
        self._paused_s: float | None = None  # Start of the current pause; None: no pause.

    def pause(self, now_s: float) -> None:
        """Begin a pause of the engine, unless one has begun."""
        if self._paused_s is None:
            self._paused_s = now_s

    def go_on(self, now_s: float) -> None:
        """End the pause, if there is one."""
        if self._paused_s is not None and self._since_s is not None:
            self._since_s += now_s - max(self._paused_s, self._since_s)
        self._paused_s = None

    def observe(self, now_s: float, departures: int, full: bool) -> None:
        """Update the interval; call after each admission. `departures` is the total number of
        admitted sequences that have ended; `full`: another sequence could not be admitted.
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
        """Predict the wait of a sequence that arrives now, behind `waiting` others and with
        `running` sequences admitted; in a pause, the wait after the pause.
        """
        if self._since_s is None:
            return 0.0
        open_s, each_s = self._open_s(now_s), self._interval_s
        if each_s is None:
            each_s = open_s / max(1, running)
        return max(each_s, open_s) + waiting * each_s

    def _open_s(self, now_s: float) -> float:
        """Return the time since the last departure."""
        assert self._since_s is not None, "the engine is full"
        end_s = now_s if self._paused_s is None else self._paused_s
        return max(0.0, end_s - self._since_s)
