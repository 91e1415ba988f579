"""Traces: what a request, its calls and its recoveries become at a collector."""

import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvrs.ids import InstanceId, StreamId
from kvrs.proxy.streams.spans import RequestTracer
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import COMPLETIONS, RequestContext, read
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Fault
from tests.proxy.conftest import ProxyClusterBuilder
from tests.tracing.collector import Collector, collecting, facts_of

pytestmark = [pytest.mark.network, pytest.mark.engine]

TRACE, SPAN = "ab" * 16, "cd" * 8
REQUEST = {"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0.5, "seed": 1}


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """A collector for every proxy that the test starts."""
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


async def asked(system: ProxyCluster, flags: str | None = "01", **fields: Any) -> int:
    headers = {} if flags is None else {"traceparent": f"00-{TRACE}-{SPAN}-{flags}"}
    url = f"{system.url}/v1/completions"
    async with system.http.post(url, json=REQUEST | fields, headers=headers) as answer:
        await answer.read()
        return answer.status


def sent(system: ProxyCluster) -> list[str]:
    """The `traceparent` of each call to an instance."""
    return [
        headers["traceparent"]
        for instance in system.instances.values()
        for headers in instance.headers
        if "traceparent" in headers
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_one_trace_has_request_calls_and_recovery(
    build: ProxyClusterBuilder, collector: Collector, stream: bool
) -> None:
    """It is the client's, and that of the engines, whose calls are children of the proxy's."""
    system = await build()
    system.script.faults[2] = Fault.RESET

    assert await asked(system, stream=stream) == 200
    calls = sent(system)
    await system.proxy.close()

    spans = collector.spans
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    (request,) = collector.named("text_completion scripted")
    assert (request.kind, request.parent_span_id.hex()) == (Span.SPAN_KIND_SERVER, SPAN)
    facts = facts_of(request)
    assert facts["gen_ai.operation.name"] == "text_completion"
    assert facts["gen_ai.request.max_tokens"] == 6
    assert facts["gen_ai.request.temperature"] == 0.5
    assert (facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.output_tokens"]) == (3, 6)
    assert facts["gen_ai.response.finish_reasons"] == ["length"]
    assert (facts["http.route"], facts["http.response.status_code"]) == ("/v1/completions", 200)
    assert request.status.code == Status.STATUS_CODE_UNSET
    others = [span for span in spans if span is not request and span.name != request.name]
    assert {span.parent_span_id for span in others} == {request.span_id}
    assert all(
        request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        for span in [*collector.named("prefill"), *collector.named("decode")]
    )
    failed, resumed = sorted(collector.named("decode d"), key=lambda span: span.end_time_unix_nano)
    assert (failed.status.code, resumed.status.code) == (
        Status.STATUS_CODE_ERROR,
        Status.STATUS_CODE_UNSET,
    )
    assert failed.status.message
    (event,) = resumed.events
    assert event.name == "first_token"
    assert resumed.start_time_unix_nano <= event.time_unix_nano <= resumed.end_time_unix_nano
    (recovery,) = collector.named("recovery ")
    assert facts_of(recovery)["kvrs.recovery.outcome"] == "resumed"
    seen = [span.span_id.hex() for span in others if span is not recovery]
    assert sorted(each.split("-")[2] for each in calls) == sorted(
        span_id for span_id in seen if span_id != recovery.span_id.hex()
    )


async def test_a_request_that_fails_is_an_error(
    build: ProxyClusterBuilder, collector: Collector
) -> None:
    """A refusal is the client's, and no error of the proxy's; it has no stream."""
    system = await build(policy={"recovery": {"max_attempts": 2}})
    for instance in system.instances.values():
        instance.refusal = (500, b"{}")

    refused = await asked(system, n=99)
    status = await asked(system)
    await system.proxy.close()

    requests = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert [facts_of(span)["http.response.status_code"] for span in requests] == [refused, status]
    assert [span.status.code for span in requests] == [
        Status.STATUS_CODE_UNSET,
        Status.STATUS_CODE_ERROR,
    ]


async def test_a_trace_that_the_client_does_not_take_is_not_taken(
    build: ProxyClusterBuilder, collector: Collector
) -> None:
    """Engines are told so; without a trace of the client's the sampler decides."""
    system = await build(pairs=1)

    assert await asked(system, flags="00") == 200
    unsampled = sent(system)
    assert await asked(system, flags=None) == 200
    await system.proxy.close()

    assert {each[-2:] for each in unsampled} == {"00"}
    assert {each.split("-")[1] for each in unsampled} == {TRACE}
    assert len(collector.spans) == 3
    assert TRACE not in {span.trace_id.hex() for span in collector.spans}
    assert {span.parent_span_id for span in collector.named("text_completion")} == {b""}


async def test_the_resource_names_the_proxy(
    build: ProxyClusterBuilder, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans of several proxies are told apart by it."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=a%20b")
    system = await build(pairs=1)

    assert await asked(system) == 200
    await system.proxy.close()

    resource = collector.resource()
    assert resource["service.name"] == "kvrs-proxy"
    assert resource["deployment.environment"] == "a b"
    assert sorted(span.name for span in collector.spans) == [
        "decode d0",
        "prefill p0",
        "text_completion scripted",
    ]


async def test_engines_are_told_of_a_trace_that_the_sampler_leaves_out(
    build: ProxyClusterBuilder, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would begin traces of their own."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    system = await build(pairs=1)

    assert [await asked(system, flags=None), await asked(system)] == [200, 200]
    told = [each.split("-") for each in sent(system)]
    await system.proxy.close()

    assert [each[3] for each in told] == ["00"] * 4
    assert len({each[1] for each in told}) == 2
    assert TRACE in {each[1] for each in told}
    assert collector.spans == []


def test_what_waits_to_be_sent_holds_no_stream() -> None:
    """Spans of 2,048 requests may wait, each of which may have megabytes."""
    context, waiting = RequestContext("id"), InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(waiting))
    journal = Journal(StreamId("s"), read(COMPLETIONS, msgspec.json.encode(REQUEST)), 0.0)
    journal.prompt_ids = [1, 2, 3]
    holders = sys.getrefcount(journal), sys.getrefcount(journal.parsed)

    sender: Any = SimpleNamespace(tracer=provider.get_tracer("kvrs"), close=None)
    RequestTracer(sender, "kvrs").begin(context, "POST")
    context.trace.opened(journal)
    with context.trace.call("decode", InstanceId("d0"), journal):
        journal.attempt += 1  # Another attempt has taken over when this one ends.
    context.trace.end("/v1/completions", 200)

    assert (sys.getrefcount(journal), sys.getrefcount(journal.parsed)) == holders
    call, request = waiting.get_finished_spans()
    assert call.parent is not None
    assert call.attributes is not None
    assert request.attributes is not None
    assert (call.parent.span_id, call.attributes["kvrs.attempt"]) == (request.context.span_id, 0)
    assert request.attributes["gen_ai.usage.input_tokens"] == 3
