"""Traces of requests, with the names of OpenTelemetry's conventions for generative AI.

A request is a span of its own or its client's trace; calls to instances and recoveries are its
children; engines get the span of their call as `traceparent`.

The module is imported only if traces are configured: OpenTelemetry is in the extra `tracing`.
"""

from typing import TYPE_CHECKING, Self

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from kvrs.errors import KvrsError
from kvrs.ids import InstanceId
from kvrs.protocol.openai.requests import ChatRequest
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import TRACEPARENT, RequestContext
from kvrs.tracing.sending import SpanSender

if TYPE_CHECKING:
    from kvrs.proxy.streams.recoveries import Recovery

_NS = 1_000_000_000
_extract = TraceContextTextMapPropagator().extract


class CallSpan:
    """Span of a call to an instance. The span ends with its `with` block, and is marked as failed
    if the block raises an error.
    """

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Span) -> None:
        self._span = span
        self.traceparent = _traceparent_of(span)

    def first_token(self) -> None:
        self._span.add_event("first_token")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if isinstance(error, KvrsError):
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(StatusCode.ERROR, str(error))
        elif error is not None:  # Another attempt takes over, or the client has left.
            self._span.set_attribute("error.type", "cancelled")
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class RequestTrace:
    """The request's span, and the spans of its calls and recoveries."""

    __slots__ = ("_below", "_engine", "_journals", "_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: Span, engine: str) -> None:
        self._tracer = tracer
        self._span = span
        self._below = trace.set_span_in_context(span)
        self._engine = engine
        self._journals: list[Journal] = []

    def opened(self, journal: Journal) -> None:
        """Note that a stream of the request has begun."""
        self._journals.append(journal)

    def call(self, name: str, instance: InstanceId, journal: Journal) -> CallSpan:
        facts: dict[str, AttributeValue] = {
            "kvrs.instance": instance,
            "kvrs.stream": journal.stream,
            "kvrs.attempt": journal.attempt,
        }
        return CallSpan(
            self._tracer.start_span(f"{name} {instance}", self._below, SpanKind.CLIENT, facts)
        )

    def recovered(self, recovery: "Recovery", now_s: float) -> None:
        """Send the span of an ended recovery. `now_s` is by the recovery's clock."""
        begun_ns = round((recovery.at.wall_s or 0.0) * _NS)
        facts: dict[str, AttributeValue] = {
            f"kvrs.recovery.{name}": value for name, value in recovery.facts().items()
        }
        self._tracer.start_span(
            f"recovery {recovery.option}",
            self._below,
            SpanKind.INTERNAL,
            facts,
            start_time=begun_ns,
        ).end(begun_ns + round(max(0.0, now_s - recovery.at.now_s) * _NS))

    def end(self, path: str, status: int) -> None:
        # Release the streams now: calls that are being cancelled still hold the trace.
        journals, self._journals = self._journals, []
        span = self._span
        span.set_attributes({"http.route": path, "http.response.status_code": status})
        if journals:
            facts = _facts_of(journals)
            span.set_attributes({**facts, "gen_ai.provider.name": self._engine})
            names = facts["gen_ai.operation.name"], facts.get("gen_ai.request.model", "")
            span.update_name(" ".join(map(str, names)).strip())
        if status >= 500 or (status < 400 and not all(each.finished for each in journals)):
            span.set_attribute("error.type", str(status) if status >= 500 else "unfinished")
            span.set_status(StatusCode.ERROR)
        span.end()


class RequestTracer:
    """Begins the traces of one proxy. `engine`: kind of the engines, by its name in OpenTelemetry's
    conventions.
    """

    def __init__(self, sender: SpanSender, engine: str) -> None:
        self._tracer = sender.tracer
        self._engine = engine
        self.close = sender.close

    def begin(self, context: RequestContext, method: str) -> None:
        """Begin the span of a request, the parent of its calls. `traceparent` tells the engines of
        the span, also that an untraced request has none.
        """
        above = _extract({} if context.traceparent is None else {TRACEPARENT: context.traceparent})
        facts = {"http.request.method": method, "kvrs.request.id": context.id}
        span = self._tracer.start_span(method, above, SpanKind.SERVER, facts)
        context.traceparent = _traceparent_of(span)
        if span.is_recording():
            context.trace = RequestTrace(self._tracer, span, self._engine)


def _traceparent_of(span: Span) -> str:
    own = span.get_span_context()
    return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags.sampled:02x}"


def _facts_of(journals: list[Journal]) -> dict[str, AttributeValue]:
    request = journals[0].parsed.request
    prompts = {id(each.parsed): each.prompt_tokens for each in journals}
    given = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.given_temperature,
        "gen_ai.request.choice.count": None if request.n == 1 else request.n,
        "gen_ai.request.seed": request.seed,
    }
    return {
        "gen_ai.operation.name": "chat" if isinstance(request, ChatRequest) else "text_completion",
        **{name: value for name, value in given.items() if value is not None},
        "gen_ai.usage.input_tokens": sum(prompts.values()),
        "gen_ai.usage.output_tokens": sum([len(each.output_ids) for each in journals]),
        "gen_ai.response.finish_reasons": [each.finish_reason or "error" for each in journals],
    }
