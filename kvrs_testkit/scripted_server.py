"""A process of a cluster as a proxy sees it: it listens on a port, and dies, hangs and restarts on
request of the test.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web

from kvrs.net.connections import ConnectionLimits
from kvrs.net.http import HttpPort
from kvrs.protocol.secrets import Scope, scoped_keys

SECRET = b"a secret of the tests"
_PIDS = itertools.count(1000)


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
    _port: HttpPort | None = None
    _connections: set[asyncio.BaseTransport] = field(default_factory=set)
    _watching: set[asyncio.BaseTransport] = field(default_factory=set)

    def routes(self, router: web.UrlDispatcher) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        self.awake.set()
        app = web.Application(client_max_size=64 << 20, middlewares=[self._note])
        self.routes(app.router)
        keys = scoped_keys([self.secret, *self.older], self.id, *Scope)
        self._port = HttpPort(
            app, ConnectionLimits.of_peers(), shutdown_timeout_s=0.05, names=None, keys=keys
        )
        self.port = await self._port.open(self.host, self.port)

    async def kill(self) -> None:
        """End it like SIGKILL: all connections are reset at once, and new ones are refused."""
        assert self._port is not None
        await self._port.stop_listening()
        for transport in list(self._connections):
            abort(transport)
        await self._port.close()
        self._port = None

    async def restart(self) -> None:
        self.epoch += 1
        self.pid = next(_PIDS)
        await self.start()

    async def close(self) -> None:
        if self._port is not None:
            await self.kill()

    def freeze(self) -> None:
        """Stop it like SIGSTOP: connections stand and are taken, and nothing comes of them
        until `thaw`.
        """
        self.awake.clear()

    def thaw(self) -> None:
        self.awake.set()

    def cut_watch(self) -> None:
        """Break the proxy's watch connection only; the process runs on."""
        for transport in list(self._watching):
            abort(transport)

    def cut_streams(self) -> None:
        """All other connections break."""
        for transport in self._connections - self._watching:
            abort(transport)

    @web.middleware
    async def _note(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        assert request.transport is not None
        self._connections.add(request.transport)
        await self.awake.wait()
        self.calls.append(f"{request.method} {request.path}")
        self.headers.append(dict(request.headers))
        response: web.StreamResponse = await handler(request)
        return response


def abort(transport: asyncio.BaseTransport) -> None:
    # uvloop's transports do what asyncio's do, and descend from none of them.
    cast(asyncio.Transport, transport).abort()
