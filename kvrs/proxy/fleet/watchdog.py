"""Ends a block in which nothing is heard for too long, at the price of one clock reading per
token.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar

from kvrs.control.silence import SilenceTimer
from kvrs.errors import UpstreamError


class SilentError(UpstreamError):
    """Nothing was heard for too long, although the connection stands."""


class Watchdog:
    def __init__(
        self, scope: asyncio.Timeout, limit_s: Callable[[], float], paused: Callable[[], bool]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._scope = scope
        self._limit_s = limit_s
        self._paused = paused
        self._silence = SilenceTimer(self._loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self.exceeded_s = 0.0  # The limit that ended the block.

    def heard(self) -> None:
        self._silence.heard_s = self._loop.time()

    def look(self) -> None:
        """End the block if the limit is passed; else look again in time for it."""
        limit_s = self._limit_s()
        next_s = self._silence.look(self._loop.time(), limit_s, self._paused)
        if next_s is None:
            self.exceeded_s = limit_s
            self.expire()
            return
        self.stop()
        self._timer = self._loop.call_at(next_s, self.look)

    def expire(self) -> None:
        """End the block now, as if the limit were passed."""
        if not self._scope.expired():
            now_s = self._loop.time()
            self.exceeded_s = self.exceeded_s or now_s - self._silence.heard_s
            self._scope.reschedule(now_s)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def close(self) -> None:
        """The block is over. A timer keeps its context, and so this watchdog: what belongs to a
        stream is let go here.
        """
        self.stop()
        self._timer = None
        del self._limit_s, self._paused


# Of the block that the current task is in.
_current: ContextVar[Watchdog | None] = ContextVar("watchdog", default=None)


def excuse_silence() -> None:
    """Count the silence of the block around this call from now on: this process is its cause."""
    if (watchdog := _current.get()) is not None:
        watchdog.heard()


@asynccontextmanager
async def silence_limit(
    limit_s: Callable[[], float], paused: Callable[[], bool] = lambda: False
) -> AsyncIterator[Watchdog]:
    """A block that may not go without `heard()` for `limit_s()`, save while `paused()`.

    Raises:
        SilentError: it did.
    """
    scope = asyncio.timeout(None)
    watchdog = Watchdog(scope, limit_s, paused)
    before = _current.set(watchdog)
    try:
        async with scope:
            watchdog.look()
            yield watchdog
    except TimeoutError:
        if not scope.expired():
            raise
        raise SilentError(f"silent for {watchdog.exceeded_s:.3g} s") from None
    finally:
        watchdog.close()
        _current.reset(before)
