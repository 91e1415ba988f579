"""Traces: what a request, its calls and its recoveries become at a collector."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId, StreamId
from kvrs.proxy.server import Proxy
from kvrs.proxy.streams.spans import RequestTracer
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import COMPLETIONS, RequestContext, read
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.server import serve_http
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Fault
from tests.agent.agents import SECRET
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


@asynccontextmanager
async def engines(directory: Path) -> AsyncIterator[Proxy]:
    """A proxy and two embedded engines, ready; all have ended when the block is left."""
    write_tiny_model(directory / "tiny", seed=0)
    ports = iter(free_ports(4))
    names = {"p0": "prefill", "d0": "decode"}
    instances = [
        {"id": name, "role": role, "port": next(ports), "page_port": next(ports)}
        for name, role in names.items()
    ]
    config = parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0, "load_interval_s": 0.05, "self_test": False},
            "cluster": {
                "model": str(directory / "tiny"),
                "nodes": [{"id": "n0", "instances": instances}],
                "engine": {"max_model_len": 128},
            },
        }
    )
    async with AsyncExitStack() as stack:
        for name in names:
            engine = EngineInstance(config, InstanceId(name), 1, SECRET)
            await stack.enter_async_context(serve_http(engine, allow_faults=False))
        proxy = Proxy(config, SECRET)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        async with asyncio.timeout(180), aiohttp.ClientSession() as http:
            while True:
                async with http.get(f"http://127.0.0.1:{proxy.port}/readyz") as answer:
                    if answer.status == 200:
                        break
                await asyncio.sleep(0.02)
        yield proxy


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
    system = await build(policy={"recovery": {"max_attempts": 2, "retry_pause_s": 0.001}})
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


async def test_an_embedded_engine_shows_what_a_call_went_through(
    collector: Collector, tmp_path: Path
) -> None:
    """One trace from the client to the engines: pages are fetched from prefill, and decode of the
    run ends with the call.
    """
    async with engines(tmp_path) as proxy:
        body = REQUEST | {"model": None, "prompt": [*range(5, 45)], "stream": True}
        url = f"http://127.0.0.1:{proxy.port}/v1/completions"
        async with aiohttp.ClientSession() as http:
            for sampled in ("01", "00"):
                given = {"traceparent": f"00-{TRACE}-{SPAN}-{sampled}"}
                async with http.post(url, json=body, headers=given) as answer:
                    assert (await answer.read()).endswith(b"data: [DONE]\n\n")

    def below(parent: Span) -> dict[str, Span]:
        own = [span for span in collector.spans if span.parent_span_id == parent.span_id]
        assert {span.trace_id.hex() for span in own} == {TRACE}
        assert len({span.name for span in own}) == len(own)
        return {span.name: span for span in own}

    (request,) = collector.named("text_completion")
    calls = below(request)
    assert calls.keys() == {"prefill p0", "decode d0"}
    for name, call in calls.items():
        ((run_name, run),) = below(call).items()
        assert (run_name, run.kind) == (f"run {name[-2:]}", Span.SPAN_KIND_SERVER)
        assert call.start_time_unix_nano <= run.start_time_unix_nano
        parts = below(run)
        for part in parts.values():
            assert run.start_time_unix_nano <= part.start_time_unix_nano
            assert part.start_time_unix_nano <= part.end_time_unix_nano <= run.end_time_unix_nano
        if name == "prefill p0":
            assert parts.keys() == {"queue", "prefill"}
            continue
        assert parts.keys() == {"queue", "fetch", "prefill", "decode"}
        assert parts["queue"].end_time_unix_nano == parts["fetch"].start_time_unix_nano
        assert parts["prefill"].end_time_unix_nano == parts["decode"].start_time_unix_nano
        assert parts["fetch"].end_time_unix_nano <= parts["prefill"].start_time_unix_nano
        facts = facts_of(run)
        assert (facts["kvrs.attempt"], facts["kvrs.history_tokens"]) == (1, 40)
        assert facts["gen_ai.usage.output_tokens"] == 6
        (event,) = run.events
        assert event.name == "first_token"


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
