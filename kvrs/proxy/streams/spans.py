"""Traces of requests, with the names of OpenTelemetry's conventions for generative AI.

A request is a span of its own trace or of its client's, the calls to instances and the recoveries
are its children, and engines get the span of their call as `traceparent`. A span is made when it
has ended, of what was noted meanwhile: the time of its beginning and its id.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from kvrs.errors import KvrsError
from kvrs.ids import InstanceId
from kvrs.protocol.openai.requests import ChatRequest
from kvrs.proxy.streams.journal import Journal
from kvrs.proxy.wire.request_context import RequestContext
from kvrs.tracing.context import Parent, new_span_id, new_trace_id, parent_of
from kvrs.tracing.otlp import Span, SpanKind, Value
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
    return _Call(trace, f"{name} {instance}", instance, journal)


class _Call:
    __slots__ = ("_begun_ns", "_facts", "_first_ns", "_id", "_name", "_trace", "traceparent")

    def __init__(
        self, trace: "RequestTrace", name: str, instance: InstanceId, journal: Journal
    ) -> None:
        self._trace = trace
        self._name = name
        self._id = new_span_id()
        self._facts: dict[str, Value] = {
            "kvrs.instance": instance,
            "kvrs.stream": journal.stream,
            "kvrs.attempt": journal.attempt,
        }
        self._begun_ns = 0
        self._first_ns = 0
        self.traceparent = Parent(trace.trace_id, self._id, True).header()

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
        message = None
        if isinstance(error, KvrsError):
            self._facts["error.type"] = type(error).__name__
            message = str(error)
        elif error is not None:  # Another attempt takes over, or the client is gone.
            self._facts["error.type"] = "cancelled"
        self._trace.child(
            self._name,
            SpanKind.CLIENT,
            (self._begun_ns, time.time_ns()),
            self._facts,
            span_id=self._id,
            first_token_ns=self._first_ns,
            error=message,
        )


class RequestTrace:
    """The spans of one request, which go to `ended` as they end."""

    __slots__ = (
        *("_begun_ns", "_ended", "_id", "_journals", "_method", "_parent_id", "_provider"),
        *("_request_id", "trace_id"),
    )

    def __init__(
        self,
        context: RequestContext,
        method: str,
        trace_id: str,
        parent_id: str,
        ended: Callable[[Span], None],
        provider: str,
    ) -> None:
        """`parent_id`: of the client's span; empty: it has none. `provider`: the kind of engine, in
        the words of the conventions.
        """
        self.trace_id = trace_id
        self._id = new_span_id()
        self._parent_id = parent_id
        self._request_id = context.id
        self._method = method
        self._ended = ended
        self._provider = provider
        self._journals: list[Journal] = []
        self._begun_ns = time.time_ns()
        context.traceparent = Parent(trace_id, self._id, True).header()

    def opened(self, journal: Journal) -> None:
        """A stream of the request has begun."""
        self._journals.append(journal)

    def end(self, path: str, status: int) -> None:
        journals, name = self._journals, self._method
        facts: dict[str, Value] = {
            "http.request.method": self._method,
            "http.route": path,
            "http.response.status_code": status,
            "kvrs.request.id": self._request_id,
        }
        if journals:
            facts |= _facts_of(journals, self._provider)
            name = f"{facts['gen_ai.operation.name']} {journals[0].parsed.request.model or ''}"
        is_error = status >= 500
        if is_error or (status < 400 and not all(each.finished for each in journals)):
            facts["error.type"] = str(status) if is_error else "unfinished"
            is_error = True
        self._ended(
            Span(
                self.trace_id,
                self._id,
                self._parent_id,
                name.strip(),
                SpanKind.SERVER,
                self._begun_ns,
                time.time_ns(),
                facts,
                error="" if is_error else None,
                is_remote=bool(self._parent_id),
            )
        )
        # Calls that are being cancelled still have the trace; it needs their streams no more.
        self._journals = []

    def recovered(self, recovery: "Recovery", now_s: float) -> None:
        """A recovery has ended. `now_s` is of its clock."""
        begun_ns = round(recovery.at_s * _NS)
        ended_ns = begun_ns + round(max(0.0, now_s - recovery.decided_s) * _NS)
        facts = {f"kvrs.recovery.{name}": value for name, value in recovery.facts().items()}
        name = f"recovery {recovery.option.value}"
        self.child(name, SpanKind.INTERNAL, (begun_ns, ended_ns), facts)

    def child(
        self,
        name: str,
        kind: SpanKind,
        times_ns: tuple[int, int],
        facts: dict[str, Value],
        *,
        span_id: str | None = None,
        first_token_ns: int = 0,
        error: str | None = None,
    ) -> None:
        """A span within the request has ended."""
        self._ended(
            Span(
                self.trace_id,
                span_id or new_span_id(),
                self._id,
                name,
                kind,
                *times_ns,
                facts,
                first_token_ns=first_token_ns,
                error=error,
            )
        )


class Tracer:
    """Begins the traces of one proxy."""

    def __init__(self, sampler: Sampler, ended: Callable[[Span], None], provider: str) -> None:
        self._sampler = sampler
        self._ended = ended
        self._provider = provider

    def begin(self, context: RequestContext, method: str) -> None:
        """Begin the span of a request, to which its calls belong from now on; or say to its engines
        that it has none.
        """
        parent = parent_of(context.traceparent or "")
        trace_id = parent.trace_id if parent is not None else new_trace_id()
        client_takes = None if parent is None else parent.is_taken
        if self._sampler.takes(int(trace_id, 16), client_takes):
            parent_id = "" if parent is None else parent.span_id
            context.trace = RequestTrace(
                context, method, trace_id, parent_id, self._ended, self._provider
            )
        else:
            parent_id = new_span_id() if parent is None else parent.span_id
            context.traceparent = Parent(trace_id, parent_id, False).header()


def _facts_of(journals: list[Journal], provider: str) -> dict[str, Value]:
    """Of a request that has streams."""
    request = journals[0].parsed.request
    facts: dict[str, Value] = {
        "gen_ai.operation.name": (
            "chat" if isinstance(request, ChatRequest) else "text_completion"
        ),
        "gen_ai.provider.name": provider,
    }
    given = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.given_temperature,
        "gen_ai.request.choice.count": None if request.n == 1 else request.n,
        "gen_ai.request.seed": request.seed,
    }
    for name, value in given.items():
        if value is not None:
            facts[name] = value
    prompts = {id(each.parsed): each.prompt_tokens for each in journals}
    facts["gen_ai.usage.input_tokens"] = sum(prompts.values())
    facts["gen_ai.usage.output_tokens"] = sum(len(each.output_ids) for each in journals)
    facts["gen_ai.response.finish_reasons"] = tuple(
        each.finish_reason or "error" for each in journals
    )
    return facts
