"""The operator's port, which is not the clients': state, metrics, reload."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvrs.config.file import Config, SecuritySettings, read_admin_tokens
from kvrs.errors import ConfigError
from kvrs.http import HEALTHZ, answer, require_token
from kvrs.proxy.api.openapi import add_document, admin_document
from kvrs.proxy.api.overview import overview
from kvrs.proxy.api.state import describe, measure
from kvrs.proxy.reload import Apply, ReloadingPart, ReloadResult, Reloads
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.watch.gossip_view import GossipView

UI = "/ui"
# The page holds no data: it asks for them, with the token that is typed in. It loads nothing else.
_UI_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src "
    "'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action "
    "'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class AdminSource(Protocol):
    """What the port shows and does: of one process, or of all workers of a proxy."""

    async def state(self) -> dict[str, Any]: ...
    async def metrics(self) -> Collector: ...
    async def reload(self) -> ReloadResult: ...  # Raises ConfigError.
    def serves(self) -> bool: ...  # Whether it takes requests of clients.


class OwnSource:
    """Of this process."""

    def __init__(
        self,
        driver: Driver,
        metrics: Metrics,
        gossip_view: GossipView,
        proxy: Callable[[], dict[str, Any]],
        reloads: Reloads,
        clock: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._metrics = metrics
        self._gossip_view = gossip_view
        self._proxy = proxy
        self._clock = clock
        self.reload = reloads.reload

    async def state(self) -> dict[str, Any]:
        return describe(self._driver, self._gossip_view, self._proxy(), self._clock())

    async def metrics(self) -> Collector:
        return self.measured().registry

    def measured(self) -> Metrics:
        measure(self._driver, self._gossip_view, self._metrics)
        return self._metrics

    def serves(self) -> bool:
        return True


class Admin:
    def __init__(self, source: AdminSource, reloads: Reloads, security: SecuritySettings) -> None:
        # One of them is required; none: no token is.
        self._tokens = read_admin_tokens(security, os.environ)
        reloads.add(ReloadingPart("admin_token", self._prepare_tokens))
        self._source = source
        self._reloads = reloads
        self._page = (Path(__file__).parent / "ui.html").read_bytes()

    def application(self) -> web.Application:
        authenticate = require_token(self._tokens, "the admin token", (HEALTHZ, UI))
        app = web.Application(middlewares=[authenticate] if self._tokens else [])
        app.router.add_get(UI, self._ui)
        app.router.add_get("/kvrs/v1/state", self._state)
        app.router.add_get("/kvrs/v1/overview", self._overview)
        app.router.add_post("/kvrs/v1/reload", self._reload)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/healthz", self._healthz)
        add_document(app, admin_document())
        return app

    def _prepare_tokens(self, config: Config) -> Apply | None:
        found = read_admin_tokens(config.security, os.environ)
        if found == self._tokens:
            return None
        return partial(self._tokens.__setitem__, slice(None), found)

    async def _state(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(await self._source.state())
        return web.Response(body=body, content_type="application/json")

    async def _overview(self, _: web.Request) -> web.Response:
        config = self._reloads.config
        policy = {
            "policy": config.policy.name.value,
            "handoff": config.policy.handoff.value,
            "dispatch": config.policy.dispatch.value,
            "backup": config.backup.mode.value,
        }
        body = msgspec.json.encode(overview(await self._source.state(), policy))
        return web.Response(body=body, content_type="application/json")

    async def _ui(self, _: web.Request) -> web.Response:
        """The page that shows the overview every second."""
        return web.Response(
            body=self._page, content_type="text/html", charset="utf-8", headers=_UI_HEADERS
        )

    async def _reload(self, _: web.Request) -> web.Response:
        """Take over what has changed in the file: 400 with every fault where it has any."""
        try:
            return answer(await self._source.reload())
        except ConfigError as error:
            what = {"message": str(error), "type": "invalid_configuration", "faults": error.faults}
            return web.Response(
                status=400,
                body=msgspec.json.encode({"error": what | {"param": None, "code": None}}),
                content_type="application/json",
            )

    async def _show_metrics(self, request: web.Request) -> web.Response:
        """In the text format, or in OpenMetrics where that is asked for."""
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        body = encode(await self._source.metrics())
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _healthz(self, _: web.Request) -> web.Response:
        if self._source.serves():
            return web.Response(text="ok\n")
        return web.Response(text="no worker is up\n", status=503)
