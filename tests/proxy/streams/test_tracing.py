"""Traces: what a request, its calls and its recoveries become in OpenTelemetry."""

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvrs.errors import ConfigError
from kvrs.proxy import server
from kvrs.proxy.streams.tracing import Tracing, open_tracing
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.proxy_cluster import ProxyCluster
from tests.proxy.scripted import Fault

pytestmark = pytest.mark.network

TRACE, SPAN = "ab" * 16, "cd" * 8
REQUEST = {"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0.5, "seed": 1}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Of every proxy that the test starts."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(server, "open_tracing", lambda *_: Tracing(provider, "embedded"))
    return exporter


async def asked(system: ProxyCluster, **fields: Any) -> int:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    url = f"{system.url}/v1/completions"
    async with system.http.post(url, json=REQUEST | fields, headers=headers) as answer:
        await answer.read()
        return answer.status


def named(spans: Sequence[ReadableSpan], beginning: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name.startswith(beginning)]


@pytest.mark.parametrize("stream", [True, False])
async def test_one_trace_has_request_calls_and_recovery(
    build: ProxyClusterBuilder, exporter: InMemorySpanExporter, stream: bool
) -> None:
    """It is the client's, and that of the engines, whose calls are children of the proxy's."""
    system = await build()
    system.script.faults[2] = Fault.RESET

    assert await asked(system, stream=stream) == 200

    await asyncio.sleep(0)
    spans = exporter.get_finished_spans()
    assert all(span.context and f"{span.context.trace_id:032x}" == TRACE for span in spans)
    (request,) = named(spans, "text_completion scripted")
    assert request.context is not None
    assert request.parent is not None
    assert f"{request.parent.span_id:016x}" == SPAN
    facts = dict(request.attributes or {})
    assert facts["gen_ai.operation.name"] == "text_completion"
    assert facts["gen_ai.request.max_tokens"] == 6
    assert facts["gen_ai.request.temperature"] == 0.5
    assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (3, 6)
    assert facts["gen_ai.response.finish_reasons"] == ("length",)
    assert (facts["http.route"], facts["http.response.status_code"]) == ("/v1/completions", 200)
    assert request.status.status_code is StatusCode.UNSET
    others = [span for span in spans if span is not request]
    assert {span.parent.span_id for span in others if span.parent} == {request.context.span_id}
    prefills, decodes = named(spans, "prefill p"), named(spans, "decode d")
    assert len(prefills) >= 1
    failed, resumed = decodes
    assert (failed.status.status_code, resumed.status.status_code) == (
        StatusCode.ERROR,
        StatusCode.UNSET,
    )
    assert [event.name for event in resumed.events] == ["first_token"]
    (recovery,) = named(spans, "recovery ")
    assert (recovery.attributes or {})["kvrs.recovery.outcome"] == "resumed"
    sent = [
        headers["traceparent"].split("-")[2]
        for instance in system.instances.values()
        for headers in instance.headers
        if "traceparent" in headers
    ]
    calls = [span.context.span_id for span in (*prefills, *decodes) if span.context]
    assert sorted(sent) == sorted(f"{span_id:016x}" for span_id in calls)


async def test_a_request_that_fails_is_an_error(
    build: ProxyClusterBuilder, exporter: InMemorySpanExporter
) -> None:
    """A refusal is the client's, and no error of the proxy's; it has no stream."""
    system = await build()
    for instance in system.instances.values():
        instance.refusal = (500, b"{}")

    refused = await asked(system, n=99)
    status = await asked(system)

    requests = [span for span in exporter.get_finished_spans() if span.kind.name == "SERVER"]
    assert [(span.attributes or {})["http.response.status_code"] for span in requests] == [
        refused,
        status,
    ]
    assert [span.status.status_code for span in requests] == [StatusCode.UNSET, StatusCode.ERROR]


async def test_spans_reach_a_collector_that_the_environment_names(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OTLP, at the latest when the proxy ends."""
    bodies: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{host}:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    try:
        system = await build(pairs=1)
        assert await asked(system) == 200
        await system.proxy.close()
    finally:
        await runner.cleanup()

    found = [ExportTraceServiceRequest.FromString(body) for body in bodies]
    resources = [each.resource for one in found for each in one.resource_spans]
    names = {pair.key: pair.value.string_value for one in resources for pair in one.attributes}
    spans = [
        span.name
        for one in found
        for each in one.resource_spans
        for scope in each.scope_spans
        for span in scope.spans
    ]
    assert names["service.name"] == "kvrs-proxy"
    assert sorted(spans) == ["decode d0", "prefill p0", "text_completion scripted"]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_a_collector_there_are_no_traces(environ: dict[str, str]) -> None:
    """As OpenTelemetry's variables say it."""
    assert open_tracing(environ, "proxy", "embedded") is None


def test_another_protocol_is_refused_by_name() -> None:
    """Spans that go nowhere would be missed later."""
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}

    with pytest.raises(ConfigError, match="grpc; allowed: otlp over http/protobuf"):
        open_tracing(environ, "proxy", "embedded")


@pytest.mark.process
def test_nothing_is_imported_for_traces_that_are_off() -> None:
    """The proxy runs without the extra."""
    code = "import sys, kvrs.proxy.server; print(any('opentelemetry' in m for m in sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
