"""Streams that wait, as a proxy in front of this one sees them: never silent for too long."""

import asyncio
import re

import aiohttp
import msgspec
import openai
import pytest

from kvrs.proxy.streams.open_stream import KEEP_ALIVE_S, KeepAlives
from kvrs_testkit.plays import SCENARIOS
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Cut, Fault
from kvrs_testkit.sse import events_of
from tests.proxy.conftest import ProxyClusterBuilder

COMMENT = b": keep-alive\n"
REQUEST = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}
# Its silence is not what ends a stream here.
PATIENT = {"token_gap_s": 3600.0}
STREAMED = REQUEST | {"stream": True}
RESPONSE = {"input": "play emoji.", "temperature": 0, "stream": True}


def keep_alives(system: ProxyCluster) -> KeepAlives:
    return system.proxy.parts.api.keep_alives


async def post(system: ProxyCluster) -> aiohttp.ClientResponse:
    async with asyncio.timeout(60):
        return await system.http.post(f"{system.url}/v1/completions", json=STREAMED)


async def test_a_stream_that_waits_has_its_status_line_and_comments_before_its_first_event(
    build: ProxyClusterBuilder,
) -> None:
    """At least one each `KEEP_ALIVE_S`; what follows is the stream, whole."""
    system = await build(pairs=1, proxy=PATIENT)
    undisturbed = (await system.ask(STREAMED))[1]
    system.script.gate = asyncio.Event()

    response = await post(system)
    comments = [await response.content.readuntil(b"\n") for _ in range(3)]
    system.script.gate.set()
    rest = await response.read()

    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert comments == [COMMENT] * 3
    assert _numbered(rest.replace(COMMENT, b"")) == _numbered(undisturbed)


async def test_a_stream_that_recovers_gets_comments_between_its_events(
    build: ProxyClusterBuilder,
) -> None:
    """They are whole lines between whole events, also while no instance is up."""
    recovery = {"recovery": {"wait_s": 300.0}}
    system = await build(pairs=1, proxy=PATIENT, policy=recovery)
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    response = await post(system)
    begun = [await response.content.readuntil(b"\n\n") for _ in range(2)]

    await system.instances["d0"].kill()
    while begun.count(COMMENT) < 3:
        begun.append(await response.content.readuntil(b"\n"))
    system.script.gate.set()
    await system.instances["d0"].restart()
    rest = await response.read()

    events = events_of(b"".join([*begun, rest]))
    assert begun[0].startswith(b"data: {")
    assert len([event for event in events if b'"text"' in event]) == 5
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_an_error_keeps_its_status_until_a_comment_was_sent(
    build: ProxyClusterBuilder,
) -> None:
    """Afterwards it is an event, and nothing after it."""
    quick, slow = [
        await build(pairs=1, policy={"recovery": {"wait_s": wait_s, "role_wait_s": wait_s}})
        for wait_s in (0.5, 3 * KEEP_ALIVE_S)
    ]
    for system in (quick, slow):
        await system.instances["d0"].kill()
        await system.until_health(d0="down")

    statuses = [(await system.ask(STREAMED)) for system in (quick, slow)]

    assert [status for status, _ in statuses] == [503, 200]
    assert msgspec.json.decode(statuses[0][1])["error"]["code"] == "no_instance"
    *comments, last, end, after = statuses[1][1].split(b"\n")
    assert set(comments) == {COMMENT.strip()}
    assert msgspec.json.decode(last.removeprefix(b"data: "))["error"]["code"] == "no_instance"
    assert (end, after) == (b"", b"")


async def test_only_a_stream_that_was_silent_since_the_last_look_gets_a_comment(
    build: ProxyClusterBuilder,
) -> None:
    """An event counts as a sign of life; and of a stream that has ended nothing is kept."""
    system = await build(pairs=1, proxy=PATIENT)
    system.script.gate, system.script.gate_at = asyncio.Event(), 1
    response = await post(system)
    await response.content.readuntil(b"\n\n")
    (client,) = keep_alives(system).open

    client.break_silence()  # The event came before this look.
    client.break_silence()
    client.break_silence()
    system.script.gate.set()
    rest = await response.read()

    assert rest.count(COMMENT) == 2
    assert not keep_alives(system).open
    client.break_silence()
    client.break_silence()
    assert (await (await post(system)).read()).count(COMMENT) == 0


