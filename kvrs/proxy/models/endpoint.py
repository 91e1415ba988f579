"""One port of clients for several models.

Each model has a whole API of its own. A request is given to that of its model as it came, and from
there on nothing of another model is on its way; what no model could answer alone is answered here.
"""

import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from kvrs.config.proxy import ProxySettings
from kvrs.core.fleet.known import Instances
from kvrs.errors import RequestError
from kvrs.net.direct import DirectRequest, DirectServer, SentResponse, Serve
from kvrs.process.large_work import LargeWork
from kvrs.protocol.openai.response_ids import tag_of
from kvrs.protocol.openai.responses import PATH as RESPONSES
from kvrs.proxy.api import generate
from kvrs.proxy.api.answers import error_response, errors_as_openai, json_response
from kvrs.proxy.api.bodies import BODY, ClientBodies
from kvrs.proxy.api.health import add_probes, readiness
from kvrs.proxy.api.models import list_models
from kvrs.proxy.api.pages import AllowedPages
from kvrs.proxy.api.passed import PATHS
from kvrs.proxy.process.parts import Parts
from kvrs.proxy.wire.requests import ByteBudget, RequestUsage

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_FAULT = web.RequestKey("fault", RequestError)
_MODEL = "/v1/models/{model:.+}"
_RESPONSE = f"{RESPONSES}/{{id:[^/]+}}"


class _Named(msgspec.Struct):
    model: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


class ModelRouting:
    """The model that a request is for, by the name in its body or the id in its path.

    `models`: the instances of each, by the name in the configuration. There is at least one.
    """

    def __init__(self, models: Mapping[str, Instances]) -> None:
        self._models = models
        self._first = next(iter(models))
        self._by_tag = {tag_of(name): name for name in models}

    def of_body(self, body: bytes) -> str:
        """The model of a request with this body. A body that names none in the right form is that
        of the first one, which says what is wrong with it.

        Raises:
            RequestError: no model is named, or none has the name.
        """
        try:
            name = _NAMED.decode(body).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._first
        if name is None:
            raise RequestError(
                f"model is missing, and several are served; allowed: {self._allowed()}",
                param="model",
            )
        return self.of_name(name)

    def of_name(self, name: str) -> str:
        """The model with this name, alias or adapter; of several with an alias, the first one.

        Raises:
            RequestError: there is none.
        """
        if name in self._models:
            return name
        for model, instances in self._models.items():
            if name in instances.names.served(instances.model):
                return model
        raise RequestError(
            f"the model {name!r:.200} does not exist; allowed: {self._allowed()}",
            param="model",
            status=404,
            code="model_not_found",
        )

    def of_response(self, name: str) -> str:
        """The model of a response by its id; of no id, the first one, which says so."""
        return self._by_tag.get(name[-len(tag_of("")) :], self._first)

    def _allowed(self) -> str:
        names = dict.fromkeys(self._models)
        for instances in self._models.values():
            names |= dict.fromkeys(instances.names.served(instances.model))
        return ", ".join(map(repr, names))


