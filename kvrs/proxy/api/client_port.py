"""The clients' port: admission of a request as a sequence of steps on one record, the streams that
serve it, and its response. Each step passes the request, or refuses it by a RequestError of one
kind. `RequestObserver` is around every request: its id, tenant, errors, and access line.
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar, assert_never, cast

import msgspec
from multidict import CIMultiDictProxy
from prometheus_client import CollectorRegistry

from kvrs.config.proxy import Inexact, ProxySettings
from kvrs.core.fleet.known import Instances, Replays, ServedName, is_served_at
from kvrs.core.fleet.tested import Continues
from kvrs.core.model import events as ev
from kvrs.core.model.streams import Complete
from kvrs.errors import ConfigError, RequestError, UndecodableError, UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.net.connections import UNSENT_BYTES, ByteBudget
from kvrs.net.http_request import NO_HEADERS
from kvrs.net.routes import JSON, UNKNOWN_ROUTE, WRITTEN, Handler, Request, Response, retry_after
from kvrs.process.large_work import LARGE_BYTES, LargeWork
from kvrs.process.row_log import RowLog
from kvrs.protocol.mirror import BYTES_PER_ID
from kvrs.protocol.openai.chunks import CHUNK, DONE, TOO_LONG, ReceivedChoice, error_body, sse
from kvrs.protocol.openai.decoding import MAX_ELEMENTS, bytes_within, elements_within
from kvrs.protocol.openai.fields import SGLANG, VLLM, whole
from kvrs.protocol.openai.requests import ECHOED_BY_ENGINE, CompletionRequest, Fields
from kvrs.proxy.api.bodies import read_body
from kvrs.proxy.api.choices import ChoiceClient, Merger, run_together
from kvrs.proxy.api.picked import EndpointPicker
from kvrs.proxy.api.tenants import OPEN_PATHS, Tenant, Tenants
from kvrs.proxy.backends.backend import RefusedError, is_the_clients_fault
from kvrs.proxy.backends.bodies import Call, context_headers
from kvrs.proxy.mirror.headers import (
    KEY,
    LAST_EVENT,
    SUPERSEDED,
    ResumeRequest,
    parse_resume_headers,
    reopened,
)
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.mirror.records import Record
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.streams.driver import Driver, out_of_time
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.streams.open_stream import (
    Client,
    ClientGoneError,
    Failed,
    KeepAlives,
    Outcome,
    SseClient,
    StreamClient,
    undecodable,
)
from kvrs.proxy.streams.stream_metrics import Tally, TallySeries
from kvrs.proxy.streams.whole_answers import HeldBack, WholeClient, answer, total_usage
from kvrs.proxy.wire.errors import BusyError, EngineError
from kvrs.proxy.wire.exactness import (
    inexact_features,
    is_never_text,
    is_predictable,
    replayable,
    tokens_at_risk,
)
from kvrs.proxy.wire.journal import Exactness, Journal
from kvrs.proxy.wire.message_parts import REASONING
from kvrs.proxy.wire.requests import (
    CHAT,
    CURRENT,
    REQUEST_ID,
    TRACEPARENT,
    ParsedRequest,
    RequestContext,
    RequestUsage,
    salted,
)
from kvrs.proxy.wire.watchdog import Watchdog
from kvrs.tracing.settings import trace_settings

if TYPE_CHECKING:
    from kvrs.proxy.streams.spans import RequestTracer

log = logging.getLogger(__name__)
access_log = logging.getLogger("kvrs.access")

MESSAGES = "/v1/messages"  # Path of Anthropic's API, whose errors have another form.
_NO_HEADERS: Mapping[str, str] = {}


def json_response(
    body: bytes, status: int = 200, headers: Mapping[str, str] = _NO_HEADERS
) -> Response:
    return Response(status, body, {"Content-Type": JSON, **headers})


def refusal(failure: Failed) -> Response:
    headers = _NO_HEADERS
    if failure.retry_after_s is not None:
        headers = {"Retry-After": retry_after(failure.retry_after_s)}
    elif failure.status >= 500 and (failure.rejected or failure.is_final):
        # OpenAI's clients would repeat the request after a 5xx without this header.
        headers = {"X-Should-Retry": "false"}
    return json_response(failure.body, failure.status, headers)


def error_response(error: RequestError) -> Response:
    headers = {"Retry-After": retry_after(1.0)} if error.status == 503 else {}
    kind = error.kind or ("invalid_request_error" if error.status < 500 else "server_error")
    return json_response(
        error_body(str(error), kind=kind, param=error.param, code=error.code),
        error.status,
        headers | dict(error.headers),
    )


def bug_response() -> Response:
    """Make the response to a request that ended by the exception being handled."""
    log.exception("request ended by a bug")
    body = error_body("the proxy failed; its log says more", kind="server_error")
    return json_response(body, 500)


def in_the_form_of(request: Request, response: Response) -> Response:
    """Return an error in the form of the API that the request is for."""
    if response.status >= 400 and response.body and request.path.startswith(MESSAGES):
        from kvrs.protocol.anthropic import error_of

        status, body = error_of(response.body, response.status, request.id)
        return Response(status, body, response.headers)
    return response


# Highest value in seconds of each header with a deadline, as in section `slo`.
_LONGEST_S = {"x-kvrs-ttft-s": 86400, "x-kvrs-recovery-gap-s": 3600, "x-kvrs-deadline-s": 86400}
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?", re.ASCII)
# Response headers: X-Kvrs-Exact is "no" if a stream may be inexact after a cut, X-Kvrs-Inexact has
# the reasons.
_EXACT, _INEXACT = "X-Kvrs-Exact", "X-Kvrs-Inexact"
_OWN_NAME = ServedName("")

_FLUSH_TIMEOUT_S = 1.0  # Longest wait until the mirror has all events of a failed stream.
_NO_INSTANCE = error_body("no instance is up", kind="server_error", code="no_instance")

Parsed = TypeVar("Parsed")
Read = Callable[..., ParsedRequest]


class ClientCall(msgspec.Struct, eq=False):
    """A client's request with the results of the admission's steps, which the response needs."""

    request: Request
    tenant: Tenant
    held: RequestUsage
    body: bytes = b""  # Body of the request, until it is parsed.
    # The request, decoded from the body once that is read.
    parsed: ParsedRequest = cast(ParsedRequest, None)
    # Field for which one engine must answer the whole request; None: streams answer it.
    whole: str | None = None
    resume: ResumeRequest | None = None
    # Record of the stream that the request resumes; None: a new stream.
    found: Record | None = None
    name: ServedName = _OWN_NAME
    # Exactness with which each of the streams begins.
    exactness: Exactness = msgspec.field(default_factory=Exactness)
    # The prompt's text is inexact only because the proxy has no tokenizer.
    lacks_tokenizer: bool = False
    deadlines: ev.Deadlines = ev.NO_DEADLINES
    # Prompts to send before the output, one for each journal; empty: no echo.
    echoes: Sequence[str | None] = ()
    journals: list[Journal] = []
    # Writer of the stream to the client; None: the client did not ask for a stream.
    client: StreamClient | None = None
    merger: Merger | None = None  # Merges the choices of a stream; None: a single choice.

    def head(self) -> Mapping[str, str]:
        return head_of(self.journals, lacks_tokenizer=self.lacks_tokenizer)


def head_of(journals: Iterable[Journal], *, lacks_tokenizer: bool) -> Mapping[str, str]:
    """Return the extra headers of the response that is about to begin. Their promises of exactness
    hold from now on.
    """
    names: dict[str, None] = {}
    for journal in journals:
        journal.commit_head()
        kept = journal.exactness
        if kept.inexact and not kept.is_promised:
            names |= dict.fromkeys(kept.inexact)
    if not names:
        return _NO_HEADERS
    # The header names the missing tokenizer as the reason instead of the prompt.
    texts = ("prompt", "messages") if lacks_tokenizer else ()
    reasons = ("tokenizer" if name in texts else name for name in names)
    return {_EXACT: "no", _INEXACT: ", ".join(reasons)}


class ClientPort:
    """Admits clients' requests, serves them and responds: what the APIs of the port share.
    `draining`: no new streams are admitted; `leaving`: the proxy reports that it is not ready, but
    serves on.
    """

    def __init__(
        self,
        settings: ProxySettings,
        driver: Driver,
        mirror: Mirror,
        metrics: Metrics,
        tenants: Tenants,
        large: LargeWork,
    ) -> None:
        self.draining = self.leaving = False
        self.driver = driver
        self.control = driver.control
        self.mirror = mirror
        self.tenants = tenants
        self.large = large
        self.keep_alives = KeepAlives()
        self.budget = ByteBudget(settings.body_budget_bytes, settings.max_body_bytes)
        self._settings = settings
        self._counts = metrics.requests
        metrics.admission.request_bytes.set_function(lambda: self.budget.held_bytes)

    @property
    def is_leaving(self) -> bool:
        return self.leaving or self.draining

    async def serve(
        self,
        read: Read,
        request: Request,
        client_of: Callable[[ClientCall], StreamClient] | None = None,
    ) -> Response:
        """Admit a request, serve it and respond; count the request by its outcome. `client_of`:
        makes the client of a stream from an admitted call; None: it gets the chat's own events.
        """
        call = self.begin(request)
        try:
            try:
                await self.admit(call, read)
            except RequestError:
                self._counts["rejected"].value += 1
                raise
            if client_of is not None and call.client is not None:
                call.client = client_of(call)
            if (client := call.client) is not None:
                self.keep_alives.begin(client)
            try:
                if client is None or call.resume is not None:
                    outcome, response = await self._respond(call)
                else:
                    if call.merger is None:
                        outcome = await self.driver.run(call.journals[0], client)
                    else:
                        outcome = await self._stream_choices(call, client)
                    if isinstance(outcome, Complete):
                        has_all = call.merger is None and not call.journals[0].wants_usage
                        response = await client.finish(DONE if has_all else missing_end(call))
                    else:
                        response = await end_stream(client, outcome)
            except asyncio.CancelledError:
                self._counts["client_gone"].value += 1
                raise
            except ClientGoneError:
                self._counts["client_gone"].value += 1
                assert client is not None
                return WRITTEN if client.has_begun else Response(499)
            finally:
                if client is not None:
                    self.keep_alives.open.discard(client)
            self.count(outcome)
            return response
        finally:
            call.held.end()

    def count(self, outcome: Outcome) -> None:
        name = "complete"
        if isinstance(outcome, Failed):
            name = "rejected" if outcome.rejected else "failed"
        self._counts[name].value += 1

    def _respond(self, call: ClientCall) -> Coroutine[Any, Any, tuple[Outcome, Response]]:
        if call.whole is not None:
            return self._respond_by_one(call)
        if call.resume is not None:
            return self._respond_resumable(call, call.resume)
        return self._respond_whole(call)

    def _stream_choices(self, call: ClientCall, client: StreamClient) -> Awaitable[Outcome]:
        """Run the streams of a response with several choices or an echo. Not a coroutine, because
        its frame would be kept as long as the streams.
        """
        journals, merger = call.journals, call.merger
        assert merger is not None
        streams: list[tuple[Journal, Client]] = [
            (journal, ChoiceClient(client, merger, index, journal, echo))
            for index, (journal, echo) in enumerate(zip(journals, call.echoes, strict=True))
        ]
        return run_together(self.driver, streams)

    async def _respond_whole(self, call: ClientCall) -> tuple[Outcome, Response]:
        journals = call.journals
        clients = [WholeClient(self.driver.parsers) for _ in journals]
        outcome = await run_together(self.driver, list(zip(journals, clients, strict=True)))
        return whole_response(call, outcome, clients)

    def begin(self, request: Request) -> ClientCall:
        """Begin the admission of a request whose tenant is known. Before the first step the request
        holds no bytes and streams; `held.end`, or the end of `with call.held`, returns what it
        holds.
        """
        tenant: Tenant = request.tenant
        held = RequestUsage(self.budget, tenant.meter)
        return ClientCall(request, tenant, held)

    async def admit(self, call: ClientCall, read: Read | None = None) -> None:
        """Take a stream's request through all steps, in order. `read` parses the request's body;
        None: it is parsed already.

        Raises:
            RequestError: a step refuses it.
        """
        request, tenant = call.request, call.tenant
        instances, tests = self.control.instances, self.control.self_tests
        if read is None:
            pass
        elif request.coming is None:  # The body is short, uncompressed and complete.
            if self.draining or len(self.control.streams) >= self._settings.max_streams:
                self._check_room(1, KEY in request.headers)
            call.body, request.body = request.body, b""
            most = self._max_elements(len(call.body))
            call.held.take(len(call.body))
            call.parsed = read(call.body, max_elements=most)
        else:
            await self.read_body(call)
            call.parsed = await self.parse(read, call.body)
        is_keyed = KEY in request.headers or LAST_EVENT in request.headers
        if is_keyed and read is not None:
            self._read_key(call)
        call.body, parsed, model = b"", call.parsed, call.parsed.request.model
        if read is not None and (
            parsed.echo or not whole(parsed.endpoint.api).isdisjoint(parsed.fields)
        ):
            check_whole(call)
        if model is not None and model != instances.model:
            call.name = find_model(instances, model)
        is_exact = instances.plain is None and tests.least[1] is Continues.SEEDED
        if (
            not is_exact
            or tests.comparison.sampled_ties
            or tenant.secret is not None
            or call.name.parent is not None
            or parsed.request.n != 1
            or parsed.more
            or parsed.echo
            or is_keyed
            or call.resume is not None
            or any(map(request.headers.__contains__, _LONGEST_S))
        ):
            await self._admit_unusual(call)
            parsed = call.parsed
        self._open_journals(call)
        if parsed.size_bytes > LARGE_BYTES:
            await self._find_prefixes(call)
        if parsed.request.stream:
            head = partial(head_of, call.journals, lacks_tokenizer=call.lacks_tokenizer)
            call.client = SseClient(request, head)
        parsed.hold(call.held)
        if read is not None:
            request.headers = NO_HEADERS

    def _check_room(self, choices: int, resumes: bool) -> None:
        """Raise RequestError if `choices` more streams are too many. Raise it also while the proxy
        shuts down, except for a resumed stream that no other proxy can take.
        """
        open_streams, allowed = len(self.control.streams), self._settings.max_streams
        if open_streams + choices > allowed:
            raise RequestError(f"{open_streams} of {allowed} streams are open", status=503)
        if self.draining and not (resumes and not self.mirror.peers.staying):
            raise RequestError("the proxy is shutting down", status=503, code="shutting_down")

    async def read_body(self, call: ClientCall) -> None:
        """Read a request's body into `call`. Raises RequestError, like `_check_room`,
        `RequestUsage.allow` and `bodies.read_body`.
        """
        request = call.request
        self._check_room(1, KEY in request.headers)
        # A body with too many bytes is refused before it is read, by the proxy's own limits first.
        call.held.allow(request.content_length or 0)
        self._max_elements(request.content_length or 0)
        call.body = await read_body(request, call.held)

    def _max_elements(self, size_bytes: int) -> int:
        """Return the most JSON elements that a body may have: those of a prompt with as many
        tokens as the model's context.

        Raises:
            RequestError: the body has more bytes than such a prompt can have.
        """
        served = self.control.instances.max_model_len
        if served is None:
            return MAX_ELEMENTS
        model = self.driver.tokenizer.files.served
        longest_token = None if model is None else model.longest_token
        # vLLM's models may accept pictures, whose bytes are not limited by a number of tokens.
        if longest_token is not None and self.driver.engine != VLLM:
            most = bytes_within(served, longest_token)
            if size_bytes > most:
                raise RequestError(
                    f"the body has {size_bytes} bytes, which are more than {served} tokens; "
                    f"allowed: at most {most}",
                    code=TOO_LONG,
                )
        return elements_within(served)

    async def parse(self, read: Callable[..., Parsed], body: bytes) -> Parsed:
        most = self._max_elements(len(body))
        return await self.large.run(len(body), partial(read, body, max_elements=most))

    def _read_key(self, call: ClientCall) -> None:
        """Read the headers of a resumable stream."""
        request = call.request
        secret = partial(self.tenants.secret_of, request, call.tenant)
        call.resume = parse_resume_headers(
            request.headers, request.path, call.body, call.parsed, secret
        )

    async def _admit_unusual(self, call: ClientCall) -> None:
        """Take a request through the steps that usual requests do not need."""
        parsed, tenant, name = call.parsed, call.tenant, call.name
        if tenant.secret is not None or name.parent is not None:
            call.parsed = parsed = salted(parsed, tenant.secret, name.adapter)
        await self._check_exactness(call)
        call.deadlines = deadlines_of(call.request.headers)
        if parsed.echo and call.whole is None:
            await self._find_echoes(call)
        streams = parsed.request.n * (1 + len(parsed.more))
        self._check_room(streams, KEY in call.request.headers)
        if tenant.meter is not None:
            # A request that takes over an open stream is not refused for the limit, unless several
            # of that stream's calls are detached.
            call.held.open(streams, None if call.resume is None else call.resume.keys[0])
        if call.resume is not None:
            call.found = await self.mirror.find(call.resume)
            # Check the room again: other streams may have opened during the steps.
            self._check_room(streams, call.found is not None)

    async def _check_exactness(self, call: ClientCall) -> None:
        """Note in `call` the features of the request that the instances in use could not continue
        exactly.
        """
        plain, (least, continues) = self.control.instances.plain, self.control.self_tests.least
        comparison, parsed, kept = self.control.self_tests.comparison, call.parsed, call.exactness
        if plain is None and continues is Continues.SEEDED and not comparison.sampled_ties:
            return
        call.lacks_tokenizer = plain is not None and not self.driver.tokenizer.available
        if plain is not None:
            is_sglang = self.driver.engine == SGLANG
            kept.never_as_text, kept.has_generator = is_never_text(parsed), not is_sglang
            find = partial(
                inexact_features,
                parsed,
                has_tokenizer=self.driver.tokenizer.available,
                continues=continues,
                penalises_prompt=not is_sglang,
                parses_reasoning=self.driver.parsers.reasoning,
            )
            kept.inexact = await self.large.run(parsed.size_bytes, find)
            # SGLang's chats have no ids, by which its processor could be told the known output.
            if not (is_sglang and parsed.endpoint is CHAT):
                kept.replays = self.control.instances.replays(parsed.request.max_tokens)
            kept.replayed = replayable(kept.inexact, parsed, has_generator=not is_sglang)
            if kept.replays is Replays.ALWAYS:
                kept.inexact = tuple(each for each in kept.inexact if each not in kept.replayed)
        else:
            kept.inexact = tokens_at_risk(parsed, continues)
        has_ties = comparison.has_ties(sampled=parsed.request.temperature > 0)
        if has_ties and "tokens" not in kept.inexact:
            kept.inexact = ("tokens", *kept.inexact)
        if not kept.inexact:
            return
        if self._settings.inexact is Inexact.REFUSE:
            feature = kept.inexact[0]
            raise RequestError(
                f"{feature} cannot be continued exactly by instance {plain or least!r}, "
                f"should the stream be cut, and "
                "proxy.inexact is 'refuse'; allowed: a request without it",
                param=feature,
            )

    async def _find_echoes(self, call: ClientCall) -> None:
        """Find the prompts that the client gets before the output (`echo`)."""
        call.echoes = [
            await self._echo(one) for one in call.parsed.prompts for _ in range(one.request.n)
        ]

    async def _echo(self, parsed: ParsedRequest) -> str:
        assert isinstance(parsed.request, CompletionRequest)
        if self.driver.engine == VLLM and parsed.request.return_token_ids:
            return ""  # Like vLLM: a client that wants ids gets the prompt as ids, not as text.
        if isinstance(parsed.request.prompt, str):
            return parsed.request.prompt
        try:
            return (await self.driver.tokenizer.load()).decode(parsed.request.prompt)
        except ConfigError as error:
            raise RequestError(f"a prompt of ids cannot be echoed: {error}", param="echo") from None

    def _reopen(self, record: Record, parsed: ParsedRequest) -> Journal:
        journal = reopened(record, parsed, self.driver.clock())
        kept = journal.exactness
        kept.is_strict = self._settings.inexact is Inexact.REFUSE
        if self.control.instances.plain is not None:
            kept.never_as_text = is_never_text(parsed)
            kept.has_generator = self.driver.engine != SGLANG
            # A thought shows while the stream runs, too late for a seed of the proxy's.
            known = [each for each in kept.inexact if each != REASONING]
            kept.replayed = replayable(known, parsed, has_generator=kept.has_generator)
            if REASONING in kept.inexact and journal.is_repeatable:
                kept.replayed = (*kept.replayed, REASONING)
            if parsed.endpoint is CHAT:
                journal.restore(_received(record))
        # The instance that began the output is not known here, so a difference between any
        # instances counts.
        comparison, is_drawn = self.control.self_tests.comparison, parsed.request.temperature > 0
        if comparison.differs or comparison.has_ties(sampled=is_drawn):
            kept.mark("tokens")
        return journal

    def _open_journals(self, call: ClientCall) -> None:
        """Open a journal for each choice of each prompt, or the resumed stream's journal."""
        parsed, tenant, name = call.parsed, call.tenant, call.name.key
        if call.found is not None:
            call.journals = [self._reopen(call.found, parsed)]
        else:
            now_s = self.driver.clock()
            is_strict = self._settings.inexact is Inexact.REFUSE
            options = parsed.request.stream_options
            wants_usage = options is not None and parsed.request.wants_usage
            call.journals = []
            for one in (parsed, *parsed.more):
                # The seed is set here, because all attempts of a stream sample with it.
                seed = one.request.seed
                if seed is None and one.request.given_temperature != 0:
                    seed = int.from_bytes(os.urandom(8)) >> 2
                for index in range(one.request.n):
                    journal = Journal(
                        stream=StreamId(os.urandom(16).hex()),
                        parsed=one,
                        arrived_s=now_s,
                        seed=None if seed is None else _wrapped(seed + index),
                        prompt_ids=one.prompt_ids,
                        deadlines=call.deadlines,
                        exactness=replace(call.exactness, is_strict=is_strict),
                        has_plain_answers=bool(self.driver.parsers.plain_answers),
                        can_begin_again=not one.request.stream,
                        asks_usage=not one.request.stream or wants_usage,
                    )
                    call.journals.append(journal)
            if len(call.journals) == 1:
                call.journals[0].wants_usage = wants_usage
        for journal in call.journals:
            journal.tenant, journal.name = tenant.mark, name
            if parsed.endpoint is CHAT:
                journal.default_tokens = self.driver.default_tokens
                journal.is_predictable = is_predictable(journal.parsed)
        if not call.echoes:
            call.echoes = [None] * len(call.journals)
        if len(call.journals) > 1 or call.echoes[0] is not None:
            call.merger = Merger()

    async def _find_prefixes(self, call: ClientCall) -> None:
        """Hash a large request's prompts beside the event loop, if the core needs hashes."""
        if not self.control.policy.routes_by_prefix:
            return
        for journal in call.journals:
            if journal.parsed.prefix is None:  # All choices of a prompt share the prefix.
                size_bytes = journal.parsed.size_bytes
                await self.large.run(size_bytes, partial(getattr, journal, "prefix"))

    async def _respond_by_one(self, call: ClientCall) -> tuple[Outcome, Response]:
        """Let one engine answer the whole request, and another engine if the first dies."""
        path, fields = call.parsed.endpoint.path, whole_fields(call.parsed)
        answer = await self.ask(path, fields, call.name.key)
        answer.headers.update(call.head())
        if answer.status == 200:
            return Complete(), answer
        is_rejected = is_the_clients_fault(answer.status)
        return Failed(answer.status, b"", rejected=is_rejected), answer

    async def ask(self, path: str, fields: Fields, key: str) -> Response:
        """Ask the instances that serve the model or adapter of this key, least loaded first, until
        one answers.
        """
        limit_s = self.driver.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._ask_in_turn(path, fields, key)
        except TimeoutError:
            if limit_s is None:
                raise
            return refusal(out_of_time("answer", limit_s))

    async def _ask_in_turn(self, path: str, fields: Fields, key: str) -> Response:
        instances, failure = self.control.instances, Failed(503, _NO_INSTANCE, 1.0)
        up = [
            name
            for name, known in instances.known.items()
            if instances.is_up(name) and is_served_at(known.info, key)
        ]
        failed_with = set[str]()
        for name in sorted(up, key=instances.queued):
            try:
                return json_response(await self._ask_one(name, path, fields))
            except RefusedError as error:
                return json_response(error.body, error.status)
            except EngineError as error:
                # A second instance that fails alike shows that the request is at fault, so no
                # further instance is asked.
                is_alike = (cause := str(error)) in failed_with
                failure = Failed(error.status, error.body, rejected=is_alike)
                if is_alike:
                    break
                failed_with.add(cause)
            except UpstreamError as error:
                is_busy = isinstance(error, BusyError)
                wait_s = error.retry_after_s if isinstance(error, BusyError) else 1.0
                code = "busy" if is_busy else "retries"
                body = error_body(f"{name}: {error}", kind="server_error", code=code)
                failure = Failed(503 if is_busy else 502, body, wait_s)
        return refusal(failure)

    async def _ask_one(self, name: InstanceId, path: str, fields: Fields) -> bytes:
        context, progress = CURRENT.get(), self.control.progress
        headers = "" if context is None else context_headers(context, context.id)
        call = Call(path, dict(fields), headers, sum(map(len, fields.values())))
        # No prediction limits the time: embeddings of a batch, or beams, may take minutes.
        with Watchdog(lambda heard_s, _: progress.answer_s(name, heard_s)):
            return await self.driver.backends[name].ask(call)

    async def _respond_resumable(
        self, call: ClientCall, resume: ResumeRequest
    ) -> tuple[Outcome, Response]:
        """Respond to a keyed request, whose stream is new or was taken over."""
        (journal,), (echo,) = call.journals, call.echoes
        gathered = WholeClient()
        journal.marks = []
        sync = call.client is not None and call.client.numbers_events
        inner = call.client or gathered
        keyed = self.mirror.open(resume, journal, call.found, inner, sync=sync)
        try:
            sends_echo = call.client is not None and not keyed.record.events
            outcome = await self.run_keyed(keyed, journal, echo if sends_echo else None)
            is_refused = isinstance(outcome, Failed) and outcome.status < 500
            if is_refused and not keyed.failure and not keyed.record.events:
                self.mirror.forget(keyed)
            elif isinstance(outcome, Failed) and outcome is not SUPERSEDED:
                keyed.release()
                await keyed.flushed(_FLUSH_TIMEOUT_S)
            keyed.close()  # Close the stream now: no event may follow the end of the response.
            if call.client is not None:
                return outcome, await end_stream(call.client, outcome)
            return whole_response(call, outcome, [gathered])
        finally:
            self.mirror.close(keyed)

    async def run_keyed(self, keyed: KeyedStream, journal: Journal, echo: str | None) -> Outcome:
        """Run a keyed stream until its client has all events."""
        # The stream was cancelled, or moved away, before it began here.
        if keyed.failure is not None:
            return keyed.failure
        outcome: Outcome = Complete()
        if not journal.finished and not keyed.record.state.complete:
            client: Client = keyed
            if echo is not None:
                client = ChoiceClient(keyed, Merger(), 0, journal, echo)
            if journal.begins_again:
                client = HeldBack(client, journal)
            else:  # The record gets the events as they come, for a proxy that takes over.
                journal.can_begin_again = False
            outcome = await self.driver.run(journal, client)
        if outcome == Complete():
            await keyed.finish([] if keyed.record.state.complete else journal.missing_end())
            if keyed.after > keyed.record.seq:
                message = "Last-Event-ID lies behind the end of the stream"
                return Failed(400, error_body(message, code="beyond_end"))
        return keyed.failure or outcome


