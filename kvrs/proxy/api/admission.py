"""Admission of a request at the clients' port, as a sequence of steps on one record. Each step
passes the request, or refuses it by a RequestError of one kind.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

import msgspec
from multidict import CIMultiDictProxy

from kvrs.config.proxy import Inexact, ProxySettings
from kvrs.core.fleet.known import Instances, Replays
from kvrs.core.fleet.names import ServedName
from kvrs.core.fleet.tested import Continues
from kvrs.core.model import events as ev
from kvrs.errors import ConfigError, RequestError
from kvrs.ids import StreamId
from kvrs.net.connections import ByteBudget
from kvrs.net.http_request import NO_HEADERS
from kvrs.net.routes import Request
from kvrs.process.large_work import LARGE_BYTES, LargeWork
from kvrs.protocol.mirror import BYTES_PER_ID
from kvrs.protocol.openai.chunks import CHUNK, TOO_LONG, ReceivedChoice
from kvrs.protocol.openai.fields import SGLANG, VLLM, whole
from kvrs.protocol.openai.requests import ECHOED_BY_ENGINE, CompletionRequest, Fields
from kvrs.protocol.openai.structure import MAX_ELEMENTS, bytes_within, elements_within
from kvrs.proxy.api.bodies import read_body
from kvrs.proxy.api.choices import Merger
from kvrs.proxy.api.tenants import Tenant, Tenants
from kvrs.proxy.mirror.headers import KEY, LAST_EVENT, ResumeRequest, parse_resume_headers, reopened
from kvrs.proxy.mirror.records import Record
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.streams.clients import SseClient, StreamClient
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import AdmissionMetrics
from kvrs.proxy.wire.exactness import (
    inexact_features,
    is_never_text,
    is_predictable,
    replayable,
    tokens_at_risk,
)
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.message_parts import REASONING
from kvrs.proxy.wire.requests import (
    CHAT,
    ParsedRequest,
    RequestUsage,
    salted,
)

# Highest value in seconds of each header with a deadline, as in section `slo`.
_LONGEST_S = {"x-kvrs-ttft-s": 86400, "x-kvrs-recovery-gap-s": 3600, "x-kvrs-deadline-s": 86400}
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?", re.ASCII)
# Response headers: X-Kvrs-Exact is "no" if a stream may be inexact after a cut, X-Kvrs-Inexact has
# the reasons.
_EXACT, _INEXACT = "X-Kvrs-Exact", "X-Kvrs-Inexact"
_NO_HEADERS: Mapping[str, str] = {}
_OWN_NAME = ServedName("")

Parsed = TypeVar("Parsed")


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
    inexact: tuple[str, ...] = ()  # Features of the request that would be inexact after a cut.
    # The prompt's text is inexact only because the proxy has no tokenizer.
    lacks_tokenizer: bool = False
    # Features that only a replay continues exactly; copied to `Journal`, like the next ones.
    replayed: tuple[str, ...] = ()
    replays: Replays = Replays.NOWHERE
    never_as_text: bool = False
    has_generator: bool = True
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
        if journal.inexact and not journal.is_promised:
            names |= dict.fromkeys(journal.inexact)
    if not names:
        return _NO_HEADERS
    # The header names the missing tokenizer as the reason instead of the prompt.
    texts = ("prompt", "messages") if lacks_tokenizer else ()
    reasons = ("tokenizer" if name in texts else name for name in names)
    return {_EXACT: "no", _INEXACT: ", ".join(reasons)}


class Admissions:
    """Admits clients' requests, step by step. `draining`: no new streams are admitted."""

    def __init__(
        self,
        settings: ProxySettings,
        backend: str,
        driver: Driver,
        mirror: Mirror,
        metrics: AdmissionMetrics,
        clock: Callable[[], float],
        tenants: Tenants,
        large: LargeWork,
    ) -> None:
        self.draining = False
        self._settings = settings
        self._backend = backend
        self._driver = driver
        self._streams = driver.streams
        self._instances = driver.control.instances
        self._self_tests = driver.control.self_tests
        self._mirror = mirror
        self._clock = clock
        self._tenants = tenants
        self._large = large
        self.budget = ByteBudget(settings.body_budget_bytes, settings.max_body_bytes)
        metrics.request_bytes.set_function(lambda: self.budget.held_bytes)

    def begin(self, request: Request) -> ClientCall:
        """Begin the admission of a request whose tenant is known. Before the first step the request
        holds no bytes and streams; `held.end`, or the end of `with call.held`, returns what it
        holds.
        """
        tenant: Tenant = request.tenant
        held = RequestUsage(self.budget, tenant.meter)
        return ClientCall(request, tenant, held)

    async def admit(
        self, call: ClientCall, read: Callable[..., ParsedRequest] | None = None
    ) -> None:
        """Take a stream's request through all steps, in order. `read` parses the request's body;
        None: it is parsed already.

        Raises:
            RequestError: a step refuses it.
        """
        request, tenant = call.request, call.tenant
        if read is None:
            pass
        elif request.coming is None:  # The body is short, uncompressed and complete.
            if self.draining or len(self._streams) >= self._settings.max_streams:
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
        if model is not None and model != self._instances.model:
            call.name = find_model(self._instances, model)
        is_exact = self._instances.plain is None and self._self_tests.least[1] is Continues.SEEDED
        if (
            not is_exact
            or self._self_tests.comparison.sampled_ties
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
        open_streams, allowed = len(self._streams), self._settings.max_streams
        if open_streams + choices > allowed:
            raise RequestError(f"{open_streams} of {allowed} streams are open", status=503)
        if self.draining and not (resumes and not self._mirror.peers.staying):
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
        served = self._instances.max_model_len
        if served is None:
            return MAX_ELEMENTS
        model = self._driver.tokenizer.files.served
        longest_token = None if model is None else model.longest_token
        # vLLM's models may accept pictures, whose bytes are not limited by a number of tokens.
        if longest_token is not None and self._backend != VLLM:
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
        return await self._large.run(len(body), partial(read, body, max_elements=most))

    def _read_key(self, call: ClientCall) -> None:
        """Read the headers of a resumable stream."""
        request = call.request
        secret = partial(self._tenants.secret_of, request, call.tenant)
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
            call.found = await self._mirror.find(call.resume)
            # Check the room again: other streams may have opened during the steps.
            self._check_room(streams, call.found is not None)

    async def _check_exactness(self, call: ClientCall) -> None:
        """Note in `call` the features of the request that the instances in use could not continue
        exactly.
        """
        plain, (least, continues) = self._instances.plain, self._self_tests.least
        comparison, parsed = self._self_tests.comparison, call.parsed
        if plain is None and continues is Continues.SEEDED and not comparison.sampled_ties:
            return
        call.lacks_tokenizer = plain is not None and not self._driver.tokenizer.available
        if plain is not None:
            is_sglang = self._backend == SGLANG
            call.never_as_text, call.has_generator = is_never_text(parsed), not is_sglang
            find = partial(
                inexact_features,
                parsed,
                has_tokenizer=self._driver.tokenizer.available,
                continues=continues,
                penalises_prompt=not is_sglang,
                parses_reasoning=self._driver.parsers.reasoning,
            )
            call.inexact = await self._large.run(parsed.size_bytes, find)
            # SGLang's chats have no ids, by which its processor could be told the known output.
            if not (is_sglang and parsed.endpoint is CHAT):
                call.replays = self._driver.control.instances.replays(parsed.request.max_tokens)
            call.replayed = replayable(call.inexact, parsed, has_generator=not is_sglang)
            if call.replays is Replays.ALWAYS:
                call.inexact = tuple(each for each in call.inexact if each not in call.replayed)
        else:
            call.inexact = tokens_at_risk(parsed, continues)
        has_ties = comparison.has_ties(sampled=parsed.request.temperature > 0)
        if has_ties and "tokens" not in call.inexact:
            call.inexact = ("tokens", *call.inexact)
        if not call.inexact:
            return
        if self._settings.inexact is Inexact.REFUSE:
            feature = call.inexact[0]
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
        if self._backend == VLLM and parsed.request.return_token_ids:
            return ""  # Like vLLM: a client that wants ids gets the prompt as ids, not as text.
        if isinstance(parsed.request.prompt, str):
            return parsed.request.prompt
        try:
            return (await self._driver.tokenizer.load()).decode(parsed.request.prompt)
        except ConfigError as error:
            raise RequestError(f"a prompt of ids cannot be echoed: {error}", param="echo") from None

    def _reopen(self, record: Record, parsed: ParsedRequest) -> Journal:
        journal = reopened(record, parsed, self._clock())
        journal.is_strict = self._settings.inexact is Inexact.REFUSE
        if self._instances.plain is not None:
            journal.never_as_text = is_never_text(parsed)
            journal.has_generator = self._backend != SGLANG
            # A thought shows while the stream runs, too late for a seed of the proxy's.
            known = [each for each in journal.inexact if each != REASONING]
            journal.replayed = replayable(known, parsed, has_generator=journal.has_generator)
            if REASONING in journal.inexact and journal.is_repeatable:
                journal.replayed = (*journal.replayed, REASONING)
            if parsed.endpoint is CHAT:
                journal.restore(_received(record))
        # The instance that began the output is not known here, so a difference between any
        # instances counts.
        comparison, is_drawn = self._self_tests.comparison, parsed.request.temperature > 0
        may_differ = comparison.differs or comparison.has_ties(sampled=is_drawn)
        if may_differ and "tokens" not in journal.inexact:
            journal.inexact = (*journal.inexact, "tokens")
        return journal

    def _open_journals(self, call: ClientCall) -> None:
        """Open a journal for each choice of each prompt, or the resumed stream's journal."""
        parsed, tenant, name = call.parsed, call.tenant, call.name.key
        if call.found is not None:
            call.journals = [self._reopen(call.found, parsed)]
        else:
            now_s = self._clock()
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
                        inexact=call.inexact,
                        replayed=call.replayed,
                        replays=call.replays,
                        never_as_text=call.never_as_text,
                        has_generator=call.has_generator,
                        has_plain_answers=bool(self._driver.parsers.plain_answers),
                        can_begin_again=not one.request.stream,
                        is_strict=self._settings.inexact is Inexact.REFUSE,
                        asks_usage=not one.request.stream or wants_usage,
                    )
                    call.journals.append(journal)
            if len(call.journals) == 1:
                call.journals[0].wants_usage = wants_usage
        for journal in call.journals:
            journal.tenant, journal.name = tenant.mark, name
            if parsed.endpoint is CHAT:
                journal.default_tokens = self._driver.default_tokens
                journal.is_predictable = is_predictable(journal.parsed)
        if not call.echoes:
            call.echoes = [None] * len(call.journals)
        if len(call.journals) > 1 or call.echoes[0] is not None:
            call.merger = Merger()

    async def _find_prefixes(self, call: ClientCall) -> None:
        """Hash a large request's prompts beside the event loop, if the core needs hashes."""
        if not self._driver.control.policy.routes_by_prefix:
            return
        for journal in call.journals:
            if journal.parsed.prefix is None:  # All choices of a prompt share the prefix.
                size_bytes = journal.parsed.size_bytes
                await self._large.run(size_bytes, partial(getattr, journal, "prefix"))


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
