"""Streamed responses as they lie on a client's connection."""

import asyncio

import msgspec
import pytest

from tests.proxy.conftest import ProxyClusterBuilder

REQUEST = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "stream": True}


def request(version: str = "1.1", fields: str = "", **more: object) -> bytes:
    body = msgspec.json.encode(REQUEST | more)
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\n{fields}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def unchunked(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


async def test_a_connection_carries_one_streamed_response_after_another(
    build: ProxyClusterBuilder,
) -> None:
    """In chunks, whose last one ends each of them; the second asks for the end of the
    connection.
    """
    system = await build(pairs=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
    heads, bodies = [], []

    for fields in ("", "Connection: close\r\n"):
        writer.write(request(fields=fields))
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        bodies.append(await unchunked(reader))
    rest = await reader.read()
    writer.close()

    assert all(head.startswith("http/1.1 200 ok\r\n") for head in heads)
    assert all("\r\ntransfer-encoding: chunked\r\n" in head for head in heads)
    assert all("\r\ncontent-type: text/event-stream" in head for head in heads)
    assert ["\r\nconnection: close\r\n" in head for head in heads] == [False, True]
    assert all(body.endswith(b"data: [DONE]\n\n") for body in bodies)
    assert rest == b""


async def test_a_connection_serves_on_after_a_stream_that_ended_with_an_error(
    build: ProxyClusterBuilder,
) -> None:
    """Nothing in the head said otherwise, so a client may use it again at once."""
    system = await build(pairs=1, policy={"recovery": {"wait_s": 0.1}})
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)

    writer.write(request())
    head = await reader.readuntil(b"\r\n\r\n")
    await system.until_streams_hold(2)
    await system.instances["d0"].kill()
    body = await unchunked(reader)
    writer.write(request())
    async with asyncio.timeout(20):
        answer = await reader.readuntil(b"\r\n")
    writer.close()

    assert b"connection: close" not in head.lower()
    assert b'"error"' in body
    assert answer.startswith(b"HTTP/1.1 5")


async def test_a_client_of_http_1_0_gets_a_body_that_ends_with_the_connection(
    build: ProxyClusterBuilder,
) -> None:
    """It knows no chunks."""
    system = await build(pairs=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)

    writer.write(request("1.0", "Connection: keep-alive\r\n"))
    async with asyncio.timeout(10):  # Half of what an idle connection has.
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()

    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert b"chunked" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_client_that_reads_again_has_lost_nothing(
    build: ProxyClusterBuilder, choices: int
) -> None:
    """The engine's bytes wait for it, and its silence is excused meanwhile."""
    system = await build(pairs=1, proxy={"token_gap_s": 0.8})
    system.script.event_padding = 200_000
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port, limit=1024)
    tokens = 60
    writer.write(request(max_tokens=tokens, n=choices))

    head = await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(2.0)
    streams = (await system.state())["streams"]
    reader._limit = 1 << 20  # type: ignore[attr-defined]
    body = await unchunked(reader)
    writer.close()

    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert sum(stream["output_tokens"] for stream in streams) < choices * tokens
    assert body.count(b'"index":') >= choices * tokens
    assert body.endswith(b"data: [DONE]\n\n")
    assert system.instances["d0"].aborted == 0
