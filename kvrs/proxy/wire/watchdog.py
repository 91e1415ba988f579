"""Watchdogs that end a block after too long a silence, for one clock reading per token."""

import asyncio
import heapq
import math
from collections.abc import Callable
from typing import Any, Self
from weakref import WeakKeyDictionary

from kvrs.core.fleet.silence import Lateness, SilenceTimer
from kvrs.errors import UpstreamError

_TICK_S = 0.02  # Interval of the timer's ticks, and so the longest delay of a watchdog's look.
_LAG_S = 0.05  # Shortest stall of the event loop that is noticed.
_PATIENT_LAG_S = 0.25  # Shortest stall that is noticed if all watchdogs are patient.
# Time from a block's start to the first look: most calls have been answered by then.
_FIRST_LOOK_S = 0.1


class SilentError(UpstreamError):
    """Nothing was heard from a process for too long, although the connection stands."""


class _TimerWheel:
    """One timer for all watchdogs of an event loop, with the time of each watchdog's next look."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # Watchdogs by the tick of their look; watchdogs that have since moved to a later tick
        # remain.
        self._due: dict[int, list[Watchdog]] = {}
        self.blocks: dict[asyncio.Task[Any], Watchdog] = {}  # Innermost watchdog of each task.
        self.patient = 0  # Number of blocks with patient watchdogs.
        self._ticks: list[int] = []  # Ticks that are keys of `_due`, as a heap.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self.lateness = Lateness(loop.time())  # A process without a CPU hears nothing meanwhile.

    def add(self, watchdog: "Watchdog", at_s: float) -> int:
        """Schedule a watchdog's look for this time or slightly later; return the tick."""
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
        """Arm the timer for the next tick, and often enough to measure the event loop's lag: a
        stall that was over before a look would count as silence.
        """
        now_s = self._loop.time()
        if self._timer is not None:
            if self._timer_s <= now_s:
                return  # The timer is due, perhaps after a stall, and arms the next one.
            self._timer.cancel()
        lag_s = _LAG_S if len(self.blocks) > self.patient else _PATIENT_LAG_S
        self._timer_s = min(self._ticks[0] * _TICK_S, now_s + lag_s)
        self._timer = self._loop.call_at(self._timer_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        self.lateness.looked(self._timer_s, now_s)
        # A timer may fire slightly early. Watchdogs that look too early look again at the same
        # tick, so all due ones are taken before the first looks.
        due = []
        while self._ticks and self._ticks[0] * _TICK_S <= now_s + _TICK_S / 2:
            tick = heapq.heappop(self._ticks)
            due.append((tick, self._due.pop(tick)))
        for tick, watchdogs in due:
            for watchdog in watchdogs:
                watchdog.look_in_turn(tick)
        if self._ticks and self._timer is None:
            self._arm()

    def note_lateness(self, now_s: float) -> None:
        """Note the delay of a timer that is due and has not fired yet: after a pause other
        callbacks may run first.
        """
        if self._timer is not None and now_s > self._timer_s:
            self.lateness.looked(self._timer_s, now_s)

    def awake_since_s(self) -> float:
        """Return the time since which the process runs: now, or the start of a pause that has just
        ended.
        """
        due_s = None if self._timer is None else self._timer_s
        return self.lateness.awake_since_s(due_s, self._loop.time())


_wheels: WeakKeyDictionary[asyncio.AbstractEventLoop, _TimerWheel] = WeakKeyDictionary()


class Watchdog:
    """A block that must call `heard()` within `limit_s(heard_s, now_s)`, except while `paused()`;
    otherwise leaving it raises SilentError. Time that the lateness of the own event loop excuses
    is no silence (`silence.py`); a patient watchdog, with a limit of seconds, ignores short
    stalls. (Like `asyncio.timeout`, without its timer and coroutines.)
    """

    __slots__ = (
        *("_before", "_cancelling", "_excused_s", "_is_over", "_is_patient", "_limit_s", "_loop"),
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
        self._wheel = _wheel_of(self._loop)
        # Value of `Lateness.excused_s` at the last look.
        self._excused_s = self._wheel.lateness.excused_s
        self._tick: int | None = None  # Tick of the next look; None: no look is scheduled.
        self._is_over = False
        self.has_expired = False
        # Seconds for the error: the limit that passed, or the silence if the block ended before a
        # look; 0: the block was not ended by silence.
        self.exceeded_s = 0.0

    def __enter__(self) -> Self:
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._before = self._wheel.blocks.get(task)
        self._wheel.blocks[task] = self
        self._wheel.patient += self._is_patient
        self._tick = self._wheel.add(self, self._loop.time() + _FIRST_LOOK_S)
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
        # A due look may still hold this watchdog, so release the stream's objects here.
        del self._limit_s, self._paused, self._task, self._before
        if not self.has_expired or task.uncancel() > self._cancelling:
            return
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            raise SilentError(f"silent for {self.exceeded_s:.3g} s") from None

    def heard(self) -> None:
        self.silence.heard_s = self._loop.time()

    def look(self) -> None:
        """End the block if the limit has passed; otherwise schedule the next look."""
        now_s = self._loop.time()
        self._excuse(now_s)
        limit_s = self._limit_s(self.silence.heard_s, now_s)
        next_s = self.silence.look(now_s, limit_s, self._paused)
        if next_s is None:
            self.exceeded_s = limit_s
            self._expire()
            return
        self._tick = self._wheel.add(self, next_s)

    def look_in_turn(self, tick: int) -> None:
        # A watchdog with another tick has ended its block, or its look was moved.
        if self._tick == tick:
            self._tick = None
            self.look()

    def _excuse(self, now_s: float) -> None:
        """Leave the time out of the silence that the own event loop's lateness excuses."""
        self._wheel.note_lateness(now_s)
        excused_s = self._wheel.lateness.excused_s
        self.silence.excused(excused_s - self._excused_s, now_s)
        self._excused_s = excused_s

    def expire_if_silent(self) -> bool:
        """End the block now, as if the limit had passed, unless something was heard just before;
        return whether it ends.
        """
        now_s = self._loop.time()
        self._excuse(now_s)
        if not self.silence.may_be_suspected(now_s):
            return False
        self.exceeded_s = self.exceeded_s or now_s - self.silence.heard_s
        self._expire()
        return True

    def _expire(self) -> None:
        # Cancel in the next turn: the task itself may be the caller.
        self._loop.call_soon(self._cancel)

    def _cancel(self) -> None:
        if not self._is_over and not self.has_expired:
            self.has_expired = True
            self._task.cancel()


def _wheel_of(loop: asyncio.AbstractEventLoop) -> _TimerWheel:
    if (wheel := _wheels.get(loop)) is None:
        wheel = _wheels[loop] = _TimerWheel(loop)
    return wheel


def lateness() -> Lateness:
    """Return the lateness of the running event loop."""
    return _wheel_of(asyncio.get_running_loop()).lateness


def awake_since_s() -> float:
    """Return the time, by the running event loop's clock, since which this process has run without
    a pause; call within a watchdog's block. Data read right after a pause may have arrived at the
    pause's start.
    """
    loop = asyncio.get_running_loop()
    wheel = _wheels.get(loop)
    return loop.time() if wheel is None else wheel.awake_since_s()


def reset_timeout() -> None:
    """Begin the silence of the task's block anew, because this process itself has caused it."""
    task = asyncio.current_task()
    assert task is not None
    wheel = _wheels.get(task.get_loop())
    if wheel is not None and (watchdog := wheel.blocks.get(task)) is not None:
        watchdog.heard()
