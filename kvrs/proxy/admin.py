"""The operator's port: state and metrics. Never the clients' port."""

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from kvrs.proxy.driver import Driver
from kvrs.proxy.hearsay import Hearsay
from kvrs.proxy.metrics import Metrics
from kvrs.proxy.state import describe, measure


class Admin:
    def __init__(
        self,
        driver: Driver,
        metrics: Metrics,
        hearsay: Hearsay,
        proxy: Callable[[], dict[str, Any]],
        clock: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._metrics = metrics
        self._hearsay = hearsay
        self._proxy = proxy
        self._clock = clock

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/kvrs/v1/state", self._state)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_get("/healthz", self._healthz)
        return app

    async def _state(self, _: web.Request) -> web.Response:
        state = describe(self._driver, self._hearsay, self._proxy(), self._clock())
        return web.Response(body=msgspec.json.encode(state), content_type="application/json")

    async def _show_metrics(self, _: web.Request) -> web.Response:
        measure(self._driver, self._hearsay, self._metrics)
        return web.Response(body=self._metrics.render(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")
