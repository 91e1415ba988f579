"""A streamed response to a client, whose bytes are written straight to its connection's transport.

aiohttp serves the request; the head and the framing of the body are made here, so that a write is
one call and needs no task.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE

from kvrs.http import HttpConnection

# More than this unsent: the client does not read as fast as the engine writes.
UNSENT_BYTES = 64 << 10

_LAST_CHUNK = b"0\r\n\r\n"


class StreamedResponse(web.StreamResponse):
    """Status 200. `room_changed` is called with whether the client has room for more."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        room_changed: Callable[[bool], None],
    ) -> None:
        """Write the head.

        Raises:
            ConnectionError: the client is gone.
        """
        super().__init__()
        connection = request.protocol
        if request.transport is None:
            raise ConnectionResetError("the client closed its connection")
        self._transport: asyncio.Transport = request.transport
        self._connection = connection if isinstance(connection, HttpConnection) else None
        self._is_chunked = request.version >= HttpVersion11
        self._keep_alive = request.keep_alive and self._is_chunked
        self._transport.set_write_buffer_limits(high=UNSENT_BYTES, low=UNSENT_BYTES)
        if self._connection is not None:
            self._connection.room_changed = room_changed
        fields = {**headers, "Date": rfc822_formatted_time(), "Server": SERVER_SOFTWARE}
        if self._is_chunked:
            fields["Transfer-Encoding"] = "chunked"
            if not self._keep_alive:
                fields["Connection"] = "close"
        version = f"HTTP/{request.version.major}.{request.version.minor}"
        lines = [f"{version} 200 OK", *(f"{name}: {value}" for name, value in fields.items())]
        self._head = ("\r\n".join(lines) + "\r\n\r\n").encode()
        # aiohttp sends no error of its own after this.
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

    # What aiohttp's server calls when the handler has returned.

    async def prepare(self, request: web.BaseRequest) -> Any:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        if self._connection is not None:
            self._connection.room_changed = None
