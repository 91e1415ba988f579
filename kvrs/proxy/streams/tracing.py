"""Traces of requests by OpenTelemetry, with the names of its conventions for generative AI.

A request is a span of its own trace or of its client's, the calls to instances and the recoveries
are its children, and engines get the span of their call as `traceparent`. Nothing of OpenTelemetry
is imported unless its environment variables name a collector.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol, Self

from kvrs import __version__
from kvrs.errors import ConfigError, KvrsError
from kvrs.ids import InstanceId
from kvrs.protocol.openai.requests import ChatRequest
from kvrs.proxy.streams.journal import Journal
from kvrs.proxy.wire.request_context import RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from kvrs.proxy.streams.recoveries import Recovery

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_FLUSH_MS = 2000
_NS = 1_000_000_000


class CallSpan(Protocol):
    """The span of one call to an instance."""

    @property
    def traceparent(self) -> str | None: ...

    def first_token(self) -> None: ...


class _NoSpan:
    traceparent = None

    def first_token(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


NO_SPAN = _NoSpan()


class _Call:
    def __init__(self, span: "Span") -> None:
        self._span = span
        self.traceparent = _traceparent(span)

    def first_token(self) -> None:
        self._span.add_event("first_token")


def traced_call(
    request: RequestContext | None, name: str, instance: InstanceId, journal: Journal
) -> AbstractContextManager[CallSpan]:
    """The span of a call, which ends with the block: by an error where the block does."""
    trace = None if request is None else request.trace
    return trace.call(name, instance, journal) if isinstance(trace, RequestTrace) else NO_SPAN


class RequestTrace:
    """The spans of one request."""

    def __init__(self, tracing: "Tracing", context: RequestContext, method: str) -> None:
        self._api = api = tracing.api
        self._tracer = tracing.tracer
        self._backend = tracing.backend
        carrier = {} if context.traceparent is None else {"traceparent": context.traceparent}
        self._span = self._tracer.start_span(
            method,
            context=tracing.propagator.extract(carrier),
            kind=api.SpanKind.SERVER,
            attributes={"http.request.method": method, "kvrs.request.id": context.id},
        )
        self._parent = api.set_span_in_context(self._span)
        self._journals: list[Journal] = []
        context.traceparent = _traceparent(self._span)

    def opened(self, journal: Journal) -> None:
        """A stream of the request has begun."""
        self._journals.append(journal)
        if len(self._journals) > 1 or not self._span.is_recording():
            return
        request = journal.parsed.request
        is_chat = isinstance(request, ChatRequest)
        given = {
            "gen_ai.operation.name": "chat" if is_chat else "text_completion",
            "gen_ai.provider.name": self._backend,
            "gen_ai.request.model": request.model,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.given_temperature,
            "gen_ai.request.choice.count": None if request.n == 1 else request.n,
            "gen_ai.request.seed": request.seed,
        }
        for name, value in given.items():
            if value is not None:
                self._span.set_attribute(name, value)
        self._span.update_name(f"{given['gen_ai.operation.name']} {request.model or ''}".strip())

    def end(self, path: str, status: int) -> None:
        span, journals = self._span, self._journals
        span.set_attribute("http.route", path)
        span.set_attribute("http.response.status_code", status)
        if journals:
            prompts = {id(each.parsed): each.prompt_tokens for each in journals}
            produced = sum(len(each.output_ids) for each in journals)
            span.set_attribute("gen_ai.usage.input_tokens", sum(prompts.values()))
            span.set_attribute("gen_ai.usage.output_tokens", produced)
            reasons = [each.finish_reason or "error" for each in journals]
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
        is_unfinished = any(not each.finished for each in journals)
        if status >= 500 or (status < 400 and is_unfinished):
            span.set_attribute("error.type", str(status) if status >= 400 else "unfinished")
            span.set_status(self._api.StatusCode.ERROR)
        span.end()

    @contextmanager
    def call(self, name: str, instance: InstanceId, journal: Journal) -> Iterator[_Call]:
        span = self._tracer.start_span(
            f"{name} {instance}",
            context=self._parent,
            kind=self._api.SpanKind.CLIENT,
            attributes={
                "kvrs.instance": instance,
                "kvrs.stream": journal.stream,
                "kvrs.attempt": journal.attempt,
            },
        )
        try:
            yield _Call(span)
        except KvrsError as error:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(self._api.StatusCode.ERROR, str(error))
            raise
        except asyncio.CancelledError:  # Another attempt takes over, or the client is gone.
            span.set_attribute("error.type", "cancelled")
            raise
        finally:
            span.end()

    def recovered(self, recovery: "Recovery", now_s: float) -> None:
        """A recovery has ended. `now_s` is of its clock."""
        begun_ns = round(recovery.at_s * _NS)
        facts = {f"kvrs.recovery.{name}": value for name, value in recovery.facts().items()}
        span = self._tracer.start_span(
            f"recovery {recovery.option.value}",
            context=self._parent,
            start_time=begun_ns,
            attributes=facts,
        )
        span.end(begun_ns + round(max(0.0, now_s - recovery.decided_s) * _NS))


class Tracing:
    """The spans of one proxy."""

    def __init__(self, provider: "TracerProvider", backend: str) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.api = trace
        self.propagator = TraceContextTextMapPropagator()
        self.tracer = provider.get_tracer("kvrs", __version__)
        self.backend = backend
        self._provider = provider

    def begin(self, context: RequestContext, method: str) -> None:
        """Begin the span of a request, to which its calls belong from now on."""
        context.trace = RequestTrace(self, context, method)

    async def close(self) -> None:
        """Send what is left, for a moment at most."""
        await asyncio.to_thread(self._provider.force_flush, _FLUSH_MS)
        self._provider.shutdown()


def open_tracing(environ: Mapping[str, str], proxy: str, backend: str) -> Tracing | None:
    """Tracing as OpenTelemetry's own variables ask for it; None: they do not.

    Raises:
        ConfigError: they ask for what is not installed.
    """
    endpoint = next((name for name in _ENDPOINTS if environ.get(name)), None)
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if endpoint is None or is_off or exporter == "none":
        return None
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _PROTOCOL)
    if exporter != "otlp" or protocol != _PROTOCOL:
        raise ConfigError(
            [f"{endpoint}: got {exporter} over {protocol}; allowed: otlp over {_PROTOCOL}"]
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            [f"{endpoint}: is set, and OpenTelemetry not installed; pip install 'kvrs[otel]'"]
        ) from None
    named = {"service.version": __version__, "service.instance.id": proxy}
    if not environ.get("OTEL_SERVICE_NAME"):
        named["service.name"] = "kvrs-proxy"
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, backend)


def _traceparent(span: "Span") -> str:
    found = span.get_span_context()
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"
