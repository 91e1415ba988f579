"""The proxy as a process of its own, as `kvrs proxy` runs it."""

import asyncio
import signal
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.proxy_process import (
    REQUEST,
    config_of,
    process,
    started_process,
    until_logged,
)
from kvrs_testkit.sse import events_of
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = [pytest.mark.process, pytest.mark.network]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_proxy_that_is_stopped_ends_streams_with_an_error(
    build: ProxyClusterBuilder, tmp_path: Path, number: signal.Signals
) -> None:
    """No stream only looks complete, and no client gets a broken connection without a reason."""
    system = await build()
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    async with (
        process(system, tmp_path, drain_s=0.0) as (proxy, url),
        aiohttp.ClientSession() as http,
    ):
        asking = asyncio.create_task(http.post(url, json=REQUEST))
        streamed = await http.post(url, json=REQUEST | {"stream": True})
        await streamed.content.readuntil(b"\n\n")
        while sum(instance.running for instance in system.instances.values()) < 2:
            await asyncio.sleep(0.005)

        proxy.send_signal(number)
        events = await streamed.read()
        refused = await asking
        whole = await refused.read()

        assert await proxy.wait() == 0
    *_, last, end = events_of(events)
    assert (refused.status, end) == (503, b"")
    assert msgspec.json.decode(last[6:])["error"]["code"] == "shutting_down"
    assert msgspec.json.decode(whole)["error"]["code"] == "shutting_down"


async def test_a_proxy_outlives_signals_that_have_no_meaning_to_it(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """`kvrs lab up` restarts on SIGUSR1; to a proxy alone it must not be the end."""
    system = await build()
    async with process(system, tmp_path) as (proxy, url), aiohttp.ClientSession() as http:
        proxy.send_signal(signal.SIGUSR1)
        await until_logged(proxy, b"SIGUSR1 is ignored")

        answer = await http.post(url, json=REQUEST)

        assert answer.status == 200
        assert proxy.returncode is None


async def test_a_second_signal_ends_a_proxy_that_drains(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """By default streams without a key may run to their end, but an operator need not wait."""
    system = await build()
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    async with process(system, tmp_path) as (proxy, url), aiohttp.ClientSession() as http:
        streamed = await http.post(url, json=REQUEST | {"stream": True})
        await streamed.content.readuntil(b"\n\n")

        proxy.send_signal(signal.SIGTERM)
        await until_logged(proxy, b"draining")
        proxy.send_signal(signal.SIGTERM)
        events = await streamed.read()

        assert await proxy.wait() == 0
    assert b"shutting_down" in events


async def test_a_signalled_proxy_lets_a_stream_without_a_key_run_to_its_end(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """With the default of `drain_s` a rolling restart fails no stream."""
    system = await build()
    gate = system.script.gate = asyncio.Event()
    system.script.gate_at = 2
    async with process(system, tmp_path) as (proxy, url), aiohttp.ClientSession() as http:
        streamed = await http.post(url, json=REQUEST | {"stream": True})
        await streamed.content.readuntil(b"\n\n")

        proxy.send_signal(signal.SIGTERM)
        await until_logged(proxy, b"draining")
        gate.set()
        events = await streamed.read()

        assert await proxy.wait() == 0
    assert events.endswith(b"data: [DONE]\n\n")
    assert b"error" not in events


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
async def test_a_signal_while_a_proxy_starts_does_not_end_it(
    build: ProxyClusterBuilder, tmp_path: Path, number: signal.Signals
) -> None:
    """A supervisor may send it right after the start: here in the middle of the imports, long
    before there is an event loop.
    """
    system = await build()

    def is_importing(pid: int) -> bool:
        return "pydantic_core" in Path(f"/proc/{pid}/maps").read_text()

    async with (
        started_process(config_of(system, tmp_path), (sys.executable,)) as proxy,
        aiohttp.ClientSession() as http,
    ):
        async with asyncio.timeout(WITHIN_S):
            while not is_importing(proxy.pid):
                await asyncio.sleep(0.001)
        proxy.send_signal(number)
        logged = await until_logged(proxy, b"proxy ready")
        port = int(logged.partition(b"proxy ready port=")[2].split()[0])

        answer = await http.post(f"http://127.0.0.1:{port}/v1/completions", json=REQUEST)

        assert answer.status == 200


async def test_a_proxy_that_leaves_is_not_ready_and_serves_new_requests(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """For `proxy.drain_delay_s`: load balancers learn late of what is not ready. A second SIGTERM
    ends the delay: new requests are refused, and streams that run have time to end.
    """
    system = await build()
    async with (
        process(system, tmp_path, drain_delay_s=300.0) as (proxy, url),
        aiohttp.ClientSession() as http,
        asyncio.timeout(WITHIN_S),
    ):
        ready = url.replace("/v1/completions", "/readyz")
        while await _said(http, ready) != "ready\n":
            await asyncio.sleep(0.01)
        proxy.send_signal(signal.SIGTERM)
        while await _said(http, ready) != "shutting down\n":
            await asyncio.sleep(0.01)
        async with http.post(url, json=REQUEST) as answer:
            served = answer.status
        system.script.gate, system.script.gate_at = asyncio.Event(), 2
        running = await http.post(url, json=REQUEST | {"stream": True})
        await running.content.readuntil(b"\n\n")

        proxy.send_signal(signal.SIGTERM)
        refused = 200
        while refused == 200:
            async with http.get(url.replace("/v1/completions", "/load")) as answer:
                assert answer.status == 200
            async with http.post(url, json=REQUEST | {"max_tokens": 1}) as answer:
                refused = answer.status
        system.script.gate.set()
        events = await running.read()
        status = await proxy.wait()

    assert (served, refused, status) == (200, 503, 0)
    assert events.endswith(b"data: [DONE]\n\n")


async def _said(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(url) as answer:
        return await answer.text()


async def test_sigint_waits_for_no_delay(build: ProxyClusterBuilder, tmp_path: Path) -> None:
    """It comes from a terminal, where no load balancer has to learn of it."""
    system = await build()
    async with (
        process(system, tmp_path, drain_delay_s=300.0) as (proxy, _),
        asyncio.timeout(WITHIN_S),
    ):
        proxy.send_signal(signal.SIGINT)
        status = await proxy.wait()

    assert status == 0
