"""Bodies that come slowly: those that come on are awaited, and none holds a connection for ever."""

import asyncio

import msgspec
import pytest

from kvrs.net.connections import ConnectionLimits
from kvrs.proxy.api import bodies
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network

REQUEST = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_client_that_sends_a_body_slowly_is_served(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch, is_chunked: bool
) -> None:
    """`BODY_TIMEOUT_S` is the longest pause, however long the whole body takes."""
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 2.0)
    system = await build(pairs=1)
    body = msgspec.json.encode(REQUEST | {"user": "x" * 1000})
    pieces = [body[at : at + 50] for at in range(0, len(body), 50)]
    length = f"Content-Length: {len(body)}"
    if is_chunked:
        pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""]]
        length = "Transfer-Encoding: chunked"
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
    for piece in pieces:
        await asyncio.sleep(0.1)
        writer.write(piece)

    async with asyncio.timeout(30):
        answer = await reader.readline()
    writer.close()

    assert len(pieces) * 0.1 > 2.0
    assert answer == b"HTTP/1.1 200 OK\r\n"


async def test_a_client_that_sends_byte_by_byte_is_cut_off(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never pauses, and would hold its connection for hours."""
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.1)
    system = await build(pairs=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n\r\n")

    answering = asyncio.create_task(reader.readline())
    async with asyncio.timeout(30):
        while not answering.done():
            writer.write(b" ")
            await asyncio.sleep(0.01)
    writer.close()

    assert await answering == b"HTTP/1.1 408 Request Timeout\r\n"


async def test_unfinished_bodies_give_way_to_other_clients(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that send nothing on cannot take all connections of the port."""
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 60.0)
    system = await build(pairs=1)
    (port,) = [each for each in system.proxy._ports if each.port == system.proxy.port]
    monkeypatch.setattr(port.among, "_limits", ConnectionLimits(4, 4))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50000\r\n\r\n{"
    slow = [await asyncio.open_connection("127.0.0.1", system.proxy.port) for _ in range(4)]
    for _, writer in slow:
        writer.write(head)

    async def are_read() -> bool:
        return all(each._is_wanted for each in port.connections)

    await system.until(are_read)

    status, _ = await system.complete(**REQUEST)

    assert status == 200
    for _, writer in slow:
        writer.close()
