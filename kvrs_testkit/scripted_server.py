"""A process of a cluster as a proxy sees it: it listens on a port, and dies, hangs and restarts on
request of the test.
"""

import asyncio
import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrs.net.connections import ConnectionLimits, PortConnection
from kvrs.net.http import PieceWriter, inner_server
from kvrs.net.routes import WRITTEN, Handler, Request, Response, Routes
from kvrs.net.server import HttpServer
from kvrs.protocol.secrets import Scope, scoped_keys
from kvrs_lab.cluster.ports import _bind
from kvrs_testkit.memory_loop import MemoryLoop

SECRET = b"a secret of the tests"
_PIDS = itertools.count(1000)


class StreamDiedError(Exception):
    """A stream has ended behind the byte at which it was to end."""


class DyingWriter(PieceWriter):
    """Writes a stream's body, which may end behind any byte, as that of a process that dies."""

    def __init__(self, request: Request, content_type: str, server: "ScriptedServer") -> None:
        super().__init__(request, content_type)
        self._server, self._written = server, 0

    async def write(self, data: bytes) -> None:
        """Raises StreamDiedError, or ConnectionResetError: the client has left."""
        dies_at = self._server.dies_at_byte
        if dies_at is None or self._written + len(data) < dies_at:
            self._written += len(data)
            self._server.body_bytes = self._written
            await super().write(data)
            return
        self._server.dies_at_byte = None
        if rest := data[: dies_at - self._written]:
            await super().write(rest)
        self.transport.close()  # Sends first what was written.
        raise StreamDiedError


@dataclass(eq=False)
class ScriptedServer:
    """Keeps every request for the test."""

    id: str
    node: str
    epoch: int = 1
    pid: int = field(default_factory=lambda: next(_PIDS))
    port: int = 0
    secret: bytes = SECRET
    older: Sequence[bytes] = ()
    headers: list[dict[str, str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    host: str = "127.0.0.1"
    # Bytes of a stream's body behind which its connection closes, once.
    dies_at_byte: int | None = None
    body_bytes: int = 0  # Of the latest stream's body, as far as it was sent.
    _port: HttpServer | None = None
    _kept: socket.socket | None = None  # Bound at its port while it does not listen there.
    _connections: set[PortConnection] = field(default_factory=set)
    _watching: set[PortConnection] = field(default_factory=set)

    def add_routes(self, routes: Routes) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        self.awake.set()
        routes = Routes(self._note)
        self.add_routes(routes)
        keys = scoped_keys([self.secret, *self.older], self.id, *Scope)
        self._port = inner_server(
            routes, ConnectionLimits.of_peers(), shutdown_timeout_s=0.05, names=None, keys=keys
        )
        self.port = await self._port.open(self.host, self.port)
        self._leave_port()

    async def kill(self) -> None:
        """End it like SIGKILL: all connections are reset at once, and new ones are refused."""
        await self._end()
        if not isinstance(asyncio.get_running_loop(), MemoryLoop):
            # The system gives the port to no other process before the restart.
            self._kept = _bind(self.host, self.port)

    async def restart(self) -> None:
        self.epoch += 1
        self.pid = next(_PIDS)
        await self.start()

    async def close(self) -> None:
        if self._port is not None:
            await self._end()
        self._leave_port()

    async def _end(self) -> None:
        assert self._port is not None
        await self._port.stop_listening()
        for connection in list(self._connections):
            connection.abort()
        await self._port.close()
        self._port = None

    def _leave_port(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    def freeze(self) -> None:
        """Stop it like SIGSTOP: connections stand and are taken, and nothing comes of them
        until `thaw`.
        """
        self.awake.clear()

    def thaw(self) -> None:
        self.awake.set()

    def cut_watch(self) -> None:
        """Break the proxy's watch connection only; the process runs on."""
        for connection in list(self._watching):
            connection.abort()

    def cut_streams(self) -> None:
        """All other connections break."""
        for connection in self._connections - self._watching:
            connection.abort()

    async def _note(self, request: Request, handler: Handler) -> Response:
        self._connections.add(request.connection)
        await self.awake.wait()
        self.calls.append(f"{request.method} {request.path}")
        self.headers.append(headers := dict(request.headers))
        if request.content_length:  # That of a usual request is no header any more.
            headers["Content-Length"] = str(request.content_length)
        try:
            return await handler(request)
        except StreamDiedError:
            return WRITTEN
