"""Spans of the embedded engine's runs, below those of the calls that asked for them: the wait in
the queue, the fetch of pages, prefill and decode of one attempt each.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager

from kvrs.engine.requests import GenerationRun, RunTimes
from kvrs.ids import InstanceId
from kvrs.tracing.context import TRACEPARENT, Parent, new_span_id, parent_of
from kvrs.tracing.otlp import Span, SpanKind, Value
from kvrs.tracing.sender import SpanSender
from kvrs.tracing.settings import Sampler, trace_settings

_NS = 1_000_000_000
_SERVICE = "kvrs-engine"


class RunTracer:
    """Begins the spans of one instance's runs. `clock` is the engine's."""

    def __init__(
        self,
        instance: InstanceId,
        sampler: Sampler,
        ended: Callable[[Span], None],
        clock: Callable[[], float],
    ) -> None:
        self.instance = instance
        self.ended = ended
        self.clock = clock
        self._sampler = sampler

    def begin(self, headers: Mapping[str, str]) -> "RunTrace | None":
        """None: the call belongs to no trace that is taken."""
        parent = parent_of(headers.get(TRACEPARENT, ""))
        if parent is None or not self._sampler.takes(int(parent.trace_id, 16), parent.is_taken):
            return None
        return RunTrace(self, parent)


class RunTrace:
    """The spans of one run, which are made when it has ended."""

    __slots__ = ("_begun_s", "_parent", "_tracer", "times")

    def __init__(self, tracer: RunTracer, parent: Parent) -> None:
        self.times = RunTimes()
        self._tracer = tracer
        self._parent = parent
        self._begun_s = tracer.clock()

    def end(self, run: GenerationRun, error: str | None) -> None:
        """`error`: why it has no whole output."""
        tracer, (trace_id, caller_id, _), sequence = self._tracer, self._parent, run.sequence
        now_s, now_ns, own_id = tracer.clock(), time.time_ns(), new_span_id()

        def at_ns(when_s: float) -> int:
            return now_ns - round((now_s - when_s) * _NS)

        facts: dict[str, Value] = {
            "kvrs.instance": tracer.instance,
            "kvrs.stream": sequence.stream,
            "kvrs.attempt": sequence.attempt[1],
            "kvrs.history_tokens": sequence.history_tokens,
            "kvrs.cached_tokens": sequence.cached_tokens or 0,
            "gen_ai.usage.input_tokens": sequence.prompt_tokens,
            "gen_ai.usage.output_tokens": len(sequence.token_ids) - sequence.history_tokens,
        }
        for name, begun_s, ended_s in self._parts(now_s):
            times_ns = at_ns(begun_s), at_ns(ended_s)
            part = Span(trace_id, new_span_id(), own_id, name, SpanKind.INTERNAL, *times_ns, {})
            tracer.ended(part)
        first_s, name = self.times.first_s, f"run {tracer.instance}"
        whole = Span(
            trace_id,
            own_id,
            caller_id,
            name,
            SpanKind.SERVER,
            at_ns(self._begun_s),
            now_ns,
            facts,
            first_token_ns=at_ns(first_s) if first_s else 0,
            error=error,
            is_remote=True,
        )
        tracer.ended(whole)

    def _parts(self, now_s: float) -> Iterator[tuple[str, float, float]]:
        """Name, beginning and end of what the run went through, as far as it came."""
        times = self.times
        begun = [when_s for when_s in (times.fetch_s, times.computed_s) if when_s]
        yield "queue", self._begun_s, min(begun, default=now_s)
        if times.fetch_s:
            yield "fetch", times.fetch_s, times.fetched_s or now_s
        if times.computed_s:
            yield "prefill", times.computed_s, times.first_s or now_s
        if times.first_s:
            yield "decode", times.first_s, now_s


@asynccontextmanager
async def tracing(
    instance: InstanceId, clock: Callable[[], float]
) -> AsyncIterator[RunTracer | None]:
    """The tracer of an instance. It sends spans until the block is left; None: no traces are asked
    for.

    Raises:
        ConfigError: what the environment asks for traces cannot be done.
    """
    settings = trace_settings(os.environ, _SERVICE, instance)
    if settings is None:
        yield None
        return
    sender = SpanSender(settings)
    sending = asyncio.create_task(sender.run())
    try:
        yield RunTracer(instance, settings.sampler, sender.add, clock)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await sender.close()