class ModelsEndpoint:
    """`models`: the parts of each, by name; the first one's count what no model was found for.
    `settings`: those of the file, for all of them.
    """

    def __init__(
        self,
        models: Mapping[str, Parts],
        settings: ProxySettings,
        clock: Callable[[], float],
    ) -> None:
        self._models = models
        self._first = first = next(iter(models.values()))
        instances = {name: parts.driver.control.instances for name, parts in models.items()}
        self.routing = ModelRouting(instances)
        self._bodies = ClientBodies(settings, first.metrics.admission, clock)
        self._budget = ByteBudget(settings.body_budget_bytes, settings.max_body_bytes)
        self._large = LargeWork()
        self._created = int(time.time())
        self._pages = AllowedPages(settings.allowed_origins) if settings.allowed_origins else None
        self._runners: dict[str, web.AppRunner] = {}
        self._handlers: dict[str, Handler] = {}
        self._served: dict[str, dict[str, Serve]] = {}  # By path and model.

    async def open(self) -> tuple[web.Application, DirectServer]:
        """Start the API of each model; what the port has to serve."""
        for name, parts in self._models.items():
            app, direct = parts.observer.watch(parts.api.application(), parts.api.direct())
            self._runners[name] = runner = web.AppRunner(app)
            await runner.setup()
            assert runner.server is not None
            self._handlers[name] = runner.server.request_handler
            for path, serve in direct.paths.items():
                self._served.setdefault(path, {})[name] = serve
        refusing: dict[str, Serve] = dict.fromkeys(self._served, self._refuse)
        if self._pages is not None:
            refusing = self._pages.direct(refusing)
        own = DirectServer(refusing, self._bodies.unfinished)
        app, watched = self._first.observer.watch(self._application(), own)
        app.middlewares.insert(0, self._dispatch)
        app.on_cleanup.append(self._close)
        refuses = watched.paths
        paths: dict[str, Serve] = {
            path: partial(self._directly, serves, refuses[path])
            for path, serves in self._served.items()
        }
        return app, DirectServer(paths, self._bodies.unfinished)

    async def _close(self, _: web.Application) -> None:
        for runner in self._runners.values():
            await runner.cleanup()

    def _application(self) -> web.Application:
        pages = [] if self._pages is None else [self._pages.middleware()]
        app = web.Application(middlewares=[*pages, errors_as_openai, self._authenticate])
        for path in self._by_body:
            app.router.add_post(path, _raise_fault)
        app.router.add_get("/v1/models", self._list)
        for add, path in (
            (app.router.add_get, _MODEL),
            (app.router.add_get, _RESPONSE),
            (app.router.add_delete, _RESPONSE),
            (app.router.add_post, f"{_RESPONSE}/cancel"),
            (app.router.add_get, "/version"),
        ):
            add(path, _raise_fault)
        add_health_of(app, self._models, self._is_leaving)
        return app

    @property
    def _by_body(self) -> set[str]:
        """The paths of which the body names the model."""
        return {*self._served, *PATHS, RESPONSES}

    def _is_leaving(self) -> bool:
        return any(parts.api.is_leaving for parts in self._models.values())

    # Requests without aiohttp's server.

    def _directly(
        self, serves: Mapping[str, Serve], refuse: Serve, request: DirectRequest
    ) -> Coroutine[Any, Any, web.Response | SentResponse]:
        """A function, and no coroutine, which would last as long as the stream."""
        try:
            model = self._of_body(request.path, request.body)
        except RequestError as fault:
            request[_FAULT] = fault
            return refuse(request)
        return serves[model](request)

    async def _refuse(self, request: DirectRequest) -> web.Response:
        try:
            self._first.tenants.of(request)
            raise request[_FAULT]
        except RequestError as fault:
            return error_response(fault)

    # Others.

    @web.middleware
    async def _dispatch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Give a request to its model, before anything is counted here."""
        try:
            model = await self._model_of(request)
        except RequestError as fault:
            request[_FAULT] = fault
            model = None
        return await (handler if model is None else self._handlers[model])(request)

    async def _model_of(self, request: web.Request) -> str | None:
        """None: it is answered here. Raises RequestError."""
        resource = request.match_info.route.resource
        path = None if resource is None else resource.canonical
        if path == "/version":
            return next(iter(self._models))
        if path in ("/v1/models/{model}", f"{RESPONSES}/{{id}}", f"{RESPONSES}/{{id}}/cancel"):
            self._first.tenants.of(request)
            if "model" in request.match_info:
                return self.routing.of_name(request.match_info["model"])
            return self.routing.of_response(request.match_info["id"])
        if path not in self._by_body:
            return None
        self._first.tenants.of(request)
        with RequestUsage(self._budget, request.remote or "") as held:
            body = request[BODY] = await self._bodies.read(request, held)
            return await self._large.run(len(body), partial(self._of_body, path, body))

    def _of_body(self, path: str, body: bytes) -> str:
        if path == generate.PATH:
            raise RequestError(
                f"a request to {path} names no model, and several are served; allowed: "
                "/v1/completions, /v1/chat/completions",
                status=404,
            )
        return self.routing.of_body(body)

    # What is answered here.

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if (fault := request.get(_FAULT)) is not None:  # Of a key, or of one that is known.
            raise fault
        return await self._first.tenants.authenticate(request, handler)

    async def _list(self, _: web.Request) -> web.Response:
        known = (parts.driver.control.instances for parts in self._models.values())
        listed = [model for each in known for model in list_models(each, self._created)]
        return json_response(msgspec.json.encode({"object": "list", "data": listed}))


async def _raise_fault(request: web.Request) -> web.StreamResponse:
    raise request[_FAULT]


def add_health_of(
    app: web.Application, models: Mapping[str, Parts], leaving: Callable[[], bool]
) -> None:
    """The port is ready while one of the models is."""

    def is_ready() -> bool:
        return any(parts.driver.control.instances.ready() for parts in models.values())

    def text() -> str:
        """A line of each model, or several."""
        return "".join(
            f"{name}: {line}\n"
            for name, parts in models.items()
            for line in readiness(parts.driver.control.instances).splitlines()
        )

    def streams() -> int:
        return sum(len(parts.driver.streams) for parts in models.values())

    add_probes(app, leaving, is_ready, text, streams)
