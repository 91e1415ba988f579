"""Health of a proxy with several models: it is ready while one of them is."""

from collections.abc import Callable, Mapping

import msgspec
from aiohttp import web

from kvrs.proxy.api.answers import json_response
from kvrs.proxy.api.health import readiness
from kvrs.proxy.process.parts import Parts


def add_health_of(
    app: web.Application, models: Mapping[str, Parts], leaving: Callable[[], bool]
) -> None:
    def is_ready() -> bool:
        known = (parts.driver.control.instances for parts in models.values())
        return not leaving() and any(instances.ready() for instances in known)

    async def healthz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(_: web.Request) -> web.Response:
        if leaving():
            return web.Response(text="shutting down\n", status=503)
        lines = [
            f"{name}: {line}\n"
            for name, parts in models.items()
            for line in readiness(parts.driver.control.instances).splitlines()
        ]
        return web.Response(text="".join(lines), status=200 if is_ready() else 503)

    async def health(_: web.Request) -> web.Response:
        """Answer as `readyz`, without a text."""
        return web.Response(text="", status=200 if is_ready() else 503)

    async def load(_: web.Request) -> web.Response:
        """Open streams of all models."""
        streams = sum(len(parts.driver.streams) for parts in models.values())
        return json_response(msgspec.json.encode({"server_load": streams}))

    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/health", health)
    app.router.add_get("/ping", health)
    app.router.add_post("/ping", health)
    app.router.add_get("/load", load)
