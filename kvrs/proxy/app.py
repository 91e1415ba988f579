"""The clients' port: OpenAI completions and chat, DistServe's /generate, models, health."""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from aiohttp import HttpVersion11, web

from kvrs.errors import ConfigError, RequestError
from kvrs.ids import StreamId
from kvrs.policy.events import Deadlines
from kvrs.protocol.openai import CompletionRequest, error_body
from kvrs.proxy import generate
from kvrs.proxy.answers import WholeClient, answer, total_usage
from kvrs.proxy.choices import ChoiceClient, Merger, run_together
from kvrs.proxy.clients import Client, ClientGoneError, SseClient
from kvrs.proxy.config import Inexact, ProxySettings
from kvrs.proxy.deadlines import deadlines_of
from kvrs.proxy.driver import Driver
from kvrs.proxy.exactness import inexact_features
from kvrs.proxy.forms import CHAT, COMPLETIONS, Asked, read
from kvrs.proxy.generate import GenerateClient, WholeGenerateClient, read_generate
from kvrs.proxy.journal import Journal
from kvrs.proxy.metrics import Metrics
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.mirror.keys import Asking, asking_of, reopened
from kvrs.proxy.mirror.mirroring import SUPERSEDED, Mirror
from kvrs.proxy.mirror.records import Record
from kvrs.proxy.streams import Complete, Failed, Outcome

