"""The clients' port: OpenAI completions and chat, DistServe's /generate, models, health."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any, TypeVar

from aiohttp import web

from kvrs.config.proxy import Inexact, ProxySettings
from kvrs.core.live import Complete
from kvrs.core.model import events as ev
from kvrs.direct import DirectRequest, DirectServer, Serve
from kvrs.errors import ConfigError, RequestError
from kvrs.ids import StreamId
from kvrs.large_work import LARGE_BYTES, LargeWork
from kvrs.protocol.openai.chunks import TOO_LONG, error_body
from kvrs.protocol.openai.fields import VLLM
from kvrs.protocol.openai.requests import CompletionRequest, Fields
from kvrs.protocol.openai.structure import MAX_ELEMENTS, bytes_within, elements_within
from kvrs.proxy.api import generate
from kvrs.proxy.api.answers import (
    bug_response,
    error_response,
    errors_as_openai,
)
from kvrs.proxy.api.bodies import ClientBodies
from kvrs.proxy.api.choices import ChoiceClient, Merger, run_together
from kvrs.proxy.api.endings import Response, end_stream, missing_end, whole_response
from kvrs.proxy.api.generate import GenerateClient, WholeGenerateClient, read_generate
from kvrs.proxy.api.health import add_health
from kvrs.proxy.api.models import add_models, find_model
from kvrs.proxy.api.openapi import add_document, clients_document
from kvrs.proxy.api.pages import AllowedPages
from kvrs.proxy.api.passed import Passed
from kvrs.proxy.api.responses import ResponsesApi
from kvrs.proxy.api.tenants import TENANT, Tenants, Use
from kvrs.proxy.backends.backend import is_the_clients_fault
from kvrs.proxy.mirror.failures import SUPERSEDED
from kvrs.proxy.mirror.headers import ResumeRequest, parse_resume_headers, reopened
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.mirror.records import Record
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.streams.clients import Client, ClientGoneError, SseClient
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.keep_alive import KeepAlives
from kvrs.proxy.streams.live import Failed, Outcome
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.streams.responses import WholeClient, answer
from kvrs.proxy.wire.budget import ByteBudget, Held
from kvrs.proxy.wire.deadlines import deadlines_of
from kvrs.proxy.wire.downstream import ClientRequest, Sent, StreamedResponse
from kvrs.proxy.wire.exactness import inexact_features, tokens_at_risk
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import (
    CHAT,
    COMPLETIONS,
    INVOCATIONS,
    ParsedRequest,
    read,
    read_either,
    salted,
)
from kvrs.proxy.wire.whole import asks_for_whole, check_whole, whole_fields

log = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S = 1.0  # For the mirror to receive all events of a failed stream.

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that has passed every check, with the journals of its choices."""

    parsed: ParsedRequest
    journals: list[Journal]
    client: SseClient | None  # None: the client did not ask for a stream.
    is_generate: bool  # Of DistServe's endpoint, which has one choice.
    echoes: Sequence[str | None]  # Of each journal: the prompt to send before the output.
    headers: Mapping[str, str]
    use: Use
    resume: ResumeRequest | None
    found: Record | None  # Of the stream to be resumed; None: the stream is new.
    merger: Merger | None  # Of the choices of a stream; None: the engine's one choice is all.


