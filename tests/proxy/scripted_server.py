"""A process of a cluster, as far as a proxy can tell: it listens on a port, and dies, hangs and returns when it is told to."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web

_PIDS = itertools.count(1000)


@dataclass(eq=False)
class ScriptedServer:
    """Everything that it was asked is kept for the test to look at."""

    id: str
    node: str
    epoch: int = 1
    pid: int = field(default_factory=lambda: next(_PIDS))
    port: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    _runner: web.AppRunner | None = None
    _connections: set[asyncio.BaseTransport] = field(default_factory=set)
    _watching: set[asyncio.BaseTransport] = field(default_factory=set)

    def routes(self, router: web.UrlDispatcher) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        self.awake.set()
        app = web.Application(middlewares=[self._note])
        self.routes(app.router)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """As by SIGKILL: every connection is reset in the same instant, and nobody listens."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()
        for transport in list(self._connections):
            abort(transport)
        await self._runner.cleanup()
        self._runner = None

    async def restart(self) -> None:
        self.epoch += 1
        self.pid = next(_PIDS)
        await self.start()

    async def close(self) -> None:
        if self._runner is not None:
            await self.kill()

    def freeze(self) -> None:
        """As by SIGSTOP: connections stand and are taken, and nothing comes of them until `thaw`."""
        self.awake.clear()

    def thaw(self) -> None:
        self.awake.set()

    def cut_watch(self) -> None:
        """Only the proxy's watch connection breaks; the process lives on."""
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
