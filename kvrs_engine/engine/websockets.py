"""WebSockets at the port of an instance, by handing their connections to aiohttp's server."""

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kvrs.net.connections import PortConnection
from kvrs.net.http import error
from kvrs.net.routes import Request, Response

Serve = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class _TakenOver(asyncio.Protocol):
    """Forwards all data to aiohttp's server, and the end also to the own connection, for its
    counters.
    """

    def __init__(self, connection: PortConnection, server: RequestHandler) -> None:
        self._connection = connection
        self._server = server

    def data_received(self, data: bytes) -> None:
        self._server.data_received(data)

    def pause_writing(self) -> None:
        self._server.pause_writing()

    def resume_writing(self) -> None:
        self._server.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connection_lost(exc)
        self._connection.connection_lost(exc)


async def serve_websocket(request: Request, serve: Serve) -> Response:
    """Have aiohttp serve a WebSocket request until its connection ends, which cancels this call."""
    if (transport := request.connection.transport) is None:
        return error(499, "the client closed its connection")
    server = web.Server(serve, access_log=None)()
    transport.set_protocol(_TakenOver(request.connection, server))
    server.connection_made(transport)
    lines = [f"{request.method} {request.path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in request.headers.items()]
    server.data_received(("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape"))
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