class ClientApi:
    """Serves requests: admits them, runs their streams, and responds."""

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
        self.draining = False  # No new streams are admitted.
        self._settings = settings
        self._backend = backend
        self._driver = driver
        self._mirror = mirror
        self._metrics = metrics
        self._clock = clock
        self._tenants = tenants
        self._large = large
        self.keep_alives = KeepAlives(settings.keep_alive_s)
        client_key = secrets.token_bytes(16)
        self._passed = Passed(self, backend, driver, large)
        origins = settings.allowed_origins
        self._pages = AllowedPages(origins) if origins else None
        self._marked = lru_cache(maxsize=1024)(partial(_marked, client_key))
        self.budget = ByteBudget(settings.body_budget_bytes)
        self._bodies = ClientBodies(settings, metrics.admission, clock)
        metrics.admission.request_bytes.set_function(lambda: self.budget.held_bytes)

    def application(self) -> web.Application:
        pages = [] if self._pages is None else [self._pages.middleware()]
        app = web.Application(middlewares=[*pages, errors_as_openai, self._tenants.authenticate])
        for path, parse in self._readers():
            app.router.add_post(path, partial(self._serve_in_full, parse))
        parts = (self._backend, self._settings, self._driver, self._mirror, self._tenants)
        ResponsesApi(self, *parts).add_to(app)
        self._passed.add_to(app)
        add_models(app, self._driver.control.instances)
        add_health(app, self._backend, self._driver, lambda: self.leaving or self.draining)
        add_document(app, clients_document())
        return app

    def direct(self) -> DirectServer:
        """The same requests without aiohttp's server."""
        paths: dict[str, Serve] = {
            path: partial(self._serve_directly, parse) for path, parse in self._readers()
        }
        if self._pages is not None:
            paths = self._pages.direct(paths)
        return DirectServer(paths, self._bodies.unfinished)

    def _readers(self) -> Iterator[tuple[str, Callable[..., ParsedRequest]]]:
        for path, parse in (
            (COMPLETIONS.path, partial(read, COMPLETIONS)),
            (CHAT.path, partial(read, CHAT)),
            (generate.PATH, read_generate),
            (INVOCATIONS, read_either),
        ):
            yield path, partial(parse, backend=self._backend)

    async def _serve_in_full(
        self, read: Callable[..., ParsedRequest], request: web.Request
    ) -> web.StreamResponse:
        response = await self._serve(read, request)
        return Sent(response) if isinstance(response, StreamedResponse) else response

    async def _serve_directly(
        self, read: Callable[..., ParsedRequest], request: DirectRequest
    ) -> Response:
        try:
            self._tenants.admit(request)
            return await self._serve(read, request)
        except RequestError as error:
            return error_response(error)
        except Exception:
            if request.is_begun:
                raise
            return bug_response()

    async def _serve(self, read: Callable[..., ParsedRequest], request: ClientRequest) -> Response:
        """Admit a request and respond to it; count it by its outcome."""
        counts, use = self._metrics.requests, Use(request[TENANT])
        with Held(self.budget, request.remote or "") as held, use:
            try:
                admitted = await self._admit(held, use, read, request)
            except (RequestError, web.HTTPException):
                counts["rejected"].inc()
                raise
            try:
                client = admitted.client
                with self.keep_alives.over(client):
                    if client is None or admitted.resume is not None:
                        outcome, response = await self._respond(admitted)
                    else:
                        outcome = await self._stream(admitted, client)
                        missing: list[bytes] = []
                        if outcome == Complete():
                            missing = missing_end(admitted.journals, admitted.merger)
                        response = await end_stream(client, outcome, missing)
            except asyncio.CancelledError:
                counts["client_gone"].inc()
                raise
            except ClientGoneError:
                counts["client_gone"].inc()
                assert admitted.client is not None
                return admitted.client.response or web.Response(status=499)
            self.count(outcome)
            return response

    def count(self, outcome: Outcome) -> None:
        name = "complete"
        if isinstance(outcome, Failed):
            name = "rejected" if outcome.rejected else "failed"
        self._metrics.requests[name].inc()

    # Admission.

    async def _admit(
        self, held: Held, use: Use, read: Callable[..., ParsedRequest], request: ClientRequest
    ) -> Admitted:
        body = await self.read(held, use, request)
        parsed = await self.parse(read, body)
        resume = parse_resume_headers(
            request.headers, request.path, body, parsed, lambda: self._tenants.secret_of(request)
        )
        check_whole(parsed, has_key=resume is not None)
        return await self.admit(held, use, parsed, resume, request)

    async def read(self, held: Held, use: Use, request: ClientRequest) -> bytes:
        """The body of a request that there is room for."""
        self._check_room(1)
        self._most_elements(request.content_length or 0)  # Too many bytes are not read at all.
        return await self._bodies.read(request, held, use)

    async def parse(self, read: Callable[..., Parsed], body: bytes) -> Parsed:
        most = self._most_elements(len(body))
        if len(body) <= LARGE_BYTES:
            return read(body, max_elements=most)
        return await self._large.run(len(body), partial(read, body, max_elements=most))

    async def admit(
        self,
        held: Held,
        use: Use,
        parsed: ParsedRequest,
        resume: ResumeRequest | None,
        request: ClientRequest,
    ) -> Admitted:
        """Check a parsed request against the cluster and the limits of its tenant, and open the
        journals of its choices.
        """
        model = find_model(self._driver.control.instances, parsed.request.model)
        parsed = salted(parsed, use.tenant.secret, model.adapter)
        inexact = await self._inexact(parsed)
        deadlines = deadlines_of(request.headers)
        is_generate = request.path == generate.PATH
        echoes: list[str | None] = [None] * parsed.streams
        echoes_here = parsed.echo and asks_for_whole(parsed) is None
        if echoes_here or (is_generate and not parsed.request.stream):
            echoes = [await self._echo(one) for one in parsed.prompts for _ in range(one.request.n)]
        self._check_room(parsed.streams)
        self._take_streams(use, parsed, resume)
        found = None
        if resume is not None:
            found = await self._mirror.find(resume)
            self._check_room(parsed.streams)  # Again: that took a while.
        if found is not None:
            journals = [reopened(found, parsed, self._clock())]
        else:
            client_id = self._client_id(use, request)
            journals = [
                journal
                for one in parsed.prompts
                for journal in self._open_journals(one, inexact, deadlines, client_id)
            ]
            journals[0].wants_usage = parsed.request.wants_usage and len(journals) == 1
        for journal in journals:
            journal.tenant, journal.name = use.tenant.mark, model.key
        headers = {"X-Kvrs-Exact": "no"} if inexact else {}
        client = None
        if parsed.request.stream:
            client = SseClient(request, self._settings.write_timeout_s, headers)
        parsed.hold(held)
        if isinstance(request, DirectRequest):
            request.drop_headers()
        merger = None if is_generate or (len(journals) == 1 and echoes[0] is None) else Merger()
        return Admitted(
            parsed, journals, client, is_generate, echoes, headers, use, resume, found, merger
        )

    def _take_streams(self, use: Use, parsed: ParsedRequest, resume: ResumeRequest | None) -> None:
        """Take streams from the tenant's limit. A stream that goes on was admitted before: the
        earlier connection of its client, if it is still open, is about to be closed.
        """
        runs = resume is not None and any(key in self._mirror.streams for key in resume.keys)
        use.open(0 if runs else parsed.streams)

    def _most_elements(self, size_bytes: int) -> int:
        """How many elements a body may have for the model that is served.

        Raises:
            RequestError: it has more bytes than the longest prompt.
        """
        served = self._driver.control.instances.max_model_len
        if served is None:
            return MAX_ELEMENTS
        longest_token = self._driver.tokenizer.longest_token
        # vLLM's models may see pictures, which are no text.
        if longest_token is not None and self._backend != VLLM:
            most = bytes_within(served, longest_token)
            if size_bytes > most:
                raise RequestError(
                    f"the body has {size_bytes} bytes, which are more than {served} tokens; "
                    f"allowed: at most {most}",
                    code=TOO_LONG,
                )
        return elements_within(served)

    async def _inexact(self, parsed: ParsedRequest) -> tuple[str, ...]:
        """Features of the request that the instances in use could not continue exactly."""
        control = self._driver.control
        plain, (least, continues) = control.instances.plain(), control.self_tests.least()
        if plain is not None:
            find = partial(
                inexact_features,
                parsed,
                has_tokenizer=self._driver.tokenizer.available,
                continues=continues,
            )
            features = await self._large.run(parsed.size_bytes, find)
        else:
            features = tokens_at_risk(parsed, continues)
        if features and self._settings.inexact is Inexact.REFUSE:
            raise RequestError(
                f"{features[0]} cannot be continued exactly by instance {plain or least!r}, "
                f"should the stream be cut, and "
                "proxy.inexact is 'refuse'; allowed: a request without it",
                param=features[0],
            )
        return features

    async def _echo(self, parsed: ParsedRequest) -> str:
        assert isinstance(parsed.request, CompletionRequest)
        if self._backend == VLLM and parsed.request.return_token_ids:
            return ""  # As vLLM has it: the ids of the prompt take the place of its text.
        if isinstance(parsed.request.prompt, str):
            return parsed.request.prompt
        try:
            return (await self._driver.tokenizer.load()).decode(parsed.request.prompt)
        except ConfigError as error:
            raise RequestError(f"a prompt of ids cannot be echoed: {error}", param="echo") from None

    def _check_room(self, choices: int) -> None:
        open_streams, allowed = len(self._driver.streams), self._settings.max_streams
        if open_streams + choices > allowed:
            raise RequestError(f"{open_streams} of {allowed} streams are open", status=503)
        if self.draining:
            raise RequestError("the proxy is shutting down", status=503, code="shutting_down")

    def _client_id(self, use: Use, request: ClientRequest) -> str:
        """The tenant or, without keys, the address, in a form that logs may hold."""
        return self._marked(
            (request.remote or "") if use.tenant.secret is None else use.tenant.name
        )

    def _open_journals(
        self,
        parsed: ParsedRequest,
        inexact: tuple[str, ...],
        deadlines: ev.Deadlines,
        client_id: str,
    ) -> list[Journal]:
        """A journal per choice of a prompt, each with a seed that all its attempts sample with."""
        request, seed, now_s = parsed.request, parsed.request.seed, self._clock()
        if request.temperature > 0 and seed is None:
            seed = int.from_bytes(secrets.token_bytes(8)) >> 2
        return [
            Journal(
                stream=StreamId(secrets.token_hex(16)),
                parsed=parsed,
                arrived_s=now_s,
                seed=None if seed is None else _wrapped(seed + index),
                prompt_ids=parsed.prompt_ids,
                deadlines=deadlines,
                client=client_id,
                inexact=inexact,
            )
            for index in range(request.n)
        ]

    # Responses.

    def _respond(self, admitted: Admitted) -> Coroutine[Any, Any, tuple[Outcome, Response]]:
        if (fields := whole_fields(admitted.parsed)) is not None:
            return self._respond_by_one(admitted, fields)
        if admitted.resume is not None:
            return self._respond_resumable(admitted, admitted.resume)
        return self._respond_whole(admitted)

    def _stream(self, admitted: Admitted, client: SseClient) -> Awaitable[Outcome]:
        """Run the streams of a response. A coroutine of its own would last as long as they do."""
        journals, merger = admitted.journals, admitted.merger
        if admitted.is_generate:
            return self._driver.run(journals[0], GenerateClient(client))
        if merger is None:
            return self._driver.run(journals[0], client)
        streams: list[tuple[Journal, Client]] = [
            (journal, ChoiceClient(client, merger, index, journal, echo))
            for index, (journal, echo) in enumerate(zip(journals, admitted.echoes, strict=True))
        ]
        return run_together(self._driver.run, streams)

    async def _respond_whole(self, admitted: Admitted) -> tuple[Outcome, Response]:
        parsed, journals = admitted.parsed, admitted.journals
        if admitted.is_generate:
            gathered = WholeGenerateClient(self._clock)
            outcome = await self._driver.run(journals[0], gathered)
            prompt = admitted.echoes[0] or ""
            answer_of = partial(gathered.answer, prompt)
            return outcome, whole_response(outcome, answer_of, admitted.headers)
        clients = [WholeClient() for _ in journals]
        outcome = await run_together(self._driver.run, list(zip(journals, clients, strict=True)))
        make = partial(answer, parsed, journals, clients, admitted.echoes)
        return outcome, whole_response(outcome, make, admitted.headers)

    async def _respond_by_one(self, admitted: Admitted, fields: Fields) -> tuple[Outcome, Response]:
        """One engine answers; another one where it dies."""
        await asyncio.sleep(0)  # In a task from here on, as above.
        path, name = admitted.parsed.endpoint.path, admitted.journals[0].name
        answer = await self._passed.ask(path, fields, name)
        answer.headers.update(admitted.headers)
        if answer.status == 200:
            return Complete(), answer
        is_rejected = is_the_clients_fault(answer.status)
        return Failed(answer.status, b"", rejected=is_rejected), answer

    async def _respond_resumable(
        self, admitted: Admitted, resume: ResumeRequest
    ) -> tuple[Outcome, Response]:
        """Respond to a request with a key, whose stream is new or was found and taken over."""
        (journal,), (echo,) = admitted.journals, admitted.echoes
        gathered = WholeClient()
        journal.marks = []
        keyed = self._mirror.open(resume, journal, admitted.found, admitted.client or gathered)
        try:
            sends_echo = admitted.client is not None and not keyed.record.events
            outcome = await self.run_keyed(keyed, journal, echo if sends_echo else None)
            is_refused = isinstance(outcome, Failed) and outcome.status < 500
            if is_refused and not keyed.failure and not keyed.record.events:
                self._mirror.forget(keyed)
            elif isinstance(outcome, Failed) and outcome is not SUPERSEDED:
                keyed.release()
                await keyed.flushed(_FLUSH_TIMEOUT_S)
            keyed.close()  # No event follows the end of the response.
            if admitted.client is not None:
                return outcome, await end_stream(admitted.client, outcome, [])
            make = partial(answer, admitted.parsed, [journal], [gathered], [echo])
            return outcome, whole_response(outcome, make, admitted.headers)
        finally:
            self._mirror.close(keyed)

    async def run_keyed(self, keyed: KeyedStream, journal: Journal, echo: str | None) -> Outcome:
        """Run a stream until its client has all of it."""
        if keyed.failure is not None:  # It was cancelled, or went elsewhere, before it began here.
            return keyed.failure
        outcome: Outcome = Complete()
        if not journal.finished and not keyed.record.state.complete:
            client = keyed if echo is None else ChoiceClient(keyed, Merger(), 0, journal, echo)
            outcome = await self._driver.run(journal, client)
        if outcome == Complete():
            await keyed.finish([] if keyed.record.state.complete else journal.missing_end())
            if keyed.after > keyed.record.seq:
                message = "Last-Event-ID lies behind the end of the stream"
                return Failed(400, error_body(message, code="beyond_end"))
        return keyed.failure or outcome


def _marked(key: bytes, name: str) -> str:
    return blake2b(name.encode(), key=key, digest_size=8).hexdigest()


def _wrapped(seed: int) -> int:
    """The seed wrapped to 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
