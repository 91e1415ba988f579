"""A streamed response to a client, whose bytes are written straight to its connection's transport.

The request was served directly (`kvrs/direct.py`) or by aiohttp's server; the head and the framing
of the body are made here, so that a write is one call and needs no task.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time

from kvrs.direct import DirectConnection, DirectRequest
from kvrs.http_connection import SERVER, HttpConnection
from kvrs.proxy.wire.request_context import header_lines, noted_lines

# More than this unsent: the client does not read as fast as the engine writes.
UNSENT_BYTES = 64 << 10

_LAST_CHUNK = b"0\r\n\r\n"

# The head of a stream of events, but for what each has of its own.
_EVENT_STREAM = (
    " 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    f"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\nServer: {SERVER}\r\n"
)
_CHUNKED = "Transfer-Encoding: chunked\r\n"
_LAST_OF_CONNECTION = "Connection: close\r\n"

ClientRequest = DirectRequest | web.Request


class StreamedResponse:
    """A stream of events. `headers` are those beside the usual ones; `room_changed` is called with
    whether the client has room for more.
    """

    __slots__ = ("_connection", "_head", "_is_chunked", "_transport", "keeps_open")

    def __init__(
        self,
        request: ClientRequest,
        headers: Mapping[str, str],
        room_changed: Callable[[bool], None],
    ) -> None:
        """Make the head, which is written with the first bytes.

        Raises:
            ConnectionError: the client is gone.
        """
        transport, connection = request.transport, request.protocol
        if transport is None:
            raise ConnectionResetError("the client closed its connection")
        self._transport: asyncio.Transport = transport
        self._connection: DirectConnection | HttpConnection | None = None
        if isinstance(connection, DirectConnection | HttpConnection):
            self._connection = connection
        self._is_chunked = request.version >= HttpVersion11
        self.keeps_open = request.keep_alive and self._is_chunked
        transport.set_write_buffer_limits(high=UNSENT_BYTES, low=UNSENT_BYTES)
        if self._connection is not None:
            self._connection.room_changed = room_changed
        lines = header_lines(headers) + noted_lines(request)
        if self._is_chunked:
            lines += _CHUNKED if self.keeps_open else _CHUNKED + _LAST_OF_CONNECTION
        version = f"HTTP/{request.version.major}.{request.version.minor}"
        date = rfc822_formatted_time()
        self._head = f"{version}{_EVENT_STREAM}{lines}Date: {date}\r\n\r\n".encode()
        # No error is sent after this.
        if isinstance(request, DirectRequest):
            request.is_begun = True
        else:
            request.writer.output_size += len(self._head)

    @property
    def chunked_to(self) -> asyncio.Transport | None:
        """Where the chunks of its body go; None: it has none."""
        return self._transport if self._is_chunked else None

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def send(self, data: bytes, *, is_last: bool = False) -> None:
        if self._is_chunked:
            end = _LAST_CHUNK if is_last else b""
            data = b"%x\r\n%b\r\n%b" % (len(data), data, end)
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)

    def abort(self) -> None:
        self._transport.abort()

    def leave(self) -> None:
        """The connection goes on to another request."""
        if self._connection is not None:
            self._connection.room_changed = None


class Sent(web.StreamResponse):
    """A streamed response, for aiohttp's server when its handler has returned."""

    def __init__(self, response: StreamedResponse) -> None:
        super().__init__()
        self._response = response
        if not response.keeps_open:
            self.force_close()
        else:
            self._keep_alive = True

    async def prepare(self, request: web.BaseRequest) -> Any:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        self._response.leave()
