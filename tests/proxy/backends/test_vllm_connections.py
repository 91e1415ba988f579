"""One address before a proxy with room for few connections: others get through all the same."""

import asyncio

import aiohttp
import msgspec
import pytest

from kvrs_testkit.vllm_cluster import Builder, Vllms
from tests.proxy.backends.test_vllm_odd_requests import odd_vllms

pytestmark = [pytest.mark.process, pytest.mark.network]

MAX_STREAMS = 8  # 80 connections, 60 of one address.
OF_ONE_ADDRESS = 60

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connected(system: Vllms, *, missing_bytes: int = 0) -> Connection:
    """A connection of its own with a request, whose body lacks its last bytes."""
    body = msgspec.json.encode({"input": "a"})
    reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
    head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body[: len(body) - missing_bytes])
    return reader, writer


def open_requests(system: Vllms) -> int:
    """Return how many connections at the clients' port have a request whose body is whole."""
    (port,) = (port for port in system.proxy._ports if port.port == system.proxy.port)
    return port.among.busy


async def status_elsewhere(system: Vllms) -> int:
    """Ask for the health of the proxy from another address."""
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.get(f"{system.url}/healthz") as healthy,
    ):
        return healthy.status


async def test_one_address_does_not_take_all_connections(vllms: Builder) -> None:
    """A quarter is left to the other addresses, even if all of its requests are open."""
    system, _ = await odd_vllms(vllms, {"takes_s": 60.0}, proxy={"max_streams": MAX_STREAMS})
    taken = [await connected(system) for _ in range(OF_ONE_ADDRESS)]

    async def are_open() -> bool:
        return open_requests(system) >= OF_ONE_ADDRESS

    await system.until(are_open)

    crowded = await connected(system)
    answer = await crowded[0].read()
    status = await status_elsewhere(system)
    for _, writer in (*taken, crowded):
        writer.close()

    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"too many connections" in answer
    assert status == 200


async def test_requests_whose_body_is_not_whole_give_way(vllms: Builder) -> None:
    """The one that has stood for longest is closed for a new one, of the same address."""
    system, _ = await odd_vllms(vllms, {}, proxy={"max_streams": MAX_STREAMS})
    taken = [await connected(system, missing_bytes=1) for _ in range(OF_ONE_ADDRESS)]

    reader, writer = await connected(system)
    answer = await reader.readline()
    gone = await taken[0][0].read()
    status = await status_elsewhere(system)
    for _, each in (*taken, (reader, writer)):
        each.close()

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert gone == b""
    assert status == 200
