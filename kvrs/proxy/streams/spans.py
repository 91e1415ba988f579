"""Traces of requests, with the names of OpenTelemetry's conventions for generative AI.

A request is a span of its own trace or of its client's, the calls to instances and the recoveries
are its children, and engines get the span of their call as `traceparent`. A span is made when it is
sent, of what was noted meanwhile: that is less code within a request, and many spans at a time.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from kvrs.errors import KvrsError
from kvrs.ids import InstanceId
from kvrs.protocol.openai.requests import ChatRequest
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.request_context import RequestContext
from kvrs.tracing.context import new_span_id, new_trace_id, parent_of, traceparent_of
from kvrs.tracing.otlp import Span, SpanKind, SpanSource, Value
from kvrs.tracing.settings import Sampler

if TYPE_CHECKING:
    from kvrs.proxy.streams.recoveries import Recovery

_NS = 1_000_000_000


class CallSpan(Protocol):
    """The span of one call to an instance, which ends with its block: by an error where that
    does.
    """

    @property
    def traceparent(self) -> str | None: ...
    def first_token(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class _NoSpan:
    __slots__ = ()
    traceparent = None

    def first_token(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


NO_SPAN = _NoSpan()


def traced_call(
    request: RequestContext | None, name: str, instance: InstanceId, journal: Journal
) -> CallSpan:
    trace = None if request is None else request.trace
    if not isinstance(trace, RequestTrace):
        return NO_SPAN
    return _Call(trace, name, instance, journal)


class _Call:
    __slots__ = (
        *("_attempt", "_begun_ns", "_ended_ns", "_error", "_first_ns", "_id", "_instance"),
        *("_name", "_stream", "_trace", "traceparent"),
    )

    def __init__(
        self, trace: "RequestTrace", name: str, instance: InstanceId, journal: Journal
    ) -> None:
        self._trace = trace
        self._name = name
        self._instance = instance
        self._stream = journal.stream
        self._attempt = journal.attempt
        self._id = new_span_id()
        self._begun_ns = 0
        self._first_ns = 0
        self._error: tuple[str, str | None] | None = None  # Type and message.
        self.traceparent = traceparent_of(trace.trace_id, self._id, is_taken=True)

    def first_token(self) -> None:
        self._first_ns = time.time_ns()

    def __enter__(self) -> Self:
        self._begun_ns = time.time_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._ended_ns = time.time_ns()
        if isinstance(error, KvrsError):
            self._error = type(error).__name__, str(error)
        elif error is not None:  # Another attempt takes over, or the client is gone.
            self._error = "cancelled", None
        self._trace.ended(self)

    def span(self) -> Span:
        facts: dict[str, Value] = {
            "kvrs.instance": self._instance,
            "kvrs.stream": self._stream,
            "kvrs.attempt": self._attempt,
        }
        message = None
        if self._error is not None:
            facts["error.type"], message = self._error
        return Span(
            self._trace.trace_id,
            self._id,
            self._trace.id,
            f"{self._name} {self._instance}",
            SpanKind.CLIENT,
            self._begun_ns,
            self._ended_ns,
            facts,
            first_token_ns=self._first_ns,
            error=message,
        )


class _Streams(NamedTuple):
    """Facts about a request's streams, without what they hold."""

    is_chat: bool
    model: str | None
    max_tokens: int | None
    temperature: float | None
    choices: int
    seed: int | None
    prompt_tokens: int
    output_tokens: int
    finish_reasons: tuple[str, ...]

    def facts(self, provider: str) -> dict[str, Value]:
        facts: dict[str, Value] = {
            "gen_ai.operation.name": "chat" if self.is_chat else "text_completion",
            "gen_ai.provider.name": provider,
        }
        given = {
            "gen_ai.request.model": self.model,
            "gen_ai.request.max_tokens": self.max_tokens,
            "gen_ai.request.temperature": self.temperature,
            "gen_ai.request.choice.count": None if self.choices == 1 else self.choices,
            "gen_ai.request.seed": self.seed,
        }
        facts |= {name: value for name, value in given.items() if value is not None}
        facts["gen_ai.usage.input_tokens"] = self.prompt_tokens
        facts["gen_ai.usage.output_tokens"] = self.output_tokens
        facts["gen_ai.response.finish_reasons"] = self.finish_reasons
        return facts


