"""Export of a process's spans to a collector, by the SDK of OpenTelemetry.

The module needs the packages of the extra `tracing`, so it is imported only if traces are
configured.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from threading import Thread

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from kvrs import __version__
from kvrs.process.large_work import short_turns
from kvrs.tracing.settings import TraceSettings

log = logging.getLogger(__name__)

_FLUSH_TIMEOUT_S = 2.0
_POLL_S = 0.01


class _Exporter(OTLPSpanExporter):
    """Encodes batches in a thread beside the event loop, because a batch takes tens of
    milliseconds.
    """

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with short_turns():
            return super().export(spans)


class SpanSender:
    """Sends the spans of `tracer` in batches, from a thread of the SDK."""

    def __init__(self, settings: TraceSettings, service: str, instance: str) -> None:
        own = {
            "service.name": service,
            "service.version": __version__,
            "service.instance.id": instance,
        }
        # Attributes from environment variables come last, and so replace those of the process.
        resource = Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())
        # Only `close` sends the last batch: the process's exit does not wait for it.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = _Exporter(timeout=settings.timeout_s)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=settings.max_spans,
                schedule_delay_millis=settings.delay_ms,
                max_export_batch_size=settings.batch_spans,
            )
        )
        self.tracer = self._provider.get_tracer("kvrs", __version__)

    async def close(self) -> None:
        """Send the remaining spans, for at most two seconds."""
        # The SDK waits for up to 30 s, here in a thread that does not delay the process's exit.
        ending = Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        until_s = time.monotonic() + _FLUSH_TIMEOUT_S
        while ending.is_alive() and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
        if ending.is_alive():
            # Stop retries. The library has no annotation.
            self._exporter.shutdown()  # type: ignore[no-untyped-call]
            log.warning("spans dropped", extra={"cause": "the collector has not taken the last"})