async def test_a_client_that_does_not_read_gets_no_comments(build: ProxyClusterBuilder) -> None:
    """Bytes that wait for it are what keeps its connection open."""
    system = await build(pairs=1, proxy=PATIENT)
    system.script.event_padding = 200_000
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port, limit=1024)
    body = msgspec.json.encode(STREAMED | {"max_tokens": 60})
    fields = b"Host: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    writer.write(b"POST /v1/completions HTTP/1.1\r\n" + fields + body)
    await reader.readline()
    (client,) = keep_alives(system).open
    await system.until(lambda: _truth(client.blocked))

    for _ in range(3):
        client.break_silence()
    whole = await reader.read()
    writer.close()

    assert whole.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert COMMENT not in whole


async def test_one_timer_serves_all_streams(build: ProxyClusterBuilder) -> None:
    """It runs while streams are open."""
    system = await build(pairs=1, proxy=PATIENT)
    system.script.gate = asyncio.Event()
    responses = await asyncio.gather(*(post(system) for _ in range(5)))

    assert len(keep_alives(system).open) == 5
    system.script.gate.set()
    for response in responses:
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    await system.until(lambda: _truth(keep_alives(system)._timer is None))


async def test_the_openai_client_ignores_comments(build: ProxyClusterBuilder) -> None:
    """Before the first event, and between events of a stream that is cut meanwhile."""
    system = await build(proxy=PATIENT)
    system.script.cuts["cut"] = Cut(Fault.RESET, 6)
    system.script.gate = asyncio.Event()

    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="x", max_retries=0) as api:
        stream = await api.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "play emoji."}],
            temperature=0,
            user="cut",
            stream=True,
        )
        system.script.gate.set()  # So a comment has begun the response.
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert not system.script.cuts
    assert text == SCENARIOS["emoji"]


async def test_no_empty_line_follows_a_comment(build: ProxyClusterBuilder) -> None:
    """A decoder that dispatches an event at each empty line gets no event without data, from any of
    the streams that comments are written to.
    """
    system = await build(pairs=1, proxy=PATIENT)
    bodies = {"/v1/completions": STREAMED, "/v1/responses": RESPONSE}
    for path, headers in (
        ("/v1/completions", {}),
        ("/v1/completions", {"Idempotency-Key": "comments"}),
        ("/v1/responses", {}),
    ):
        system.script.gate, system.script.gate_at = asyncio.Event(), 2
        response = await system.http.post(system.url + path, json=bodies[path], headers=headers)
        begun = b""
        while begun.count(COMMENT) < 3:
            begun += await response.content.readuntil(b"\n")
        system.script.gate.set()
        events = (begun + await response.read()).split(b"\n\n")

        assert events.pop() == b""
        assert all(any(line[:5] == b"data:" for line in event.split(b"\n")) for event in events)


async def test_a_response_without_an_event_ends_with_a_comment_alone(
    build: ProxyClusterBuilder,
) -> None:
    """A client that has all events of a stored response, and asks for those behind, gets none."""
    system = await build(pairs=1)
    async with system.http.post(f"{system.url}/v1/responses", json=RESPONSE) as response:
        events = events_of(await response.read())
    last = msgspec.json.decode(events[-2].split(b"data: ")[1])

    url = f"{system.url}/v1/responses/{last['response']['id']}"
    after = {"stream": "true", "starting_after": str(last["sequence_number"])}
    async with system.http.get(url, params=after) as response:
        rest = await response.read()

    assert rest == COMMENT


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "key-1"}])
async def test_the_openai_client_lives_through_a_pause(
    build: ProxyClusterBuilder, headers: dict[str, str]
) -> None:
    """With a key its events have ids: its decoder then takes each empty line for an event's end."""
    system = await build(proxy=PATIENT)
    system.script.gate, system.script.gate_at = asyncio.Event(), 3

    async with openai.AsyncOpenAI(base_url=f"{system.url}/v1", api_key="x", max_retries=0) as api:
        stream = await api.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "play emoji."}],
            temperature=0,
            stream=True,
            extra_headers=headers,
        )
        begun = await anext(stream)
        (client,) = keep_alives(system).open
        for _ in range(3):
            client.break_silence()
        system.script.gate.set()
        chunks = [begun] + [chunk async for chunk in stream]

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SCENARIOS["emoji"]


def _numbered(stream: bytes) -> bytes:
    return re.sub(rb'"id":"[^"]*","created":\d+', b"", stream)


async def _truth(value: bool) -> bool:
    return value
