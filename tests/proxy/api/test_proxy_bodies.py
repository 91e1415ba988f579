"""The budget for bodies that are being read and requests that are open."""

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvrs.proxy.wire.requests import ParsedRequest
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.proxy_cluster import WITHIN_S, ProxyCluster
from tests.proxy.scripted import Fault
from tests.proxy.test_proxy_process import process

pytestmark = [pytest.mark.process, pytest.mark.network]

KIB = 1 << 10
SMALL = {"max_body_bytes": 100 * KIB, "body_budget_bytes": 400 * KIB, "body_timeout_s": WITHIN_S}


@asynccontextmanager
async def unfinished(
    port: int, count: int, size_bytes: int, declared: int | None
) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Bodies of which the last byte never comes; `declared` None: they are chunked."""
    length = "Transfer-Encoding: chunked" if declared is None else f"Content-Length: {declared}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode()
    body = b" " * size_bytes
    if declared is None:
        body = b"%x\r\n%s\r\n" % (size_bytes, body)
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    try:
        for _, writer in opened:
            writer.write(head + body)
        yield [reader for reader, _ in opened]
    finally:
        for _, writer in opened:
            writer.close()


async def until_held(system: ProxyCluster, size_bytes: int) -> None:
    async def holds() -> bool:
        return await system.count("kvrs_request_bytes") == size_bytes

    await system.until(holds)


async def test_bodies_are_counted_before_they_are_read(build: ProxyClusterBuilder) -> None:
    """Of what was declared nothing has come: a body that was begun must be able to end."""
    system = await build(pairs=1, proxy=SMALL)
    async with unfinished(system.proxy.port, 3, 1, 100 * KIB):
        await until_held(system, 300 * KIB)

        async with unfinished(system.proxy.port, 1, 1, 50 * KIB) as (refused,):
            head = await refused.readuntil(b"\r\n\r\n")

        assert head.startswith(b"HTTP/1.1 503 ")
        found = re.search(rb"Retry-After: (\d+)\r\n", head)
        assert found is not None
        assert 1 <= int(found[1]) <= 3
        assert b"Connection: close" in head
    await until_held(system, 0)
    status, _ = await system.complete(prompt=[1] * 20_000, max_tokens=1)
    assert status == 200


async def test_one_address_leaves_room_for_bodies_of_others(build: ProxyClusterBuilder) -> None:
    """A quarter of the budget is not to be had by the address that has the rest."""
    system = await build(pairs=1, proxy=SMALL)
    body = {"prompt": "x" * 50 * KIB, "max_tokens": 1}
    async with unfinished(system.proxy.port, 3, 1, 100 * KIB):
        await until_held(system, 300 * KIB)
        status, _ = await system.ask(body)
        elsewhere = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
        async with (
            aiohttp.ClientSession(connector=elsewhere) as http,
            http.post(f"{system.url}/v1/completions", json=body) as answer,
        ):
            other = answer.status

    assert (status, other) == (503, 200)


async def test_a_body_without_a_length_is_counted_as_it_arrives(build: ProxyClusterBuilder) -> None:
    """A chunked body declares nothing."""
    system = await build(pairs=1, proxy=SMALL)
    async with unfinished(system.proxy.port, 2, 90 * KIB, None):
        await until_held(system, 180 * KIB)

        async with unfinished(system.proxy.port, 1, 99 * KIB, None):
            await until_held(system, 279 * KIB)
            async with unfinished(system.proxy.port, 1, 90 * KIB, None) as (refused,):
                line = await refused.readline()

    assert line.startswith(b"HTTP/1.1 503 ")
    await until_held(system, 0)


async def test_an_open_request_holds_its_bytes_to_its_end(build: ProxyClusterBuilder) -> None:
    """A body stays in memory as long as its stream may need it again."""
    system = await build(pairs=1, proxy=SMALL)
    system.script.gate = asyncio.Event()
    body = {"messages": [{"role": "user", "content": "x" * 90 * KIB}], "max_tokens": 1}
    asked = [asyncio.create_task(system.ask(body)) for _ in range(3)]
    await system.until_streams_hold(0, count=3)

    refused, _ = await system.ask(body)
    system.script.gate.set()
    answers = await asyncio.gather(*asked)

    assert (refused, [status for status, _ in answers]) == (503, [200] * 3)
    await until_held(system, 0)


async def test_memory_of_unfinished_bodies_is_bounded(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """All but the last byte of 14 bodies of 8 MiB, before a budget of 32 MiB."""
    system, budget, size = await build(pairs=1), 32 << 20, 8 << 20
    async with (
        process(system, tmp_path, max_body_bytes=size, body_budget_bytes=budget) as (proxy, url),
        aiohttp.ClientSession() as http,
        asyncio.timeout(WITHIN_S),
    ):
        port = int(url.split(":")[2].split("/")[0])
        async with http.post(url, json={"prompt": [1], "max_tokens": 1}) as answer:
            assert answer.status == 200
        before = resident_bytes(proxy.pid)

        async with unfinished(port, 14, size - 1, size) as readers:
            lines = [asyncio.create_task(reader.readline()) for reader in readers]
            while sum(line.done() for line in lines) < 11:
                await asyncio.sleep(0.01)
            grown = resident_bytes(proxy.pid) - before
            for line in lines:
                line.cancel()

    assert all(line.result().startswith(b"HTTP/1.1 503 ") for line in lines if not line.cancelled())
    assert grown < 1.2 * budget


async def test_an_open_request_is_kept_as_bytes(build: ProxyClusterBuilder, tmp_path: Path) -> None:
    """Three prompts of 400,000 ids and 2.8 MB each: as lists, and as the call that their engine was
    sent, they took 45 MB each for as long as they ran.
    """
    system = await build(pairs=1)
    system.script.gate, system.script.gate_at = asyncio.Event(), 1
    body = msgspec.json.encode({"prompt": [100_000] * 400_000, "max_tokens": 2, "stream": True})
    headers = {"Content-Type": "application/json"}
    async with (
        process(system, tmp_path) as (proxy, url),
        aiohttp.ClientSession() as http,
        asyncio.timeout(WITHIN_S),
    ):
        first = await http.post(url, data=BytesIO(body), headers=headers)
        await first.content.readuntil(b"\n\n")
        before = resident_bytes(proxy.pid)

        others = [await http.post(url, data=BytesIO(body), headers=headers) for _ in range(3)]
        for other in others:
            await other.content.readuntil(b"\n\n")
        grown = resident_bytes(proxy.pid) - before
        system.script.gate.set()
        ends = [await other.read() for other in (first, *others)]

    assert all(end.endswith(b"data: [DONE]\n\n") for end in ends)
    assert grown < 40_000_000


async def test_a_request_that_has_ended_is_gone(build: ProxyClusterBuilder) -> None:
    """No circle of references keeps it until the collector of garbage comes by."""
    system = await build(pairs=1)
    system.script.faults[2] = Fault.RESET
    gc.collect()
    gc.disable()
    try:
        for stream in (False, True):
            status, _ = await system.complete(prompt=[1, 2, 3], max_tokens=4, stream=stream)
            assert status == 200
        await until_held(system, 0)

        async def gone() -> bool:
            return not any(type(each) is ParsedRequest for each in gc.get_objects())

        await system.until(gone)
    finally:
        gc.enable()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
