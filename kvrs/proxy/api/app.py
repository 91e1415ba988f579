"""The clients' port: OpenAI completions and chat, DistServe's /generate, models, health."""

from collections.abc import Callable, Iterator
from functools import partial

from aiohttp import web

from kvrs.config.proxy import ProxySettings
from kvrs.net.direct import DirectServer, Serve
from kvrs.process.large_work import LargeWork
from kvrs.proxy.api import generate
from kvrs.proxy.api.admission import Admissions
from kvrs.proxy.api.generate import read_generate
from kvrs.proxy.api.health import add_health
from kvrs.proxy.api.models import add_models
from kvrs.proxy.api.observing import RequestObserver
from kvrs.proxy.api.passed import Passed
from kvrs.proxy.api.responses import ResponsesApi
from kvrs.proxy.api.serving import Read, Serving
from kvrs.proxy.api.tenants import Tenants
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.wire.requests import CHAT, COMPLETIONS, read


class ClientApi:
    """Routes requests to what serves them."""

    def __init__(
        self,
        settings: ProxySettings,
        backend: str,
        driver: Driver,
        mirror: Mirror,
        metrics: Metrics,
        clock: Callable[[], float],
        tenants: Tenants,
        large: LargeWork,
    ) -> None:
        self.leaving = False  # It is not ready any more, and serves on.
        self._backend = backend
        self._driver = driver
        self.admissions = admissions = Admissions(
            settings, backend, driver, mirror, metrics.admission, clock, tenants, large
        )
        self._passed = Passed(admissions, backend, driver, large)
        self.serving = serving = Serving(
            admissions,
            driver,
            mirror,
            self._passed,
            metrics,
            clock,
        )
        self._responses = ResponsesApi(serving, backend, driver, mirror, tenants)

    def application(self, observer: RequestObserver) -> web.Application:
        app = web.Application(middlewares=[observer.answer])
        for path, parse in self._readers():
            app.router.add_post(path, partial(self.serving.in_full, parse))
        self._responses.add_to(app)
        self._passed.add_to(app)
        add_models(app, self._driver.control.instances)
        add_health(app, self._backend, self._driver, lambda: self.is_leaving)
        return app

    def direct(self, observer: RequestObserver) -> DirectServer:
        """The same requests without aiohttp's server."""
        paths: dict[str, Serve] = {
            path: partial(observer.answer, handler=partial(self.serving.serve, parse))
            for path, parse in self._readers()
        }
        return DirectServer(paths, self.admissions.bodies.unfinished)

    def _readers(self) -> Iterator[tuple[str, Read]]:
        for path, parse in (
            (COMPLETIONS.path, partial(read, COMPLETIONS)),
            (CHAT.path, partial(read, CHAT)),
            (generate.PATH, read_generate),
        ):
            yield path, partial(parse, backend=self._backend)

    @property
    def is_leaving(self) -> bool:
        return self.leaving or self.admissions.draining
