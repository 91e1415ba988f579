"""The budgets for bodies that are being read and for requests that are open."""

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
from kvrs_testkit.proxy_cluster import WITHIN_S, ProxyCluster
from kvrs_testkit.proxy_process import process
from kvrs_testkit.scripted import Fault
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = [pytest.mark.process, pytest.mark.network]

KIB = 1 << 10
SMALL = {"max_body_bytes": 100 * KIB, "body_budget_bytes": 400 * KIB}
FOR_THREE = SMALL | {"body_budget_bytes": 300 * KIB}


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


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes, dict[str, str]]:
    """Status and head of a response, and its error; then the connection is closed."""
    head = await reader.readuntil(b"\r\n\r\n")
    error = msgspec.json.decode(await reader.read())["error"]
    return int(head.split()[1]), head, error


@pytest.mark.parametrize("declared", [100 * KIB, None])
async def test_a_body_takes_of_the_budget_as_it_comes(
    build: ProxyClusterBuilder, declared: int | None
) -> None:
    """Declared bytes take nothing, those that have come do, until their connection ends."""
    system = await build(pairs=1, proxy=FOR_THREE)
    port = system.proxy.port
    async with unfinished(port, 8, 1, 100 * KIB), unfinished(port, 3, 90 * KIB, declared):
        await until_held(system, 270 * KIB + 8)
        refused, _ = await system.ask({"prompt": "x" * 90 * KIB, "max_tokens": 1})
        small, _ = await system.complete(prompt=[1, 2, 3], max_tokens=1)
    await until_held(system, 0)

    assert (refused, small) == (503, 200)


async def test_a_body_without_room_is_refused_before_it_is_read(
    build: ProxyClusterBuilder,
) -> None:
    """The declared length shows that it has no room: reading it would be for nothing."""
    system = await build(pairs=1, proxy=FOR_THREE)
    port = system.proxy.port

    async with unfinished(port, 3, 90 * KIB, 100 * KIB):
        await until_held(system, 270 * KIB)
        async with unfinished(port, 1, 1, 50 * KIB) as (refused,):
            status, head, error = await answer_of(refused)

    assert (status, error["code"]) == (503, "no_room")
    found = re.search(rb"Retry-After: (\d+)\r\n", head)
    assert found is not None
    assert 1 <= int(found[1]) <= 3
    assert b"Connection: close" in head


async def test_an_open_request_holds_its_bytes_to_its_end(build: ProxyClusterBuilder) -> None:
    """A body stays in memory as long as its stream may need it again."""
    system = await build(pairs=1, proxy=FOR_THREE)
    system.script.gate = asyncio.Event()
    body = {"messages": [{"role": "user", "content": "x" * 90 * KIB}], "max_tokens": 1}
    asked = [asyncio.create_task(system.ask(body)) for _ in range(3)]
    await system.until_streams_hold(0, count=3)

    refused, _ = await system.ask(body)
    system.script.gate.set()
    answers = await asyncio.gather(*asked)

    assert (refused, [status for status, _ in answers]) == (503, [200] * 3)
    await until_held(system, 0)


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
    # Closed proxies of earlier tests may have left some.
    before = [each for each in gc.get_objects() if type(each) is ParsedRequest]
    known = {id(each) for each in before}
    gc.disable()
    try:
        for stream in (False, True):
            status, _ = await system.complete(prompt=[1, 2, 3], max_tokens=4, stream=stream)
            assert status == 200
        await until_held(system, 0)

        async def gone() -> bool:
            objects = gc.get_objects()
            return not any(
                type(each) is ParsedRequest and id(each) not in known for each in objects
            )

        await system.until(gone)
    finally:
        gc.enable()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
