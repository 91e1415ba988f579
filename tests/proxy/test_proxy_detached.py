"""A proxy as a process of its own whose clients leave while KV moves between SGLang servers."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.proxy_process import process_of
from kvrs_testkit.scripted_sglang import Room, SglangScript
from kvrs_testkit.sglang_cluster import Servers, document, new_servers
from kvrs_testkit.vllm_cluster import CONFIG

pytestmark = [pytest.mark.process, pytest.mark.network]


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    """Scripted servers, behind which a file of a proxy lies in the test's directory."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    async with AsyncExitStack() as stack:
        made = new_servers(SglangScript())
        for server in made.values():
            await server.start()
            stack.push_async_callback(server.close)
        ports = {name: server.port for name, server in made.items()}
        config = document(str(tmp_path), ports, proxy={"drain_s": 0.0})
        (tmp_path / "kvrs.yaml").write_text(json.dumps(config))
        yield made


async def left_in_transfer(servers: Servers, http: aiohttp.ClientSession, url: str) -> list[Room]:
    """The rooms of two streams whose clients have left in the transfer of KV."""
    script = servers["p0"].script
    fields = {"max_tokens": 3, "stream": True}
    asked = [
        asyncio.create_task(http.post(url, json=fields | {"prompt": [each, 8, 9]}))
        for each in (1, 2)
    ]
    async with asyncio.timeout(WITHIN_S):
        while [len(room.bodies) for room in script.rooms.values()] != [2, 2]:
            await asyncio.sleep(0.005)
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    return [*script.rooms.values()]


async def until_no_leg(servers: Servers) -> None:
    async with asyncio.timeout(WITHIN_S):
        while any(server.legs for server in servers.values()):
            await asyncio.sleep(0.005)


async def test_calls_of_clients_that_have_left_are_closed_behind_the_transfer(
    servers: Servers, tmp_path: Path
) -> None:
    """Not in it: the pages of a closed call would be those of others."""
    script = servers["p0"].script
    script.transfer_s, script.pause_s = 1.0, 0.2
    async with (
        process_of(tmp_path / "kvrs.yaml") as (_, url),
        aiohttp.ClientSession() as http,
    ):
        rooms = await left_in_transfer(servers, http, url)

        await until_no_leg(servers)

    assert [room.aborted for room in rooms] == [{"decode": True}] * 2
    assert all(room.sent.is_set() for room in rooms)


async def test_detached_calls_end_as_their_proxy_stops(servers: Servers, tmp_path: Path) -> None:
    """It does not wait for them."""
    servers["p0"].script.transfer_s = 600.0
    async with (
        process_of(tmp_path / "kvrs.yaml") as (proxy, url),
        aiohttp.ClientSession() as http,
    ):
        rooms = await left_in_transfer(servers, http, url)

        proxy.send_signal(signal.SIGTERM)

        assert await proxy.wait() == 0
        await until_no_leg(servers)
    assert [room.aborted for room in rooms] == [{"prefill": False, "decode": False}] * 2
