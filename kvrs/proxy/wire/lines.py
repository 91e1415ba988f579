"""Lines of a long response, such as reports of a process, as they arrive."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from typing import cast

from kvrs.errors import UpstreamError
from kvrs.proxy.wire.errors import ConnectionLostError
from kvrs.proxy.wire.upstream import Need, Upstream

_MAX_LINE_BYTES = 8 << 20


class Lines(AsyncIterator[bytes]):
    """Lines of one answer, read by one task as they arrive.

    Raises:
        UpstreamError: the connection has ended, or brought no lines.
    """

    shortcut = None

    def __init__(self, upstream: Upstream, path: str) -> None:
        self.flow: Upstream | None = None
        self._upstream = upstream
        self._path = path
        self._lines = deque[bytes]()
        self._rest = bytearray()  # Received part of a line that is not complete yet.
        self._ended: asyncio.Future[Need]
        self._news: asyncio.Future[None] | None = None

    def feed(self, data: bytes) -> Need:
        first, *others = data.split(b"\n")
        self._rest += first
        for line in others:
            self._check()
            self._lines.append(bytes(self._rest))
            self._rest[:] = line
        self._check()
        self._wake()
        return Need.MORE

    def _check(self) -> None:
        if len(self._rest) > _MAX_LINE_BYTES:
            raise UpstreamError("sent a report of more than 8 MiB")

    def until(self, ended: Awaitable[Need]) -> None:
        """Wait for the end of the call, and then end the iteration over its lines."""
        self._ended = cast("asyncio.Future[Need]", ended)
        self._ended.add_done_callback(self._wake)

    def _wake(self, ended: asyncio.Future[Need] | None = None) -> None:
        if ended is not None and not ended.cancelled():
            ended.exception()  # Mark the error as retrieved, so that asyncio does not log it.
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def __anext__(self) -> bytes:
        while not self._lines:
            if self._ended.done():
                self._ended.result()
                if self._upstream.status != 200:
                    raise UpstreamError(f"HTTP {self._upstream.status} for {self._path}")
                raise ConnectionLostError("connection closed")
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._lines.popleft()
