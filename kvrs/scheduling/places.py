"""How long a newcomer waits until it is admitted, as far as those who were admitted before tell."""

_WEIGHT = 0.2  # Of the latest interval: about the last ten count.


class PlaceWait:
    """Watches how often a place comes free while there is none: `max_running` is reached, or the pages are all in use.

    A newcomer goes behind those who wait already, so it is admitted by the release after theirs.
    """

    def __init__(self) -> None:
        self._interval_s: float | None = None  # Moving average between two releases.
        self._since_s: float | None = None  # When the last place was given back, or the last one taken; None: there are some.
        self._released = 0

    def observe(self, now_s: float, released: int, full: bool) -> None:
        """`released` places were ever given back, and with all admitted that can be, `full` says whether there is none left."""
        if (count := released - self._released) and self._since_s is not None:
            interval_s = (now_s - self._since_s) / count
            before_s = interval_s if self._interval_s is None else self._interval_s
            self._interval_s = before_s + (1 - (1 - _WEIGHT) ** count) * (interval_s - before_s)
        self._released = released
        if not full:
            self._since_s = None
        elif count or self._since_s is None:
            self._since_s = now_s

    def expected_s(self, now_s: float, waiting: int) -> float:
        """Predicted time until one that arrives now, behind `waiting` others, has a place."""
        if self._since_s is None:
            return 0.0
        # The interval that is still open is at least as long as it is already: where none was ever seen to end, that is all.
        return (waiting + 1) * max(self._interval_s or 0.0, now_s - self._since_s)
