"""Spans on their way to a collector that refuses, is away, or is too slow."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvrs.errors import ConfigError
from kvrs.tracing import sender
from kvrs.tracing.otlp import Span, SpanKind
from kvrs.tracing.sender import SpanSender
from kvrs.tracing.settings import TraceSettings, trace_settings
from tests.tracing.collector import collecting

pytestmark = pytest.mark.network


def span(number: int) -> Span:
    return Span("1" * 32, f"{number:016x}", "", f"span {number}", SpanKind.SERVER, 1, 2, {})


def settings(url: str, **changes: Any) -> TraceSettings:
    found = trace_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": url}, "kvrs-proxy", "proxy-0")
    assert found is not None
    return replace(found, **changes)


@asynccontextmanager
async def sending(given: TraceSettings) -> AsyncIterator[SpanSender]:
    sent = SpanSender(given)
    task = asyncio.create_task(sent.run())
    try:
        yield sent
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await sent.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.01)


def dropped(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [
        (vars(record)["count"], vars(record)["cause"])
        for record in caplog.records
        if record.message == "spans dropped"
    ]


async def test_a_full_batch_is_sent_at_once_and_the_rest_by_time() -> None:
    """Each span once, in the order in which they ended."""
    async with (
        collecting() as collector,
        sending(settings(collector.url, batch_spans=40, delay_s=3600.0)) as sent,
    ):
        for number in range(50):
            sent.add(span(number))
        await until(lambda: len(collector.spans) == 40)
        await sent.close()

        assert [each.name for each in collector.spans] == [f"span {each}" for each in range(50)]
        assert [len(each.resource_spans[0].scope_spans[0].spans) for each in collector.taken] == [
            40,
            10,
        ]

    async with (
        collecting() as collector,
        sending(settings(collector.url, delay_s=0.05, is_packed=True, headers={"k": "v"})) as sent,
    ):
        sent.add(span(7))
        await until(lambda: bool(collector.spans))
        (headers,) = collector.headers
        assert (headers["k"], headers["Content-Encoding"]) == ("v", "gzip")


async def test_a_collector_that_is_busy_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And one that refuses is not: it would refuse the same again."""
    monkeypatch.setattr(sender, "_PAUSE_S", 0.01)
    async with (
        collecting(503, 429) as collector,
        sending(settings(collector.url, delay_s=0.05)) as sent,
    ):
        sent.add(span(1))
        await until(lambda: bool(collector.spans))
        assert dropped(caplog) == []

        collector.statuses.append(400)
        sent.add(span(2))
        await until(lambda: bool(dropped(caplog)))
        sent.add(span(3))
        await until(lambda: len(collector.spans) == 2)

    assert [each.name for each in collector.spans] == ["span 1", "span 3"]
    assert dropped(caplog) == [(1, "HTTP 400")]


async def test_spans_beyond_what_may_wait_are_dropped_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A collector that is away costs a bounded amount of memory, and no stream."""
    caplog.set_level(logging.WARNING)
    with socket.socket() as taken:  # Nothing listens there.
        taken.bind(("127.0.0.1", 0))
        url = "http://{}:{}".format(*taken.getsockname())
        given = settings(url, batch_spans=4, most_spans=6, timeout_s=0.05, delay_s=3600.0)
        sent = SpanSender(given)
        for number in range(9):
            sent.add(span(number))

        await sent.close()

    away, more, rest = dropped(caplog)
    assert (away[0], more[0]) == (4, 2)
    assert rest == (3, "too many wait to be sent")


async def test_a_certificate_that_is_not_there_is_found_at_the_start() -> None:
    """Not with the first span."""
    with pytest.raises(ConfigError, match=r"CERTIFICATE.*nowhere\.pem"):
        SpanSender(settings("https://127.0.0.1:1", ca_file="nowhere.pem"))
