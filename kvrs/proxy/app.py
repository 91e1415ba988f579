"""The clients' port: OpenAI completions, models, health."""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import HttpVersion11, web

from kvrs.errors import RequestError
from kvrs.ids import StreamId
from kvrs.protocol.openai import CompletionRequest, error_body, parse_completion_request
from kvrs.proxy.clients import ClientGoneError, SseClient, WholeClient
from kvrs.proxy.config import ProxySettings
from kvrs.proxy.driver import Driver
from kvrs.proxy.journal import Journal
from kvrs.proxy.metrics import Metrics
from kvrs.proxy.streams import Complete, Failed

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    def __init__(self, settings: ProxySettings, driver: Driver, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._driver = driver
        self._metrics = metrics
        self._clock = clock
        self._created = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self._settings.max_body_bytes, middlewares=[_errors_as_openai])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        try:
            parsed = parse_completion_request(await self._body(request))
            if len(self._driver.streams) >= self._settings.max_streams:
                raise RequestError(f"{self._settings.max_streams} streams are open, which is all there may be", status=503)
        except (RequestError, web.HTTPException):
            self._metrics.requests.labels("rejected").inc()
            raise
        journal = self._open_journal(parsed)
        try:
            if parsed.stream:
                return await self._stream(request, journal)
            return await self._whole(journal)
        except asyncio.CancelledError:
            self._metrics.requests.labels("client_gone").inc()
            raise

    async def _body(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {self._settings.body_timeout_s} s", status=408) from None

    def _open_journal(self, request: CompletionRequest) -> Journal:
        if request.temperature > 0 and request.seed is None:
            # Every attempt must draw the same numbers.
            request.seed = secrets.randbits(63)
        return Journal(
            stream=StreamId(secrets.token_hex(16)),
            request=request,
            arrived_s=self._clock(),
            prompt_ids=None if isinstance(request.prompt, str) else request.prompt,
        )

    async def _stream(self, request: web.Request, journal: Journal) -> web.StreamResponse:
        client = SseClient(request, self._settings.write_timeout_s, self._clock)
        outcome = await self._driver.run(journal, client)
        try:
            match outcome:
                case Complete():
                    response = await client.end(journal.missing_end())
                case Failed():
                    response = _refusal(outcome) if client.response is None else await client.fail(outcome.body)
            self._metrics.requests.labels("complete" if outcome == Complete() else "failed").inc()
            return response
        except ClientGoneError:
            self._metrics.requests.labels("client_gone").inc()
            return client.response or web.Response(status=499)

    async def _whole(self, journal: Journal) -> web.Response:
        client = WholeClient()
        match await self._driver.run(journal, client):
            case Complete():
                await client.send(journal.missing_end())
                self._metrics.requests.labels("complete").inc()
                return _json(client.answer(journal))
            case Failed() as failure:
                self._metrics.requests.labels("failed").inc()
                return _refusal(failure)

    async def _models(self, _: web.Request) -> web.Response:
        model = self._driver.instances.model
        models = [] if model is None else [{"id": model, "object": "model", "created": self._created, "owned_by": "kvrs"}]
        return _json(msgspec.json.encode({"object": "list", "data": models}))

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        ready = self._driver.instances.ready()
        return web.Response(text="ready\n" if ready else "no instance is up\n", status=200 if ready else 503)


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _refusal(failure: Failed) -> web.Response:
    headers = None
    if failure.retry_after_s is not None:
        headers = {"Retry-After": str(max(1, math.ceil(failure.retry_after_s)))}
    return _json(failure.body, failure.status, headers)


@web.middleware
async def _errors_as_openai(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error of this port has the body that OpenAI clients read."""
    try:
        # aiohttp accepts this pair, by which a request can be smuggled past whoever stands before us.
        if request.version < HttpVersion11 and "Transfer-Encoding" in request.headers:
            raise RequestError("HTTP/1.0 has no Transfer-Encoding")
        return await handler(request)
    except RequestError as error:
        headers = {"Retry-After": "1"} if error.status == 503 else None
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        response = _json(error_body(str(error), kind=kind, param=error.param), error.status, headers)
        if error.status == 408:
            response.force_close()
        return response
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _json(error_body(error.reason), error.status)
