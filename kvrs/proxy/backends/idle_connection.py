"""An idle connection to a server that cannot report its own end: when the server's process dies,
the connection ends.
"""

import asyncio

from kvrs.proxy.wire.upstream import Pool


class IdleConnection:
    """A connection that is kept idle, because the kernel ends it at once when the server's process
    dies.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._gone: asyncio.Task[None] | None = None
        # True after the connection ended: a server may close each idle connection at once, so the
        # next one waits.
        self._must_pause = False

    async def __aenter__(self) -> "IdleConnection":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._gone is not None:
            self._gone.cancel()
            # Any error of the connection is dropped, so that an exception in this block stays
            # visible.
            await asyncio.gather(self._gone, return_exceptions=True)

    async def wait(self, seconds: float) -> bool:
        """Wait `seconds`, or until the connection ends. Return True if it ended: the process is
        dead, or has only closed an idle connection.
        """
        if self._must_pause:
            self._must_pause = False
            await asyncio.sleep(seconds)
            return False
        if self._gone is None:
            self._gone = asyncio.create_task(self._hold())
        await asyncio.wait({self._gone}, timeout=seconds)
        if not self._gone.done():
            return False
        ended, self._gone, self._must_pause = self._gone, None, True
        ended.result()
        return True

    async def _hold(self) -> None:
        ended = asyncio.Event()
        upstream = await self._pool.connect(lambda *_: ended.set())
        try:
            await ended.wait()
        finally:
            upstream.close()
