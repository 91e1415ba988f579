"""The load client against a server that misbehaves on purpose, over real sockets."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kvrs_lab.load.open_loop import Dialect, Progress, replay
from kvrs_lab.report import metrics
from kvrs_lab.report.report import build_report
from kvrs_lab.report.table import late_sentence
from kvrs_lab.traces.records import ErrorKind, ReplayRequest, StreamRecord

pytestmark = pytest.mark.network

Script = Callable[[dict[str, Any], web.StreamResponse], Awaitable[None]]


def event(*token_ids: int, text: str = "", finish: str | None = None, stream: str = "s1") -> bytes:
    choice = {"text": text, "index": 0, "finish_reason": finish, "token_ids": list(token_ids)}
    return b"data: " + json.dumps({"id": f"cmpl-{stream}", "choices": [choice]}).encode() + b"\n\n"


USAGE = (
    b"data: "
    b'{"id":"cmpl-s1","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}}\n\n'
)
DONE = b"data: [DONE]\n\n"
REQUEST = ReplayRequest(0.0, (7, 8), max_tokens=3)


class Cut(Exception):  # noqa: N818 - it is no error, it is what the script wants done.
    """Raised by a script to have its connection reset."""


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    async def complete(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await script(await request.json(), response)
        except Cut:
            assert request.transport is not None
            request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def one(*parts: bytes) -> StreamRecord:
    async def script(body: dict[str, Any], response: web.StreamResponse) -> None:
        for part in parts:
            await response.write(part)

    async with serving(script) as url:
        [record] = await replay(url, [REQUEST])
    return record


def kind(record: StreamRecord) -> ErrorKind | None:
    return record.error.kind if record.error else None


async def test_a_whole_stream_is_recorded_token_by_token() -> None:
    """Ids, text, times, end, the server's own stream id and its usage."""
    record = await one(
        event(1, text="a"), event(2, 3, text="bc"), event(finish="length"), USAGE, DONE
    )

    assert record.completed
    assert (record.token_ids, record.text, record.finish_reason) == ([1, 2, 3], "abc", "length")
    assert (record.stream, record.status, record.usage_tokens) == ("s1", 200, 3)
    assert len(record.token_times_s) == 3
    assert record.token_times_s[1] == record.token_times_s[2]
    assert record.sent_s <= record.token_times_s[0] <= record.token_times_s[1] <= record.ended_s


async def test_events_may_be_cut_anywhere() -> None:
    """TCP knows nothing of events, nor of characters."""
    whole = event(1, text="né") + event(2, finish="stop") + DONE

    record = await one(*(whole[i : i + 1] for i in range(len(whole))))

    assert (record.completed, record.token_ids, record.text) == (True, [1, 2], "né")


@pytest.mark.parametrize(
    "parts",
    [
        (event(1), event(2)),
        (event(1), event(2, finish="length")),
        (event(1), DONE),
        (),
        (event(1, finish="length"), b"data: [DON"),
    ],
)
async def test_a_stream_that_merely_ends_is_truncated(parts: tuple[bytes, ...]) -> None:
    """Complete means a finish reason and the terminal event; what came is kept."""
    record = await one(*parts)

    assert kind(record) is ErrorKind.TRUNCATED
    assert not record.completed
    assert record.token_ids == [1, 2][: len(record.token_ids)]


async def test_an_error_event_is_an_error_with_its_message() -> None:
    """The terminal event after it does not heal it."""
    record = await one(
        event(1), b'data: {"error":{"message":"no instance left","type":"server_error"}}\n\n', DONE
    )

    assert (kind(record), record.error and record.error.message) == (
        ErrorKind.EVENT,
        "no instance left",
    )
    assert record.token_ids == [1]


async def test_nonsense_and_a_changed_stream_id_break_the_protocol() -> None:
    """A continued stream has to keep its chunk ids."""
    assert kind(await one(event(1), b"data: {nonsense}\n\n", DONE)) is ErrorKind.PROTOCOL
    assert (
        kind(await one(event(1), event(2, finish="length", stream="s2"), DONE))
        is ErrorKind.PROTOCOL
    )


