"""The lines of a response that goes on, as they come: reports of a process."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable
from typing import cast

from kvrs.errors import UpstreamError
from kvrs.proxy.wire.peer import MAX_LINE_BYTES, ConnectionLostError
from kvrs.proxy.wire.upstream import Flow, Need, Upstream


class Lines(AsyncIterator[bytes]):
    """The lines of one answer, which one task reads as they come.

    Raises:
        UpstreamError: the connection has ended, or never brought lines.
    """

    shortcut = None

    def __init__(self, upstream: Upstream, path: str) -> None:
        self.flow: Flow | None = None
        self._upstream = upstream
        self._path = path
        self._lines = deque[bytes]()
        self._rest = b""
        self._ended: asyncio.Future[Need]
        self._news: asyncio.Future[None] | None = None

    def feed(self, data: bytes) -> Need:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise UpstreamError("sent a report of more than 8 MiB")
        self._lines += lines
        self._wake()
        return Need.MORE

    def until(self, ended: Awaitable[Need]) -> None:
        """The call of these lines runs until then."""
        self._ended = cast("asyncio.Future[Need]", ended)
        self._ended.add_done_callback(self._wake)

    def _wake(self, ended: asyncio.Future[Need] | None = None) -> None:
        if ended is not None and not ended.cancelled():
            ended.exception()  # asyncio logs an error that no reader has fetched.
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
