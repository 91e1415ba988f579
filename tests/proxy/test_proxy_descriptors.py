"""A proxy with few file descriptors: its clients are bounded, and no instance is blamed."""

import asyncio
import resource
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvrs_testkit.proxy_cluster import WITHIN_S, ProxyCluster
from kvrs_testkit.proxy_process import REQUEST, process
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = [pytest.mark.process, pytest.mark.network]

BLAME = (b"attempt failed", b"instance lost", b"instance ejected")
STREAM = REQUEST | {"stream": True, "max_tokens": 8}


def limited(soft: int, hard: int) -> tuple[str, ...]:
    """A command line that runs Python with these limits of descriptors."""
    return ("prlimit", f"--nofile={soft}:{hard}", sys.executable)


async def whole(http: aiohttp.ClientSession, url: str) -> bytes:
    """The events of a stream without a key."""
    async with http.post(url, json=STREAM) as response:
        assert response.status == 200, await response.read()
        return await response.read()


def is_whole(events: bytes) -> bool:
    return events.endswith(b"data: [DONE]\n\n") and b'"error"' not in events


async def until_running(system: ProxyCluster, count: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while sum(one.running for one in system.instances.values()) < count:
            await asyncio.sleep(0.01)


async def test_the_soft_limit_is_raised_at_start(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """The usual soft limit of 1,024 is less than `proxy.max_streams` needs."""
    system = await build()
    async with process(system, tmp_path, limited(256, 2048)) as (proxy, _):
        limits = resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE)

    assert limits == (2048, 2048)


async def test_silent_connections_take_no_descriptor_from_streams(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """200 of them before a limit of 128: streams flow, are recovered when their instance dies, and
    the instance that goes on with them is blamed for nothing.
    """
    system = await build()
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    async with (
        process(system, tmp_path, limited(128, 128)) as (proxy, url),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        port = int(url.split(":")[2].split("/")[0])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        streams = [asyncio.create_task(whole(http, url)) for _ in range(10)]
        await until_running(system, 10)

        await system.instances["d0"].kill()
        system.script.gate.set()
        events = await asyncio.gather(*streams)

        assert proxy.stderr is not None
        for _, writer in silent:
            writer.close()
        proxy.terminate()
        logged = await proxy.stderr.read()
    assert all(map(is_whole, events))
    assert b"Too many open files" not in logged
    blamed = [line for line in logged.splitlines() if b"instance=d1" in line]
    assert not any(words in line for line in blamed for words in BLAME)


async def test_a_lack_of_descriptors_is_a_wait(build: ProxyClusterBuilder, tmp_path: Path) -> None:
    """A connection that the proxy itself cannot make is no failure of the instance, nor is the
    silence meanwhile.
    """
    system, gap_s = await build(), 1.5
    async with (
        process(system, tmp_path, token_gap_s=gap_s) as (proxy, url),
        aiohttp.ClientSession() as http,
    ):
        assert proxy.stderr is not None
        # A request to be refused: its connection stays for the next one.
        async with http.post(url, json={"prompt": []}) as refused:
            assert refused.status == 400
        _, hard = resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (3, hard))
        asking = asyncio.create_task(whole(http, url))
        logged = b""
        async with asyncio.timeout(WITHIN_S):
            while b"descriptor" not in logged and b"Too many open files" not in logged:
                logged += await proxy.stderr.readline()
        await asyncio.sleep(3 * gap_s)

        resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (hard, hard))
        events = await asking
        proxy.terminate()
        logged += await proxy.stderr.read()

    assert is_whole(events)
    assert b"attempt failed" not in logged
    assert b"instance lost" not in logged


CALL = """
import asyncio, resource, sys
from kvrs.proxy.wire.upstream import Access, EngineLinks

async def main():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with EngineLinks(Access()) as links:
        # What a look-up imports must be there.
        await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        restore = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        asyncio.get_running_loop().call_later(0.3, restore)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        status, _ = await links.pool(sys.argv[1]).ask("/healthz", None)
        print(status)

asyncio.run(main())
"""


async def test_a_name_that_cannot_be_looked_up_for_want_of_one_is_a_wait(
    build: ProxyClusterBuilder,
) -> None:
    """The resolver calls the name unknown then, as if the host were gone."""
    system = await build(pairs=1)
    url = f"http://localhost:{system.proxy.port}"

    asking = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CALL, url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said, errors = await asking.communicate()

    assert said == b"200\n", errors.decode()


async def test_a_storm_of_connections_is_told_to_come_back_at_different_times(
    build: ProxyClusterBuilder,
) -> None:
    """400 requests at once before 80 connections: each gets an answer, the refused ones a time that
    is drawn, and what comes after the storm is served.
    """
    system = await build(pairs=1, proxy={"max_streams": 8})
    system.script.pause_s = 0.02
    body = msgspec.json.encode(REQUEST)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"

    async def one() -> tuple[int, int]:
        reader, writer = await asyncio.open_connection("127.0.0.1", system.proxy.port)
        writer.write(head.encode() + body)
        try:
            lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        finally:
            writer.close()
        after = [int(line.split()[1]) for line in lines if line.startswith(b"Retry-After:")]
        return int(lines[0].split()[1]), max(after, default=0)

    answers = await asyncio.gather(*(one() for _ in range(400)), return_exceptions=True)
    status, _ = await system.ask(REQUEST)

    heard = [answer for answer in answers if isinstance(answer, tuple)]
    refused = [after for code, after in heard if code == 503]
    assert {code for code, _ in heard} == {200, 503}
    assert set(refused) == {1, 2, 3}
    assert status == 200
