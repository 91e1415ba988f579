"""The proxy as a process of its own, as `kvrs proxy` runs it."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.proxy.conftest import HouseBuilder
from tests.proxy.house import House
from tests.proxy.scripted import SECRET

ASKED = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}


@asynccontextmanager
async def process(house: House, directory: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A second proxy before the same instances, and where it listens; one that does not end is killed."""
    nodes: dict[str, list[dict[str, str | int]]] = {}
    for page_port, one in enumerate(house.instances.values(), 1):
        instance: dict[str, str | int] = {"id": one.id, "role": one.role.value, "port": one.port, "page_port": page_port}
        nodes.setdefault(one.node, []).append(instance)
    cluster = {"nodes": [{"id": node, "instances": instances} for node, instances in nodes.items()]}
    config = directory / "kvrs.yaml"
    config.write_bytes(msgspec.json.encode({"proxy": {"port": 0, "admin_port": 0}, "cluster": cluster}))
    async with process_of(config) as started:
        yield started


@asynccontextmanager
async def process_of(config: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrs", "proxy", "--config", str(config)),
        env=os.environ | {"KVRS_SECRET": SECRET.decode()},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(20):
            assert started.stderr is not None
            while (port := re.search(rb"proxy ready port=(\d+)", await started.stderr.readline())) is None:
                assert started.returncode is None
        yield started, f"http://127.0.0.1:{int(port[1])}/v1/completions"
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_proxy_that_is_told_to_end_tells_its_clients(build: HouseBuilder, tmp_path: Path, number: signal.Signals) -> None:
    """No stream only looks complete, and no client is left with a broken connection to guess about."""
    house = await build()
    house.script.gate, house.script.gate_at = asyncio.Event(), 2
    async with process(house, tmp_path) as (proxy, url), aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.post(url, json=ASKED))
        streamed = await http.post(url, json=ASKED | {"stream": True})
        await streamed.content.readuntil(b"\n\n")
        while sum(instance.running for instance in house.instances.values()) < 2:
            await asyncio.sleep(0.005)

        proxy.send_signal(number)
        events = await streamed.read()
        refused = await asking
        whole = await refused.read()

        assert await proxy.wait() == 0
    *_, last, end = events.split(b"\n\n")
    assert (refused.status, end) == (503, b"")
    assert msgspec.json.decode(last[6:])["error"]["code"] == "shutting_down"
    assert msgspec.json.decode(whole)["error"]["code"] == "shutting_down"
