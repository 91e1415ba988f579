"""Stops of this process, during which data waits in its sockets."""

import asyncio
import time

_TICK_S = 0.5


class StallMonitor:
    """The time since which this process has run without a stop: data that is read right after a
    stop may have arrived at its beginning.
    """

    def __init__(self) -> None:
        self._beat_s = time.monotonic()
        self._stop: tuple[float, float] | None = None  # The last one: from, to.

    def __enter__(self) -> "StallMonitor":
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._beat)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        self._note()
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._beat)

    def _note(self) -> None:
        before_s, self._beat_s = self._beat_s, time.monotonic()
        if self._beat_s - before_s > 2 * _TICK_S:
            self._stop = before_s, self._beat_s

    def awake_since_s(self) -> float:
        """Now, or the beginning of a stop that has just ended."""
        self._note()
        if self._stop is not None and self._beat_s - self._stop[1] < 2 * _TICK_S:
            return self._stop[0]
        return self._beat_s
