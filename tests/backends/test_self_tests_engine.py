"""Self-tests of real engines: what they see, and the streams that rely on it."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_testkit.ports import client_of
from kvrs_testkit.processes import Processes

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("systems"),
    pytest.mark.nightly,
]

SAMPLED = {"prompt": "ka lo mi " * 20, "max_tokens": 400, "temperature": 1.0, "ignore_eos": True}


async def state(http: aiohttp.ClientSession, processes: Processes) -> Any:
    proxy = processes.config.proxy
    async with http.get(f"http://{proxy.host}:{proxy.admin_port}/kvrs/v1/state") as response:
        return await response.json()


async def self_tests(http: aiohttp.ClientSession, processes: Processes) -> dict[str, Any]:
    while True:
        rows = (await state(http, processes))["instances"]
        found = {row["id"]: row["self_test"] for row in rows}
        if all(test is not None and test["done"] for test in found.values()):
            return found
        await asyncio.sleep(0.05)


async def test_what_the_embedded_engine_declares_is_seen(processes: Processes) -> None:
    """Exact with seeds, KV that moves: and a sampled stream without a seed, whose instance is
    killed, ends complete and unmarked. Its engines draw at random all the same.
    """
    proxy = processes.config.proxy
    url = f"http://{proxy.host}:{proxy.port}/v1/completions"
    async with aiohttp.ClientSession() as http:
        found = await self_tests(http, processes)

        async with http.post(url, json=SAMPLED | {"stream": True}) as response:
            mark, text, events = response.headers.get("X-Kvrs-Exact"), "", 0
            async for line in response.content:
                if line.startswith(b"data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                    events += 1
                if events == 20:
                    (stream,) = (await state(http, processes))["streams"]
                    processes.kill(stream["decode"])
                    events += 1000
        (recovery,) = (await state(http, processes))["recoveries"]
        processes.start(stream["decode"])
        processes.wait_ready(stream["decode"])
        async with http.post(url, json=SAMPLED) as response:
            other = (await response.json())["choices"][0]["text"]

    assert {test["moves_kv"] for test in found.values()} == {True}
    assert {found[name]["continues"] for name in ("d0", "d1")} == {"exact seeded"}
    assert (mark, line) == (None, b"\n")
    assert recovery["outcome"] == "resumed"
    assert "migrate" in {estimate["option"] for estimate in recovery["estimates"]}
    assert len(text) > 0
    assert text != other


async def test_an_engine_asked_directly_draws_at_random(processes: Processes) -> None:
    """Without a seed no two requests share one."""
    (engine,) = (each.url for _, each in processes.config.cluster.instances() if each.id == "p0")
    async with client_of(engine, scoped_key(processes.secret, Scope.INSTANCE, "p0")) as http:

        async def text(**fields: Any) -> str:
            asked = SAMPLED | {"max_tokens": 30} | fields
            async with http.post("/v1/completions", json=asked) as response:
                return str((await response.json())["choices"][0]["text"])

        unseeded = {await text() for _ in range(3)}
        seeded = {await text(seed=5) for _ in range(2)}

    assert (len(unseeded), len(seeded)) == (3, 1)
