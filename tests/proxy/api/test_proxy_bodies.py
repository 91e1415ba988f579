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


async def until_unfinished(system: ProxyCluster, min_bytes: int, max_bytes: int) -> None:
    """Until unfinished bodies take so much, with the room that their buffers have for more."""

    async def holds() -> bool:
        return min_bytes <= await system.count("kvrs_unfinished_body_bytes") <= max_bytes

    await system.until(holds)


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes, dict[str, str]]:
    """Status and head of a response, and its error; then the connection is closed."""
    head = await reader.readuntil(b"\r\n\r\n")
    error = msgspec.json.decode(await reader.read())["error"]
    return int(head.split()[1]), head, error


async def test_a_body_takes_of_the_budget_when_it_is_whole(build: ProxyClusterBuilder) -> None:
    """Declaring bodies, or sending parts of them, leaves the room of open requests to others."""
    system = await build(pairs=1, proxy=SMALL)
    async with (
        unfinished(system.proxy.port, 8, 1, 100 * KIB),
        unfinished(system.proxy.port, 4, 60 * KIB, 100 * KIB),
        unfinished(system.proxy.port, 4, 60 * KIB, None),
    ):
        await until_unfinished(system, 480 * KIB, 560 * KIB)

        status, _ = await system.ask({"prompt": "x" * 90 * KIB, "max_tokens": 1})

        assert status == 200
        assert await system.count("kvrs_request_bytes") == 0
    await until_unfinished(system, 0, 0)


async def test_a_body_without_room_is_refused_before_it_is_read(
    build: ProxyClusterBuilder,
) -> None:
    """The declared length shows that it has no room: reading it would be for nothing."""
    system = await build(pairs=1, proxy=FOR_THREE)
    system.script.gate = asyncio.Event()
    body = {"messages": [{"role": "user", "content": "x" * 90 * KIB}], "max_tokens": 1}
    asked = [asyncio.create_task(system.ask(body)) for _ in range(3)]
    await system.until_streams_hold(0, count=3)

    async with unfinished(system.proxy.port, 1, 1, 50 * KIB) as (refused,):
        status, head, error = await answer_of(refused)
    system.script.gate.set()
    await asyncio.gather(*asked)

    assert (status, error["code"]) == (503, "no_room")
    found = re.search(rb"Retry-After: (\d+)\r\n", head)
    assert found is not None
    assert 1 <= int(found[1]) <= 3
    assert b"Connection: close" in head


@pytest.mark.parametrize("declared", [100 * KIB, None])
async def test_the_body_with_least_progress_is_cut_when_there_is_no_room(
    build: ProxyClusterBuilder, caplog: pytest.LogCaptureFixture, declared: int | None
) -> None:
    """408 in OpenAI's form and the end of the connection, for the one that stalled first; those
    that came later, whole or not, and small ones are left alone.
    """
    system = await build(pairs=1, proxy=SMALL | {"body_budget_bytes": 1000 * KIB})
    port = system.proxy.port
    async with (
        unfinished(port, 4, 60 * KIB, declared) as small,
        unfinished(port, 1, 90 * KIB, declared) as (first,),
    ):
        await until_unfinished(system, 330 * KIB, 400 * KIB)
        async with unfinished(port, 1, 90 * KIB, declared) as (second,):
            await until_unfinished(system, 420 * KIB, 500 * KIB)

            async with unfinished(port, 1, 90 * KIB, declared) as (third,):
                status, head, error = await answer_of(first)
                whole, _ = await system.ask({"prompt": "x" * 90 * KIB, "max_tokens": 1})

                left = [*small, third]
                assert not any(each._buffer for each in left)  # type: ignore[attr-defined]
                assert not any(each.at_eof() for each in left)

    assert (status, error["type"], error["code"]) == (408, "invalid_request_error", "body_cut")
    assert b"Connection: close" in head
    assert whole == 200
    assert await system.count("kvrs_bodies_cut_total") >= 1
    (line, *_) = [one for one in caplog.records if one.message == "unfinished body cut"]
    assert "127.0.0.1" not in str(vars(line))
    del second


async def test_requests_are_served_while_large_bodies_never_end(
    build: ProxyClusterBuilder,
) -> None:
    """The bodies would fill the budget of open requests. Small ones beside them, whose bytes come
    apart, are all served, by both paths of the port.
    """
    system = await build(pairs=1, proxy=SMALL | {"body_budget_bytes": 800 * KIB})
    async with unfinished(system.proxy.port, 20, 95 * KIB, 100 * KIB):
        for length in ("Content-Length: 5", "Transfer-Encoding: chunked"):
            reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
            writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
            writer.write(b"{}" if length.startswith("C") else b"2\r\n{}\r\n")
            await asyncio.sleep(0)
            writer.write(b"   " if length.startswith("C") else b"3\r\n   \r\n0\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            writer.close()
            assert head.startswith(b"HTTP/1.1 400 ")  # It was read, and has no prompt.

        status, _ = await system.complete(prompt=[1, 2, 3], max_tokens=1)

        assert status == 200
    await until_unfinished(system, 0, 0)


async def test_small_bodies_that_never_end_are_not_cut(
    build: ProxyClusterBuilder,
) -> None:
    """Bodies of up to 64 kB take nothing of the budget of larger ones."""
    system = await build(pairs=1, proxy=SMALL)
    async with unfinished(system.proxy.port, 300, KIB, 64 * KIB):
        await until_unfinished(system, 300 * KIB, 400 * KIB)

        async with unfinished(system.proxy.port, 1, 95 * KIB, 100 * KIB):
            await until_unfinished(system, 395 * KIB, 520 * KIB)

    assert await system.count("kvrs_bodies_cut_total") == 0


async def test_what_has_come_of_a_usual_request_counts_as_unfinished(
    build: ProxyClusterBuilder,
) -> None:
    """While the rest of it is awaited without aiohttp's server, and after that too."""
    system = await build(pairs=1, proxy=SMALL)
    async with unfinished(system.proxy.port, 2, 30 * KIB, 60 * KIB):
        await until_unfinished(system, 60 * KIB, 70 * KIB)
    await until_unfinished(system, 0, 0)


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


async def test_memory_of_unfinished_bodies_is_bounded(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """All but the last byte of 14 bodies of 8 MiB, before a budget of 32 MiB: at least eleven of
    them are cut, and memory does not grow by more than the budget and a fifth.
    """
    system, budget, size = await build(pairs=1), 32 << 20, 8 << 20
    async with (
        process(system, tmp_path, max_body_bytes=size, body_budget_bytes=4 * budget) as (
            proxy,
            url,
        ),
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

    assert all(line.result().startswith(b"HTTP/1.1 408 ") for line in lines if not line.cancelled())
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
