"""Notices silence, at the price of one clock reading per token."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvrs.errors import UpstreamError


class Watchdog:
    """Ends a block in which nothing is heard for too long. Its one timer is re-armed when it fires, not per token."""

    def __init__(self, limit_s: float, paused: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._paused = paused
        self._heard_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def heard(self) -> None:
        self._heard_s = self._loop.time()

    def guard(self, scope: asyncio.Timeout) -> None:
        self._timer = self._loop.call_at(self._heard_s + self._limit_s, self._look, scope)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, scope: asyncio.Timeout) -> None:
        if self._paused():
            self.heard()
        if self._loop.time() >= self._heard_s + self._limit_s:
            scope.reschedule(self._loop.time())
        else:
            self.guard(scope)


@asynccontextmanager
async def silence_limit(limit_s: float, paused: Callable[[], bool]) -> AsyncIterator[Watchdog]:
    """A block that may not go without `heard()` for `limit_s`, save while `paused()`.

    Raises:
        UpstreamError: it did.
    """
    watchdog = Watchdog(limit_s, paused)
    scope = asyncio.timeout(None)
    try:
        async with scope:
            watchdog.guard(scope)
            yield watchdog
    except TimeoutError:
        if not scope.expired():
            raise
        raise UpstreamError(f"silent for {limit_s:.3g} s") from None
    finally:
        watchdog.stop()
