"""Spans of the embedded engine's runs, below those of the calls that asked for them: the wait in
the queue, the fetch of pages, prefill and decode of one attempt each.

Imported only where traces are asked for: OpenTelemetry is in the extra `tracing`.
"""

import time
from collections.abc import Callable, Iterator, Mapping

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrs.ids import InstanceId
from kvrs.tracing.sending import SpanSender
from kvrs_engine.engine.hooks import Batch, StepHook
from kvrs_engine.engine.requests import GenerationRun, RunTimes
from kvrs_engine.scheduling.sequences import Sequence

_NS = 1_000_000_000
_extract = TraceContextTextMapPropagator().extract


class RunTracer(StepHook):
    """Begins the spans of one instance's runs, and notes when their parts begin. `clock` is the
    engine's.
    """

    def __init__(
        self, sender: SpanSender, instance: InstanceId, clock: Callable[[], float]
    ) -> None:
        self.tracer = sender.tracer
        self.close = sender.close
        self.instance = instance
        self.clock = clock
        self._times: dict[Sequence, RunTimes] = {}  # Of runs before their first token.

    def began(self, run: GenerationRun) -> None:
        if not run.times.first_s:
            self._times[run.sequence] = run.times

    def before_batch(self, batch: Batch) -> None:
        for sequence, _ in batch if self._times else ():
            times = self._times.get(sequence)
            if times is not None and not times.computed_s:
                times.computed_s = self.clock()

    async def after_logits(self, batch: Batch, took_s: float) -> None:
        for sequence, chunk in batch if self._times else ():
            if chunk.logits and (times := self._times.pop(sequence, None)) is not None:
                times.first_s = self.clock()

    def ended(self, run: GenerationRun) -> None:
        self._times.pop(run.sequence, None)

    def begin(self, headers: Mapping[str, str]) -> "RunTrace | None":
        """None: the call belongs to no trace that is taken."""
        above = _extract(headers)
        if not trace.get_current_span(above).get_span_context().is_valid:
            return None
        span = self.tracer.start_span(f"run {self.instance}", above, SpanKind.SERVER)
        return RunTrace(self, span) if span.is_recording() else None


class RunTrace:
    """The spans of one run; those within it are made when it has ended."""

    __slots__ = ("_begun_ns", "_begun_s", "_span", "_tracer")

    def __init__(self, tracer: RunTracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._begun_s = tracer.clock()
        self._begun_ns = time.time_ns()

    def end(self, run: GenerationRun, error: str | None) -> None:
        """`error`: why it has no whole output."""
        tracer, span, sequence = self._tracer, self._span, run.sequence
        below, now_s = trace.set_span_in_context(span), tracer.clock()
        for name, begun_s, ended_s in self._parts(run.times, now_s):
            part = tracer.tracer.start_span(name, below, start_time=self._at_ns(begun_s))
            part.end(self._at_ns(ended_s))
        span.set_attributes(
            {
                "kvrs.instance": tracer.instance,
                "kvrs.stream": sequence.stream,
                "kvrs.attempt": sequence.attempt[1],
                "kvrs.history_tokens": sequence.history_tokens,
                "kvrs.cached_tokens": sequence.cached_tokens or 0,
                "gen_ai.usage.input_tokens": sequence.prompt_tokens,
                "gen_ai.usage.output_tokens": len(sequence.token_ids) - sequence.history_tokens,
            }
        )
        if run.times.first_s:
            span.add_event("first_token", timestamp=self._at_ns(run.times.first_s))
        if error is not None:
            span.set_status(StatusCode.ERROR, error)
        span.end(self._at_ns(now_s))

    def _at_ns(self, when_s: float) -> int:
        return self._begun_ns + round((when_s - self._begun_s) * _NS)

    def _parts(self, times: RunTimes, now_s: float) -> Iterator[tuple[str, float, float]]:
        """Name, beginning and end of what the run went through, as far as it came."""
        begun = [when_s for when_s in (times.fetch_s, times.computed_s) if when_s]
        yield "queue", self._begun_s, min(begun, default=now_s)
        if times.fetch_s:
            yield "fetch", times.fetch_s, times.fetched_s or now_s
        if times.computed_s:
            yield "prefill", times.computed_s, times.first_s or now_s
        if times.first_s:
            yield "decode", times.first_s, now_s