log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0  # For the mirror to hear all that the client of a failed stream has.

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Api:
    def __init__(
        self, settings: ProxySettings, driver: Driver, mirror: Mirror, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self.draining = False  # No new streams are taken.
        self._settings = settings
        self._driver = driver
        self._mirror = mirror
        self._metrics = metrics
        self._clock = clock
        self._created = int(time.time())

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self._settings.max_body_bytes, middlewares=[_errors_as_openai])
        app.router.add_post(COMPLETIONS.path, self._completions)
        app.router.add_post(CHAT.path, self._chat)
        app.router.add_post(generate.PATH, self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        return app

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, partial(read, COMPLETIONS))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, partial(read, CHAT))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_generate)

    async def _answer(self, request: web.Request, read_body: Callable[[bytes], Asked]) -> web.StreamResponse:
        try:
            body = await self._body(request)
            asked = read_body(body)
            asking = asking_of(request.headers, request.path, body, asked)
            self._check_model(asked.request.model)
            inexact = self._inexact(asked)
            deadlines = deadlines_of(request.headers)
            echo = await self._echo(asked)
            if len(self._driver.streams) + asked.request.n > self._settings.max_streams:
                raise RequestError(f"{len(self._driver.streams)} of {self._settings.max_streams} streams are open", status=503)
            self._check_open()
            found = None if asking is None else await self._mirror.find(asking)
            self._check_open()  # What lived here has been handed over meanwhile.
        except (RequestError, web.HTTPException):
            self._metrics.requests.labels("rejected").inc()
            raise
        if found is not None:
            journals = [reopened(found, asked, self._clock())]
        else:
            journals = self._open_journals(asked, inexact, deadlines)
        headers = {"X-Kvrs-Exact": "no"} if inexact else {}
        try:
            if asking is not None:
                return await self._resumable(request, asked, asking, journals[0], found, echo, headers)
            if asked.request.stream:
                return await self._stream(request, asked, journals, echo, headers)
            if request.path == generate.PATH:
                return await self._whole_generate(asked, journals[0], headers)
            return await self._whole(asked, journals, echo, headers)
        except asyncio.CancelledError:
            self._metrics.requests.labels("client_gone").inc()
            raise

    async def _body(self, request: web.Request) -> bytes:
        if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
            raise RequestError(f"Content-Encoding {encoding!r:.80} is not supported; allowed: 'identity'", status=415)
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise RequestError(f"the body must be at most {self._settings.max_body_bytes} bytes", status=413) from None
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {self._settings.body_timeout_s} s", status=408) from None

    def _check_open(self) -> None:
        if self.draining:
            raise RequestError("the proxy is shutting down", status=503, code="shutting_down")

    def _check_model(self, model: str | None) -> None:
        """Only one is served. While no instance has said which, any may be asked for."""
        served = self._driver.instances.model
        if model is not None and served is not None and model != served:
            raise RequestError(
                f"the model {model!r:.200} does not exist; allowed: {served!r}", param="model", status=404, code="model_not_found"
            )

    def _inexact(self, asked: Asked) -> tuple[str, ...]:
        """What of the request could not be continued exactly on the engines that there are."""
        plain = self._driver.instances.plain()
        if plain is None:
            return ()
        features = inexact_features(asked, has_tokenizer=self._driver.texts.available)
        if features and self._settings.inexact is Inexact.REFUSE:
            raise RequestError(
                f"{features[0]} cannot be continued exactly by instance {plain!r}, should the stream be cut, and "
                "proxy.inexact is 'refuse'; allowed: a request without it",
                param=features[0],
            )
        return features

    async def _echo(self, asked: Asked) -> str | None:
        if not asked.echo:
            return None
        assert isinstance(asked.request, CompletionRequest)
        if isinstance(asked.request.prompt, str):
            return asked.request.prompt
        try:
            return (await self._driver.texts.tokenizer()).decode(asked.request.prompt)
        except ConfigError as error:
            raise RequestError(f"a prompt of ids cannot be echoed: {error}", param="echo") from None

    def _open_journals(self, asked: Asked, inexact: tuple[str, ...], deadlines: Deadlines) -> list[Journal]:
        """One per choice. Every attempt must draw the same numbers, and every choice others."""
        request, seed = asked.request, asked.request.seed
        if request.temperature > 0 and seed is None:
            seed = secrets.randbits(62)
        return [
            Journal(
                stream=StreamId(secrets.token_hex(16)),
                asked=asked,
                arrived_s=self._clock(),
                seed=None if seed is None else _wrapped(seed + index),
                wants_usage=asked.wants_usage and request.n == 1,
                prompt_ids=asked.prompt_ids,
                deadlines=deadlines,
                inexact=inexact,
            )
            for index in range(request.n)
        ]

    async def _stream(
        self, request: web.Request, asked: Asked, journals: list[Journal], echo: str | None, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        client, merger = SseClient(request, self._settings.write_timeout_s, self._clock, headers), Merger()
        streams: list[tuple[Journal, Client]] = [(journals[0], client)]
        if request.path == generate.PATH:
            streams = [(journals[0], GenerateClient(client))]
        elif len(journals) > 1 or echo is not None:
            streams = [(journal, ChoiceClient(client, merger, index, journal, echo)) for index, journal in enumerate(journals)]
        outcome = await run_together(self._driver.run, streams)
        try:
            match outcome:
                case Complete():
                    response = await client.end(self._missing_end(asked, journals, merger))
                case Failed():
                    response = _refusal(outcome) if client.response is None else await client.fail(outcome.body)
            self._metrics.requests.labels("complete" if outcome == Complete() else "failed").inc()
            return response
        except ClientGoneError:
            self._metrics.requests.labels("client_gone").inc()
            return client.response or web.Response(status=499)

    async def _resumable(
        self,
        request: web.Request,
        asked: Asked,
        asking: Asking,
        journal: Journal,
        found: Record | None,
        echo: str | None,
        headers: Mapping[str, str],
    ) -> web.StreamResponse:
        """A request with a key: new, or found and taken over."""
        streams = asked.request.stream
        client = SseClient(request, self._settings.write_timeout_s, self._clock, headers) if streams else WholeClient()
        journal.marks = []
        keyed = self._mirror.open(asking, journal, found, client)
        try:
            outcome = await self._see_through(keyed, journal, echo if streams and not keyed.record.events else None)
            if isinstance(outcome, Failed) and outcome.status < 500 and not keyed.failure and not keyed.record.events:
                self._mirror.forget(keyed)
            elif isinstance(outcome, Failed) and outcome is not SUPERSEDED:
                keyed.release()
                await keyed.flushed(_LAST_WORDS_S)
            keyed.close()  # Nothing comes behind the last word.
            if isinstance(client, WholeClient):
                return self._ended(outcome, lambda: answer(asked, [journal], [client], echo), headers)
            self._metrics.requests.labels("complete" if outcome == Complete() else "failed").inc()
            if isinstance(outcome, Failed):
                return _refusal(outcome) if client.response is None else await client.fail(outcome.body)
            return await client.end([])
        except ClientGoneError:
            self._metrics.requests.labels("client_gone").inc()
            gone = None if isinstance(client, WholeClient) else client.response
            return gone or web.Response(status=499)
        finally:
            self._mirror.close(keyed)

    async def _see_through(self, keyed: KeyedStream, journal: Journal, echo: str | None) -> Outcome:
        """Until the client has all of it."""
        outcome: Outcome = Complete()
        if not journal.finished:
            client = keyed if echo is None else ChoiceClient(keyed, Merger(), 0, journal, echo)
            outcome = await self._driver.run(journal, client)
        if outcome == Complete():
            await keyed.finish([] if keyed.record.standing.complete else journal.missing_end())
            if keyed.after > keyed.record.seq:
                return Failed(400, error_body("Last-Event-ID lies behind the end of the stream", code="beyond_end"))
        return keyed.failure or outcome

    def _missing_end(self, asked: Asked, journals: list[Journal], merger: Merger) -> list[bytes]:
        """Events that a complete response still owes its client."""
        if len(journals) == 1:
            return journals[0].missing_end()
        assert merger.head is not None
        return [asked.form.event(merger.head, [], total_usage(journals))] if asked.wants_usage else []

    async def _whole(self, asked: Asked, journals: list[Journal], echo: str | None, headers: Mapping[str, str]) -> web.Response:
        clients = [WholeClient() for _ in journals]
        outcome = await run_together(self._driver.run, list(zip(journals, clients, strict=True)))
        return self._ended(outcome, lambda: answer(asked, journals, clients, echo), headers)

    async def _whole_generate(self, asked: Asked, journal: Journal, headers: Mapping[str, str]) -> web.Response:
        client = WholeGenerateClient(self._clock)
        return self._ended(await self._driver.run(journal, client), lambda: client.answer(asked), headers)

    def _ended(self, outcome: Outcome, make_body: Callable[[], bytes], headers: Mapping[str, str]) -> web.Response:
        match outcome:
            case Complete():
                self._metrics.requests.labels("complete").inc()
                return _json(make_body(), headers=headers)
            case Failed():
                self._metrics.requests.labels("failed").inc()
                return _refusal(outcome)

    async def _models(self, _: web.Request) -> web.Response:
        model = self._driver.instances.model
        models = [] if model is None else [self._described(model)]
        return _json(msgspec.json.encode({"object": "list", "data": models}))

    async def _model(self, request: web.Request) -> web.Response:
        model = request.match_info["model"]
        self._check_model(model)
        if self._driver.instances.model is None:
            raise RequestError(f"the model {model!r:.200} is not known yet: no instance has come up", status=503)
        return _json(msgspec.json.encode(self._described(model)))

    def _described(self, model: str) -> dict[str, Any]:
        return {"id": model, "object": "model", "created": self._created, "owned_by": "kvrs"}

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self.draining:
            return web.Response(text="shutting down\n", status=503)
        ready = self._driver.instances.ready()
        return web.Response(text="ready\n" if ready else "no instance is up\n", status=200 if ready else 503)


def _wrapped(seed: int) -> int:
    """Within the 64 bits that a seed has."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _json(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
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
        response = _json(error_body(str(error), kind=kind, param=error.param, code=error.code), error.status, headers)
        # The rest of the body is still to come.
        if error.status in (408, 413):
            response.force_close()
        return response
    except web.HTTPException as error:
        if error.status < 400:
            raise
        message = f"{request.method} {request.path:.200}: {error.reason}"
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return _json(error_body(message), error.status, headers)
    except Exception:
        # A bug of ours. Once a response has begun, only the end of the connection can tell of it.
        log.exception("request ended by a bug")
        if request.writer.output_size > 0:
            raise
        return _json(error_body("the proxy failed; its log says more", kind="server_error"), 500)