def missing_end(call: ClientCall) -> bytes:
    """Return the events that a complete response still lacks."""
    first, parsed, merger = call.journals[0], call.parsed, call.merger
    if len(call.journals) == 1:
        return b"".join(map(sse, first.missing_end())) + DONE if first.wants_usage else DONE
    assert merger is not None
    assert merger.head is not None
    if not parsed.request.wants_usage:
        return DONE
    usage, facts = total_usage(call.journals)
    return sse(parsed.endpoint.event(merger.head, [], usage, facts.beside)) + DONE


async def end_stream(client: StreamClient, outcome: Outcome) -> Response:
    """End a streamed response that has all its events."""
    match outcome:
        case Complete():
            return await client.finish(DONE)
        case Failed() if not client.has_begun:
            return refusal(outcome)
        case Failed():
            # A stream that ends with an error does not get the [DONE] of a complete response.
            return await client.finish(sse(outcome.body))
        case _:
            assert_never(outcome)


def whole_response(
    call: ClientCall, outcome: Outcome, clients: Sequence[WholeClient]
) -> tuple[Outcome, Response]:
    """Return the response of a client that does not stream, and the outcome that counts: it is
    another one if no body can be made. `clients`: what the call's streams have written to.
    """
    match outcome:
        case Complete():
            try:
                body = answer(call.parsed, call.journals, clients, call.echoes)
                return outcome, json_response(body, headers=call.head())
            except UndecodableError as error:
                failure = undecodable(error)
                return failure, refusal(failure)
        case Failed():
            return outcome, refusal(outcome)
        case _:
            assert_never(outcome)


