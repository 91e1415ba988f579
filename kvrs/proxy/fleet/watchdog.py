"""Ends a block in which nothing is heard for too long, at the price of one clock reading per
token.
"""

import asyncio
import heapq
import math
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

from kvrs.control.silence import SilenceTimer
from kvrs.errors import UpstreamError

_TICK_S = 0.02  # A look is at most this late.


class SilentError(UpstreamError):
    """Nothing was heard for too long, although the connection stands."""


class _Looks:
    """The looks that are due, of all watchdogs of one event loop: one timer for them all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[int, set[Watchdog]] = {}  # By tick.
        self._ticks: list[int] = []  # Those of `_due`, as a heap.
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watchdog: "Watchdog", at_s: float) -> int:
        """Have it look at this time, or a little later; returns the tick."""
        tick = math.ceil(at_s / _TICK_S)
        if (due := self._due.get(tick)) is not None:
            due.add(watchdog)
            return tick
        self._due[tick] = {watchdog}
        is_next = not self._ticks or tick < self._ticks[0]
        heapq.heappush(self._ticks, tick)
        if is_next:
            self._arm()
        return tick

    def remove(self, watchdog: "Watchdog", tick: int) -> None:
        if (due := self._due.get(tick)) is not None:
            due.discard(watchdog)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._ticks[0] * _TICK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        # A timer may fire a moment before its time.
        while self._ticks and self._ticks[0] * _TICK_S <= now_s + _TICK_S / 2:
            for watchdog in self._due.pop(heapq.heappop(self._ticks)):
                watchdog.look_in_turn()
        if self._ticks and self._timer is None:
            self._arm()


_looks: WeakKeyDictionary[asyncio.AbstractEventLoop, _Looks] = WeakKeyDictionary()


def _looks_of(loop: asyncio.AbstractEventLoop) -> _Looks:
    if (found := _looks.get(loop)) is None:
        found = _looks[loop] = _Looks(loop)
    return found


class Watchdog:
    """A block that may not go without `heard()` for `limit_s()`, save while `paused()`. Leaving it
    raises SilentError if it did. (As `asyncio.timeout`, without its timer and its coroutines.)
    """

    __slots__ = (
        *("_before", "_cancelling", "_is_over", "_limit_s", "_looks", "_loop", "_paused"),
        *("_task", "_tick", "exceeded_s", "has_expired", "silence"),
    )

    def __init__(self, limit_s: Callable[[], float], paused: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._paused = paused
        self.silence = SilenceTimer(self._loop.time())
        self._looks = _looks_of(self._loop)
        self._tick: int | None = None  # Of the next look.
        self._is_over = False
        self.has_expired = False
        self.exceeded_s = 0.0  # The limit that ended the block.

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._before = _current.set(self)
        self.look()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._is_over = True
        self.stop()
        _current.reset(self._before)
        task = self._task
        # The task's context keeps this watchdog: what belongs to a stream is let go here.
        del self._limit_s, self._paused, self._task, self._before
        if not self.has_expired or task.uncancel() > self._cancelling:
            return
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            raise SilentError(f"silent for {self.exceeded_s:.3g} s") from None

    def heard(self) -> None:
        self.silence.heard_s = self._loop.time()

    def look(self) -> None:
        """End the block if the limit is passed; else look again in time for it."""
        limit_s = self._limit_s()
        next_s = self.silence.look(self._loop.time(), limit_s, self._paused)
        if next_s is None:
            self.exceeded_s = limit_s
            self.expire()
            return
        self.stop()
        self._tick = self._looks.add(self, next_s)

    def look_in_turn(self) -> None:
        if self._tick is not None:  # Else it was closed in this very turn.
            self._tick = None
            self.look()

    def expire(self) -> None:
        """End the block now, as if the limit were passed."""
        self.exceeded_s = self.exceeded_s or self._loop.time() - self.silence.heard_s
        # Not at once: the task itself may be the one that calls this.
        self._loop.call_soon(self._cancel)

    def _cancel(self) -> None:
        if not self._is_over and not self.has_expired:
            self.has_expired = True
            self._task.cancel()

    def stop(self) -> None:
        if self._tick is not None:
            self._looks.remove(self, self._tick)
            self._tick = None


# Of the block that the current task is in.
_current: ContextVar[Watchdog | None] = ContextVar("watchdog", default=None)


def excuse_silence() -> None:
    """Count the silence of the block around this call from now on: this process is its cause."""
    if (watchdog := _current.get()) is not None:
        watchdog.heard()


def silence_limit(
    limit_s: Callable[[], float], paused: Callable[[], bool] = lambda: False
) -> Watchdog:
    """For `with`, in a task."""
    return Watchdog(limit_s, paused)
