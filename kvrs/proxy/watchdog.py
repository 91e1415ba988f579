"""Notices silence, at the price of one clock reading per token."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvrs.errors import UpstreamError

# Less than this is no silence, however quick the source was before: machines pause.
SHORTEST_SILENCE_S = 2.0
# Silence lasts for this many of a source's usual intervals, so that one which has become ten times as slow is not silent.
_USUAL_INTERVALS = 20
# A look that is so late was kept waiting by this process itself.
_DEAF_S = 0.25


def silent_after_s(usual_s: float, longest_s: float) -> float:
    """How long a source that speaks every `usual_s` may say nothing; never more than `longest_s`."""
    return min(longest_s, max(SHORTEST_SILENCE_S, _USUAL_INTERVALS * usual_s))


class SilentError(UpstreamError):
    """Nothing was heard for too long, although the connection stands."""


class Watchdog:
    """Ends a block in which nothing is heard for too long. Its one timer is re-armed when it fires, not per token."""

    def __init__(self, scope: asyncio.Timeout, limit_s: Callable[[], float], paused: Callable[[], bool]) -> None:
        self._loop = asyncio.get_running_loop()
        self._scope = scope
        self._limit_s = limit_s
        self._paused = paused
        self._heard_s = self._next_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self.exceeded_s = 0.0  # The limit that ended the block.

    def heard(self) -> None:
        self._heard_s = self._loop.time()

    def look(self) -> None:
        """End the block if the limit is passed; else look again in time for it, which may have become shorter by then."""
        now_s, limit_s = self._loop.time(), self._limit_s()
        # Who did not listen cannot say that nothing was said: what came meanwhile may be read after this.
        if now_s - self._next_s > _DEAF_S:
            self.heard()
        if now_s >= self._heard_s + limit_s:
            if not self._paused():
                self.exceeded_s = limit_s
                self.expire()
                return
            self.heard()
        self._next_s = min(self._heard_s + limit_s, now_s + SHORTEST_SILENCE_S)
        self.stop()
        self._timer = self._loop.call_at(self._next_s, self.look)

    def expire(self) -> None:
        """End the block now, as if the limit were passed."""
        if not self._scope.expired():
            self.exceeded_s = self.exceeded_s or self._loop.time() - self._heard_s
            self._scope.reschedule(self._loop.time())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


@asynccontextmanager
async def silence_limit(limit_s: Callable[[], float], paused: Callable[[], bool] = lambda: False) -> AsyncIterator[Watchdog]:
    """A block that may not go without `heard()` for `limit_s()`, save while `paused()`.

    Raises:
        SilentError: it did.
    """
    scope = asyncio.timeout(None)
    watchdog = Watchdog(scope, limit_s, paused)
    try:
        async with scope:
            watchdog.look()
            yield watchdog
    except TimeoutError:
        if not scope.expired():
            raise
        raise SilentError(f"silent for {watchdog.exceeded_s:.3g} s") from None
    finally:
        watchdog.stop()
