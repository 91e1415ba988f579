"""The clients' port: the APIs of OpenAI and Anthropic, models, health."""

from collections.abc import Callable
from functools import partial

from kvrs.config.proxy import ProxySettings
from kvrs.net.routes import Routes
from kvrs.process.large_work import LargeWork
from kvrs.proxy.api.admission import Admissions
from kvrs.proxy.api.health import add_health
from kvrs.proxy.api.messages import MessagesApi
from kvrs.proxy.api.models import add_models
from kvrs.proxy.api.passed import Passed
from kvrs.proxy.api.responses import ResponsesApi
from kvrs.proxy.api.serving import Serving
from kvrs.proxy.api.tenants import Tenants
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.wire.requests import CHAT, COMPLETIONS, read


class ClientApi:
    """Routes requests of clients to their handlers."""

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
        self.leaving = False  # The proxy reports that it is not ready, but serves on.
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
        )
        self.responses = ResponsesApi(serving, backend, driver, mirror, tenants)

    def routes(self) -> Routes:
        routes = Routes()
        for endpoint in (COMPLETIONS, CHAT):
            read_body = partial(read, endpoint, backend=self._backend)
            routes.add("POST", endpoint.path, partial(self.serving.serve, read_body))
        self.responses.add_to(routes)
        MessagesApi(self.serving, self._passed, self._backend).add_to(routes)
        self._passed.add_to(routes)
        add_models(routes, self._driver.control.instances)
        add_health(routes, self._backend, self._driver, lambda: self.is_leaving)
        return routes

    @property
    def is_leaving(self) -> bool:
        return self.leaving or self.admissions.draining
