"""Ends a block in which nothing is heard for too long, at the price of one clock reading per
token.
"""

import asyncio
import heapq
import math
from collections.abc import Callable
from typing import Any, Self
from weakref import WeakKeyDictionary

from kvrs.core.fleet.silence import SilenceTimer
from kvrs.errors import UpstreamError

_TICK_S = 0.02  # A look is at most this late.
_LAG_S = 0.05  # Stalls of the event loop count from about this length on.
_PATIENT_LAG_S = 0.25  # Where only patient watchdogs watch.
_STOP_S = 1.0  # A lag from which on this process was stopped, and not only busy.
_FIRST_LOOK_S = 0.1  # No limit is asked for before that: most calls have been answered by then.


class SilentError(UpstreamError):
    """Nothing was heard for too long, although the connection stands."""


class _TimerWheel:
    """One timer for all watchdogs of an event loop, with the time at which each looks next."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # By tick; some have moved on since.
        self._due: dict[int, list[Watchdog]] = {}
        self.blocks: dict[asyncio.Task[Any], Watchdog] = {}  # The innermost of each task.
        self.patient = 0  # Blocks of patient watchdogs.
        self._ticks: list[int] = []  # Those of `_due`, as a heap.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        # By how much timers of the event loop were late, in all: a process that lacks a processor
        # has heard nothing in that time.
        self.lag_s = 0.0
        self._stop: tuple[float, float] | None = None  # The last one: from, to.

    def add(self, watchdog: "Watchdog", at_s: float) -> int:
        """Have it look at this time, or a little later; returns the tick."""
        tick = math.ceil(at_s / _TICK_S)
        if (due := self._due.get(tick)) is not None:
            due.append(watchdog)
            return tick
        self._due[tick] = [watchdog]
        is_next = not self._ticks or tick < self._ticks[0]
        heapq.heappush(self._ticks, tick)
        if is_next:
            self._arm()
        return tick

    def _arm(self) -> None:
        """For the next tick, and often enough to measure the lag of this event loop: a stall that
        was over before a look was due would count as silence.
        """
        now_s = self._loop.time()
        if self._timer is not None:
            if self._timer_s <= now_s:
                return  # It is due, perhaps after a stall, and arms the next one.
            self._timer.cancel()
        lag_s = _LAG_S if len(self.blocks) > self.patient else _PATIENT_LAG_S
        self._timer_s = min(self._ticks[0] * _TICK_S, now_s + lag_s)
        self._timer = self._loop.call_at(self._timer_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        self.lag_s += max(0.0, now_s - self._timer_s)
        if now_s - self._timer_s > _STOP_S:
            self._stop = self._timer_s - _LAG_S, now_s
        # A timer may fire a moment before its time. Watchdogs that look too early look next at the
        # same tick, so that all that are due are taken before the first of them looks.
        due = []
        while self._ticks and self._ticks[0] * _TICK_S <= now_s + _TICK_S / 2:
            tick = heapq.heappop(self._ticks)
            due.append((tick, self._due.pop(tick)))
        for tick, watchdogs in due:
            for watchdog in watchdogs:
                watchdog.look_in_turn(tick)
        if self._ticks and self._timer is None:
            self._arm()

    def awake_since_s(self) -> float:
        """While watchdogs look: now, or the beginning of a stop that has just ended."""
        now_s = self._loop.time()
        if self._timer is not None and now_s - self._timer_s > _STOP_S:
            return self._timer_s - _LAG_S
        if self._stop is not None and now_s - self._stop[1] < _STOP_S:
            return self._stop[0]
        return now_s


_wheels: WeakKeyDictionary[asyncio.AbstractEventLoop, _TimerWheel] = WeakKeyDictionary()


class Watchdog:
    """A block that may not go without `heard()` for `limit_s(heard_s, now_s)`, save while
    `paused()`. Leaving it raises SilentError if it did. The lag of the own event loop counts as no
    silence; a patient watchdog, whose limit is of seconds, needs no short stall left out. (As
    `asyncio.timeout`, without its timer and its coroutines.)
    """

    __slots__ = (
        *("_before", "_cancelling", "_is_over", "_is_patient", "_lag_s", "_limit_s", "_loop"),
        *("_paused", "_task", "_tick", "_wheel", "exceeded_s", "has_expired", "silence"),
    )

    def __init__(
        self,
        limit_s: Callable[[float, float], float],
        paused: Callable[[], bool] = lambda: False,
        silence: SilenceTimer | None = None,
        *,
        is_patient: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_patient = is_patient
        self._limit_s = limit_s
        self._paused = paused
        self.silence = silence or SilenceTimer(self._loop.time())
        if (wheel := _wheels.get(self._loop)) is None:
            wheel = _wheels[self._loop] = _TimerWheel(self._loop)
        self._wheel = wheel
        self._lag_s = wheel.lag_s  # At the last look.
        self._tick: int | None = None  # Of the next look.
        self._is_over = False
        self.has_expired = False
        self.exceeded_s = 0.0  # The limit that ended the block.

    def __enter__(self) -> Self:
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._before = self._wheel.blocks.get(task)
        self._wheel.blocks[task] = self
        self._wheel.patient += self._is_patient
        self.silence.next_s = self._loop.time() + _FIRST_LOOK_S
        self._tick = self._wheel.add(self, self.silence.next_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over = True
        self._tick = None
        self._wheel.patient -= self._is_patient
        task = self._task
        if self._before is None:
            del self._wheel.blocks[task]
        else:
            self._wheel.blocks[task] = self._before
        # A look may be due that has this watchdog: what belongs to a stream is let go here.
        del self._limit_s, self._paused, self._task, self._before
        if not self.has_expired or task.uncancel() > self._cancelling:
            return
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            raise SilentError(f"silent for {self.exceeded_s:.3g} s") from None

    def heard(self) -> None:
        self.silence.heard_s = self._loop.time()

    def look(self) -> None:
        """End the block if the limit is passed; else look again in time for it."""
        now_s, lag_s = self._loop.time(), self._wheel.lag_s
        self.silence.stalled(lag_s - self._lag_s, now_s)
        self._lag_s = lag_s
        limit_s = self._limit_s(self.silence.heard_s, now_s)
        next_s = self.silence.look(now_s, limit_s, self._paused)
        if next_s is None:
            self.exceeded_s = limit_s
            self._expire()
            return
        self._tick = self._wheel.add(self, next_s)

    def look_in_turn(self, tick: int) -> None:
        if self._tick == tick:  # Else its block was left, or it looks at another time.
            self._tick = None
            self.look()

    def expire_if_silent(self) -> bool:
        """End the block now, as if the limit were passed, unless something was heard a moment ago;
        whether it ends.
        """
        now_s = self._loop.time()
        if not self.silence.may_be_suspected(now_s):
            return False
        self.exceeded_s = self.exceeded_s or now_s - self.silence.heard_s
        self._expire()
        return True

    def _expire(self) -> None:
        # Not at once: the task itself may be the one that calls this.
        self._loop.call_soon(self._cancel)

    def _cancel(self) -> None:
        if not self._is_over and not self.has_expired:
            self.has_expired = True
            self._task.cancel()


def loop_lag_s() -> float:
    """By how much timers of the running event loop were late, in all blocks of watchdogs so far."""
    wheel = _wheels.get(asyncio.get_running_loop())
    return 0.0 if wheel is None else wheel.lag_s


def awake_since_s() -> float:
    """The time, on the clock of the running event loop, since which this process has run without a
    stop, asked within a watchdog's block: data that is read right after a stop may have arrived at
    its beginning.
    """
    loop = asyncio.get_running_loop()
    wheel = _wheels.get(loop)
    return loop.time() if wheel is None else wheel.awake_since_s()


def reset_timeout() -> None:
    """Count the silence of the block that the task is in from now on: this process is its cause."""
    task = asyncio.current_task()
    assert task is not None
    wheel = _wheels.get(task.get_loop())
    if wheel is not None and (watchdog := wheel.blocks.get(task)) is not None:
        watchdog.heard()
