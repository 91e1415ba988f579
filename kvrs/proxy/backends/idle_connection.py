"""An idle connection to a server without a watch of its own: its end signals a death."""

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

from kvrs.process.descriptors import is_exhausted
from kvrs.proxy.wire.errors import unreached
from kvrs.proxy.wire.pool import wait_for_descriptor


class IdleConnection:
    """An idle connection, which the kernel ends at once when the server's process dies."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname, address.port
        self._gone: asyncio.Task[None] | None = None
        # Pause before connecting again, in case the server closes idle connections at once.
        self._must_pause = False

    async def __aenter__(self) -> "IdleConnection":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._gone is not None:
            self._gone.cancel()
            # The connection's result must not replace this block's exception.
            await asyncio.gather(self._gone, return_exceptions=True)

    async def wait(self, seconds: float) -> bool:
        """Wait `seconds`, or until the connection ends, and return whether it did: the process is
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
        while True:
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port)
                break
            except OSError as error:
                if not is_exhausted(error):
                    raise unreached(error) from None
            await wait_for_descriptor()
        try:
            with suppress(ConnectionError):
                await reader.read(1)
        finally:
            writer.transport.abort()