class RequestTrace:
    """The spans of one request, which go to `ended` as they end; its own is made of it."""

    __slots__ = (
        *("_begun_ns", "_ended_ns", "_is_finished", "_journals", "_method", "_parent_id", "_path"),
        *("_provider", "_request_id", "_status", "_streams", "ended", "id", "trace_id"),
    )

    def __init__(
        self,
        context: RequestContext,
        method: str,
        trace_id: str,
        parent_id: str,
        ended: Callable[[SpanSource], None],
        provider: str,
    ) -> None:
        """`parent_id`: of the client's span; empty: it has none. `provider`: the kind of engine, in
        the words of the conventions.
        """
        self.trace_id = trace_id
        self.id = new_span_id()
        self.ended = ended
        self._parent_id = parent_id
        self._request_id = context.id
        self._method = method
        self._provider = provider
        self._journals: list[Journal] = []
        self._streams: _Streams | None = None
        self._begun_ns = time.time_ns()
        context.traceparent = traceparent_of(trace_id, self.id, is_taken=True)

    def opened(self, journal: Journal) -> None:
        """A stream of the request has begun."""
        self._journals.append(journal)

    def end(self, path: str, status: int) -> None:
        # Calls that are being cancelled still have the trace; it needs their streams no more.
        journals, self._journals = self._journals, []
        self._ended_ns = time.time_ns()
        self._path = path
        self._status = status
        self._is_finished = all(each.finished for each in journals)
        if journals:
            self._streams = _told_of(journals)
        self.ended(self)

    def span(self) -> Span:
        facts: dict[str, Value] = {
            "http.request.method": self._method,
            "http.route": self._path,
            "http.response.status_code": self._status,
            "kvrs.request.id": self._request_id,
        }
        name = self._method
        if (streams := self._streams) is not None:
            facts |= streams.facts(self._provider)
            name = f"{facts['gen_ai.operation.name']} {streams.model or ''}"
        is_error = self._status >= 500
        if is_error or (self._status < 400 and not self._is_finished):
            facts["error.type"] = str(self._status) if is_error else "unfinished"
            is_error = True
        return Span(
            self.trace_id,
            self.id,
            self._parent_id,
            name.strip(),
            SpanKind.SERVER,
            self._begun_ns,
            self._ended_ns,
            facts,
            error="" if is_error else None,
            is_remote=bool(self._parent_id),
        )

    def recovered(self, recovery: "Recovery", now_s: float) -> None:
        """A recovery has ended. `now_s` is of its clock."""
        begun_ns = round(recovery.at_s * _NS)
        ended_ns = begun_ns + round(max(0.0, now_s - recovery.decided_s) * _NS)
        facts = {f"kvrs.recovery.{name}": value for name, value in recovery.facts().items()}
        name = f"recovery {recovery.option.value}"
        times_ns = begun_ns, ended_ns
        own_id = new_span_id()
        self.ended(Span(self.trace_id, own_id, self.id, name, SpanKind.INTERNAL, *times_ns, facts))


class Tracer:
    """Begins the traces of one proxy."""

    def __init__(
        self, sampler: Sampler, ended: Callable[[SpanSource], None], provider: str
    ) -> None:
        self._sampler = sampler
        self._ended = ended
        self._provider = provider

    def begin(self, context: RequestContext, method: str) -> None:
        """Begin the span of a request, to which its calls belong from now on; or say to its engines
        that it has none.
        """
        given = context.traceparent
        parent = None if given is None else parent_of(given)
        trace_id = parent.trace_id if parent is not None else new_trace_id()
        client_takes = None if parent is None else parent.is_taken
        if self._sampler.takes(int(trace_id, 16), client_takes):
            parent_id = "" if parent is None else parent.span_id
            context.trace = RequestTrace(
                context, method, trace_id, parent_id, self._ended, self._provider
            )
        else:
            parent_id = new_span_id() if parent is None else parent.span_id
            context.traceparent = traceparent_of(trace_id, parent_id, is_taken=False)


def _told_of(journals: list[Journal]) -> _Streams:
    request = journals[0].parsed.request
    if len(journals) == 1:
        prompt_tokens = journals[0].prompt_tokens
    else:
        prompts = {id(each.parsed): each.prompt_tokens for each in journals}
        prompt_tokens = sum(prompts.values())
    return _Streams(
        isinstance(request, ChatRequest),
        request.model,
        request.max_tokens,
        request.given_temperature,
        request.n,
        request.seed,
        prompt_tokens,
        sum([len(each.output_ids) for each in journals]),
        tuple([each.finish_reason or "error" for each in journals]),
    )