def _received(record: Record) -> Iterable[tuple[ReceivedChoice, int]]:
    """Yield the choices of the events that a client has, each with its number of ids."""
    for event in record.events:
        for choice in CHUNK.decode(event.data).choices or ():
            yield choice, len(event.ids) // BYTES_PER_ID


def check_whole(call: ClientCall) -> None:
    """Note a request that needs one engine: it wants results about the prompt, or several outputs
    at once, which a handed-over stream of tokens cannot give.

    Raises:
        RequestError: the request wants a stream, or to be resumable.
    """
    parsed = call.parsed
    fields, names = parsed.fields, whole(parsed.endpoint.api)
    if not names.isdisjoint(fields):
        call.whole = next(name for name in fields if name in names)
    elif parsed.echo and (
        parsed.request.max_tokens == 0 or any(name in fields for name in ECHOED_BY_ENGINE)
    ):
        call.whole = "echo"
    if call.whole is not None and (parsed.request.stream or call.resume is not None):
        raise RequestError(
            f"{call.whole} is answered in one piece by one engine; allowed: without stream and "
            "without Idempotency-Key",
            param=call.whole,
        )


def whole_fields(parsed: ParsedRequest) -> Fields:
    """Return the fields for the engine that answers the whole request, with all prompts in one
    list.
    """
    fields = dict(parsed.fields)
    if "messages" in fields:
        return fields
    prompts = [
        one.fields.get("prompt") or msgspec.Raw(msgspec.json.encode([*(one.prompt_ids or ())]))
        for one in parsed.prompts
    ]
    together = msgspec.Raw(b"[" + b",".join(map(bytes, prompts)) + b"]")
    return fields | {"prompt": together if parsed.more else prompts[0]}


