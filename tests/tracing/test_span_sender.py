"""Spans on their way to a collector that refuses, is away, or is too slow."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from opentelemetry.sdk.trace import Tracer

from kvrs.tracing import sending
from kvrs.tracing.sending import SpanSender
from kvrs.tracing.settings import trace_settings
from tests.tracing.collector import collecting

pytestmark = pytest.mark.network

Sending = Callable[..., AbstractAsyncContextManager[SpanSender]]


@pytest.fixture
def send(monkeypatch: pytest.MonkeyPatch) -> Sending:
    """A sender with these variables after `OTEL_`, closed when the block is left."""

    @asynccontextmanager
    async def opened(url: str, **environ: str) -> AsyncIterator[SpanSender]:
        given = {"EXPORTER_OTLP_ENDPOINT": url, "BSP_SCHEDULE_DELAY": "50"} | environ
        variables = {f"OTEL_{name}": value for name, value in given.items()}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        settings = trace_settings(variables)
        assert settings is not None
        sender = SpanSender(settings, "kvrs-proxy", "proxy-0")
        try:
            yield sender
        finally:
            await sender.close()

    return opened


def add(sender: SpanSender, number: int) -> None:
    sender.tracer.start_span(f"span {number}").end()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_a_full_batch_is_sent_at_once_and_the_rest_at_the_end(send: Sending) -> None:
    """Each span once, in the order in which they ended."""
    sizes = {"BSP_MAX_EXPORT_BATCH_SIZE": "40", "BSP_SCHEDULE_DELAY": "3600000"}
    async with collecting() as collector:
        async with send(collector.url, **sizes) as sender:
            for number in range(50):
                add(sender, number)
            await until(lambda: len(collector.spans) == 40)

        assert [each.name for each in collector.spans] == [f"span {each}" for each in range(50)]
        sent = [len(each.resource_spans[0].scope_spans[0].spans) for each in collector.taken]
        assert sent == [40, 10]


async def test_a_batch_is_sent_by_time_as_the_variables_say(send: Sending) -> None:
    given = {
        "EXPORTER_OTLP_HEADERS": "a=b",
        "EXPORTER_OTLP_TRACES_HEADERS": "api-key=x%20y",
        "EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    async with collecting() as collector, send(collector.url, **given) as sender:
        add(sender, 7)
        await until(lambda: bool(collector.spans))

        (headers,) = collector.headers
        assert (headers["api-key"], headers["Content-Encoding"]) == ("x y", "gzip")
        assert "a" not in headers


async def test_an_address_for_traces_is_the_whole_one(send: Sending) -> None:
    async with collecting() as collector:
        own = {"EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/own/path"}
        async with send("http://nowhere.invalid", **own) as sender:
            add(sender, 1)
        assert [each.name for each in collector.spans] == ["span 1"]


async def test_a_collector_that_is_busy_is_asked_again(
    send: Sending, caplog: pytest.LogCaptureFixture
) -> None:
    """And one that refuses is not: it would refuse the same again."""
    async with collecting(503, 429) as collector, send(collector.url) as sender:
        add(sender, 1)
        await until(lambda: bool(collector.spans))
        assert "Failed to export" not in caplog.text

        collector.statuses.append(400)
        add(sender, 2)
        await until(lambda: "Failed to export spans batch code: 400" in caplog.text)
        add(sender, 3)
        await until(lambda: len(collector.spans) == 2)

        assert [each.name for each in collector.spans] == ["span 1", "span 3"]


async def test_spans_beyond_what_may_wait_are_dropped(
    send: Sending, caplog: pytest.LogCaptureFixture
) -> None:
    """A collector that is slow costs a bounded amount of memory, and no stream: at most one batch
    is on its way, and the queue holds the newest spans.
    """
    sizes = {"BSP_MAX_EXPORT_BATCH_SIZE": "4", "BSP_MAX_QUEUE_SIZE": "6"}
    async with collecting() as collector:
        async with send(collector.url, **sizes) as sender:
            for number in range(100):  # Without an `await` the collector answers none.
                add(sender, number)
        names = [each.name for each in collector.spans]

    assert 6 <= len(names) <= 10
    assert names[-6:] == [f"span {number}" for number in range(94, 100)]
    assert "Queue full, dropping Span." in caplog.text


async def test_the_end_waits_a_moment_for_a_collector_that_does_not_answer(
    send: Sending, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the event loop serves on."""
    monkeypatch.setattr(sending, "_FLUSH_TIMEOUT_S", 0.2)
    turns = 0

    async def serve() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = "http://{}:{}".format(*silent.getsockname())
        async with send(url, EXPORTER_OTLP_TIMEOUT="60000") as sender:
            add(sender, 1)
            serving, turns_before = asyncio.create_task(serve()), turns
            async with asyncio.timeout(30):
                await sender.close()
            serving.cancel()
    await until(lambda: not [each for each in threading.enumerate() if "Otel" in each.name])

    assert turns - turns_before > 10
    assert "spans dropped" in caplog.text


@pytest.mark.parametrize(
    ("name", "argument", "sampler"),
    [
        ("", "", "ParentBased{root:AlwaysOnSampler"),
        ("always_on", "", "AlwaysOnSampler"),
        ("always_off", "", "AlwaysOffSampler"),
        ("traceidratio", "0.25", "TraceIdRatioBased{0.25}"),
        ("parentbased_traceidratio", "0.25", "ParentBased{root:TraceIdRatioBased{0.25}"),
        ("parentbased_always_off", "0.25", "ParentBased{root:AlwaysOffSampler"),
    ],
)
async def test_samplers_have_the_names_of_the_specification(
    send: Sending, name: str, argument: str, sampler: str
) -> None:
    """The ratio is of those that have one."""
    given = {"TRACES_SAMPLER": name, "TRACES_SAMPLER_ARG": argument}
    async with send("http://127.0.0.1:1", **given) as sender:
        assert isinstance(sender.tracer, Tracer)
        assert sender.tracer.sampler.get_description().startswith(sampler)