async def test_a_broken_connection_is_an_error_and_keeps_what_came() -> None:
    """The record of a stream is never lost."""

    async def script(body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(event(1))
        await asyncio.sleep(0.05)
        raise Cut

    async with serving(script) as url:
        [record] = await replay(url, [REQUEST])

    assert kind(record) in (ErrorKind.TRUNCATED, ErrorKind.RESET)
    assert record.token_ids == [1]


async def test_a_port_without_a_listener_is_an_error_of_every_request() -> None:
    """There are always as many records as requests."""
    async with serving(lambda body, response: asyncio.sleep(0)) as url:
        pass

    records = await replay(url, [REQUEST] * 3)

    assert [kind(record) for record in records] == [ErrorKind.CONNECT] * 3


async def test_a_refusal_is_recorded_with_status_and_message() -> None:
    """OpenAI-style bodies are read, others are quoted."""
    app = web.Application()

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no instance"}}, status=503)

    app.router.add_post("/v1/completions", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    [refused] = await replay(f"http://127.0.0.1:{runner.addresses[0][1]}", [REQUEST])
    [unknown] = await replay(f"http://127.0.0.1:{runner.addresses[0][1]}/nowhere", [REQUEST])
    await runner.cleanup()

    assert (kind(refused), refused.status, refused.error and refused.error.message) == (
        ErrorKind.HTTP,
        503,
        "no instance",
    )
    assert (kind(unknown), unknown.status) == (ErrorKind.HTTP, 404)


async def test_a_stream_that_never_ends_is_given_up() -> None:
    """A run ends even when the server does not."""

    async def script(body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(event(1))
        await asyncio.sleep(30)

    async with serving(script) as url:
        [record] = await replay(url, [REQUEST], timeout_s=2.0)

    assert (kind(record), record.token_ids) == (ErrorKind.TIMEOUT, [1])


async def test_a_slow_server_does_not_hold_back_later_requests() -> None:
    """Open loop: nothing is answered before the last request was sent, and yet all are sent."""
    everyone = asyncio.Event()
    arrived: list[int] = []

    async def script(body: dict[str, Any], response: web.StreamResponse) -> None:
        arrived.append(body["prompt"][0])
        if len(arrived) == 5:
            everyone.set()
        await everyone.wait()
        await response.write(event(1, finish="length") + DONE)

    requests = [ReplayRequest(0.1 * i, (i,), 1) for i in (4, 2, 0, 3, 1)]
    async with serving(script) as url:
        records = await replay(url, requests, timeout_s=60)

    assert all(record.completed for record in records)
    assert arrived == [0, 1, 2, 3, 4]
    assert [record.due_s for record in records] == [request.arrival_s for request in requests]
    assert all(record.lag_s >= 0 for record in records)


async def test_the_request_asks_for_what_the_oracle_needs() -> None:
    """Token ids, no early end, greedy unless the request says otherwise."""
    bodies: list[dict[str, Any]] = []

    async def script(body: dict[str, Any], response: web.StreamResponse) -> None:
        bodies.append(body)
        await response.write(event(1, finish="length") + DONE)

    async with serving(script) as url:
        await replay(url, [REQUEST], dialect=Dialect(model="m"))
        await replay(url, [ReplayRequest(0.0, (1,), 2, temperature=0.5, seed=3)])

    common = {
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    assert bodies == [
        {"model": "m", "prompt": [7, 8], "max_tokens": 3, "temperature": 0.0, **common},
        {"prompt": [1], "max_tokens": 2, "temperature": 0.5, "seed": 3, **common},
    ]


async def test_progress_counts_sends_ends_and_failures() -> None:
    """The last call has everything."""
    seen: list[tuple[int, int, int]] = []

    def note(progress: Progress) -> None:
        seen.append((progress.sent, progress.ended, progress.failed))

    async def script(body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(
            event(1) if body["prompt"] == [1] else event(1, finish="length") + DONE
        )

    async with serving(script) as url:
        await replay(url, [ReplayRequest(0.0, (1,), 1), ReplayRequest(0.0, (2,), 1)], note)

    assert len(seen) == 4
    assert seen[-1] == (2, 2, 1)


async def test_a_plain_dialect_asks_only_for_what_every_server_knows() -> None:
    """Unknown fields are refused by some; then events with text count as tokens, unless the
    server's usage says better.
    """
    bodies: list[dict[str, Any]] = []

    async def script(body: dict[str, Any], response: web.StreamResponse) -> None:
        bodies.append(body)
        for text in ("a", "b", ""):
            part = {
                "id": "cmpl-s1",
                "choices": [{"text": text, "finish_reason": None if text else "stop"}],
            }
            await response.write(b"data: " + json.dumps(part).encode() + b"\n\n")
        await response.write(USAGE + DONE)

    async with serving(script) as url:
        [record] = await replay(f"{url}/v1", [REQUEST], dialect=Dialect(plain=True))

    options = {
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert bodies == [{"prompt": [7, 8], **options}]
    assert (
        record.completed,
        record.text,
        record.token_ids,
        len(record.token_times_s),
        record.tokens,
    ) == (True, "ab", [], 2, 3)


async def test_a_key_is_sent_as_a_bearer_token() -> None:
    """OpenAI's own clients do the same."""
    seen: list[str | None] = []

    async def complete(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        return web.Response(status=401)

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await replay(
        f"http://127.0.0.1:{runner.addresses[0][1]}", [REQUEST], dialect=Dialect(api_key="k")
    )
    await runner.cleanup()

    assert seen == ["Bearer k"]


async def test_a_late_client_reports_its_lag() -> None:
    """Lag is measured at the send itself, counts into TTFT from arrival, and is reported."""

    def dawdle(progress: Progress) -> None:
        if progress.sent == 1:
            time.sleep(
                0.2
            )  # What a client with too much to do does to the requests that fall due meanwhile.

    async def script(body: dict[str, Any], response: web.StreamResponse) -> None:
        await response.write(event(1, finish="length") + DONE)

    async with serving(script) as url:
        records = await replay(
            url, [ReplayRequest(0.0, (1,), 1), ReplayRequest(0.01, (2,), 1)], dawdle
        )
    late = sum(record.lag_s > 0.05 for record in records)  # On a busy machine the first one, too.
    report = build_report(records, None, [], [], {})

    assert records[1].lag_s > 0.1
    assert (metrics.arrival_ttft_s(records[1]) or 0) > 0.1 + (metrics.ttft_s(records[1]) or 0)
    assert report["runs"]["fault"]["late"] == late
    assert f"sent {late} of 2 requests more than 50 ms late" in (late_sentence(report) or "")