def find_model(instances: Instances, model: str | None) -> ServedName:
    """Return the model or adapter that a request names; before an instance is up, any name is
    accepted.

    Raises:
        RequestError: no instance serves this name.
    """
    served = instances.model
    if model is None or model == served:
        return ServedName(served or "")
    if served is None:
        return ServedName(model, model)
    names = instances.served_names()
    found = names.get(model)
    if found is None:
        raise RequestError(
            f"the model {model!r:.200} does not exist; allowed: {', '.join(map(repr, names))}",
            param="model",
            status=404,
            code="model_not_found",
        )
    return found


def deadlines_of(headers: CIMultiDictProxy[str]) -> ev.Deadlines:
    """Return the deadlines in the headers, which replace section `slo` of the configuration: the
    OpenAI API has no fields for them.

    Raises:
        RequestError: a header is not a number of seconds, or out of range.
    """
    if not any(map(headers.__contains__, _LONGEST_S)):
        return ev.NO_DEADLINES
    return ev.Deadlines(
        *(_seconds(headers, name) if name in headers else None for name in _LONGEST_S)
    )


def _seconds(headers: CIMultiDictProxy[str], name: str) -> float:
    values = headers.getall(name)
    text, longest_s = ", ".join(values), _LONGEST_S[name]
    seconds = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not 0 < seconds <= longest_s:
        raise RequestError(
            f"this {name} is not supported; allowed: seconds above 0, up to {longest_s}", param=name
        )
    return seconds


def _wrapped(seed: int) -> int:
    """Return the seed modulo 2^64, as a signed number."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


CLIENT_GONE = 499
_CODES = {*map(int, HTTPStatus), CLIENT_GONE, 529}  # Anthropic: overloaded.
# Matches an id of a request that needs no quotes in a header and in a log.
_ID = re.compile(r"[A-Za-z0-9._~:/@+=-]{1,128}", re.ASCII)
# Matches a `traceparent` of W3C Trace Context, level 1: version, trace and span, both other than 0,
# and flags.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


def open_tracer(proxy: str, engine: str, environ: Mapping[str, str]) -> "RequestTracer | None":
    """Open the tracer of requests; None: the environment configures no traces.

    Raises:
        ConfigError: the configured traces are impossible.
    """
    if (settings := trace_settings(environ)) is None:
        return None
    from kvrs.proxy.streams.spans import RequestTracer
    from kvrs.tracing.sending import SpanSender

    return RequestTracer(SpanSender(settings, "kvrs-proxy", proxy), engine)


class RequestObserver:
    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Callable[[], float],
        tenants: Tenants,
        *,
        logs_access: bool,
        tracer: "RequestTracer | None" = None,
        picker: EndpointPicker | None = None,
    ) -> None:
        self._responses = TallySeries(
            "kvrs_http_responses",
            "Responses to requests of clients, by path and status; 499: the client was gone.",
            registry=registry,
            labels=["path", "code"],
        )
        self._series: dict[tuple[str, int], Tally] = {}
        self._clock = clock
        self._tenants = tenants
        self._access = RowLog(access_log, "request", time.time) if logs_access else None
        self._tracer = tracer
        self._picker = picker

    async def answer(self, request: Request, handler: Handler) -> Response:
        """Answer a request, whose tenant is known before its body is read. Every error has a body
        in the form of its API, and every response, even a refusal, has the id. An id that is
        unsafe in logs or headers is replaced; an invalid trace is dropped.
        """
        given, trace = request.headers.get(REQUEST_ID, ""), request.headers.get(TRACEPARENT, "")
        context = RequestContext(
            given if _ID.fullmatch(given) else os.urandom(16).hex(),
            trace if _TRACEPARENT.fullmatch(trace) else None,
        )
        if self._tracer is not None:
            self._tracer.begin(context, request.method)
        CURRENT.set(context)
        # Responses that write their head themselves take the id from the request.
        request.id = context.id
        if self._picker is not None:
            self._picker.begin(request, context)
        began_s, status, tenant = self._clock(), CLIENT_GONE, self._tenants.only
        try:
            try:
                if tenant is None and request.path not in OPEN_PATHS:
                    tenant = self._tenants.of(request)
                if tenant is not None:
                    request.tenant = tenant
                response = await handler(request)
                if response.body is not None and len(response.body) > UNSENT_BYTES:
                    request.connection.check_room(len(response.body))
            except RequestError as error:
                response = error_response(error)
            except Exception:
                # After the headers, only the end of the connection can tell the client of an
                # internal error.
                if request.is_begun:
                    raise
                response = bug_response()
            response = in_the_form_of(request, response)
            status = response.status
            if response.body is not None:
                response.headers[REQUEST_ID] = context.id
                if request.head is not None:
                    response.headers.update(request.head())
            return response
        finally:
            self._end(request, context, tenant, status, began_s)

    def note_refusal(self, status: int, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Note a request that the HTTP server has refused before any handler; return headers for
        the answer.
        """
        given = headers.get(REQUEST_ID, "")
        request_id = given if _ID.fullmatch(given) else os.urandom(16).hex()
        (
            self._series.get((UNKNOWN_ROUTE, status)) or self._new_series(UNKNOWN_ROUTE, status)
        ).value += 1
        if self._access is not None:
            self._access.add(
                {"request_id": request_id, "method": "", "path": UNKNOWN_ROUTE, "status": status}
            )
        return {REQUEST_ID: request_id}

    async def close(self) -> None:
        """Write waiting log lines, and send the spans that have ended."""
        if self._access is not None:
            self._access.write()
        if self._tracer is not None:
            await self._tracer.close()

    def _new_series(self, path: str, status: int) -> Tally:
        series = self._series[path, status] = self._responses.of(path, _code(status))
        return series

    def _end(
        self,
        request: Request,
        context: RequestContext,
        tenant: Tenant | None,
        status: int,
        began_s: float,
    ) -> None:
        path = request.route
        (self._series.get((path, status)) or self._new_series(path, status)).value += 1
        if context.trace is not None:
            context.trace.end(path, status)
        if self._access is None:
            return
        facts: dict[str, Any] = {
            "request_id": context.id,
            "method": request.method,
            "path": path,
            "status": status,
            "seconds": round(self._clock() - began_s, 6),
        }
        if tenant is not None and tenant.name:
            facts["tenant"] = tenant.name
        self._access.add(facts)


def _code(status: int) -> str:
    """Return the status as a label. Unknown numbers, with which an engine may refuse, become 4xx or
    5xx.
    """
    return str(status) if status in _CODES else f"{status // 100}xx"
