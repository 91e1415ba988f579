"""Real vLLM with kvrs in its own CPU tier: what clients leave in mid-load and mid-save, and servers
at their end, stays nowhere.
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest

from kvrs_testkit.vllm_rows import KVRS, RowServers, regions
from kvrs_testkit.vllm_servers import PAGE_TOKENS, wait_ended
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

ROW_BYTES = 65536
ROWS = 64  # In the tier of d1.
BLOCKS = 60  # Of a history: few more than its tier and the cache before that have room for.
ABORTS, AT_ONCE = 200, 8
LEFT_WITHIN_S = 0.5
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RowServers]:
    """d0, and d1 that can hold few rows and blocks. Nothing of them is left at their end."""
    there = regions()
    with RowServers(tmp_path_factory.mktemp("left")) as servers:
        servers.start(servers.agent, "d0")
        servers.wait_ready(servers.agent, "d0")
        servers.cpu_tier = {"cpu_bytes_to_use": ROWS * ROW_BYTES}
        servers.flags["d1"] = ["--num-gpu-blocks-override", "140"]
        servers.start("d1")
        servers.wait_ready("d1")
        yield servers
        parts = [pid for name in servers.names for pid in servers.parts(name)]
    assert len(parts) >= 4, "an engine and a worker of each server"
    wait_ended(parts)
    assert regions() <= there


def history(seed: int) -> list[int]:
    return random.Random(seed).choices(range(5, 200), k=BLOCKS * PAGE_TOKENS + 1)


@asynccontextmanager
async def stuttering(servers: RowServers) -> AsyncIterator[None]:
    """The agent runs for short moments, so that much of the time loads are under way."""

    async def stutter() -> None:
        while True:
            for number, for_s in ((signal.SIGSTOP, 0.05), (signal.SIGCONT, 0.003)):
                servers.signal(servers.agent, number)
                await asyncio.sleep(for_s)

    task = asyncio.create_task(stutter())
    try:
        yield
    finally:
        task.cancel()
        servers.signal(servers.agent, signal.SIGCONT)


async def left(http: aiohttp.ClientSession, url: str, body: dict[str, Any], after_s: float) -> None:
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(after_s), http.post(f"{url}/v1/completions", json=body) as said:
            await said.read()


async def test_200_aborts_in_mid_load_and_mid_save_leave_nothing(servers: RowServers) -> None:
    """After 5 s no block is used and no row pinned: a history that needs nearly all rows is loaded
    whole.
    """
    choose, histories = random.Random(7), [history(seed) for seed in range(6)]
    for prompt in histories:
        servers.complete("d0", prompt=prompt, max_tokens=1, **KVRS)
    before = servers.loaded_tokens("d1")
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as http:

        async def abort(number: int) -> None:
            body = {"model": servers.model, "max_tokens": 100, "stream": True, "ignore_eos": True}
            # d1 loads; every third request is computed and saved at d0, of a tenant of its own.
            saved: dict[str, Any] = {} if number % 3 else {"cache_salt": f"{number}"}
            body |= KVRS | saved | {"prompt": histories[number % len(histories)]}
            name = "d0" if saved else "d1"
            asked = servers.sealed(name, body)
            await left(http, servers.url(name), asked, choose.random() * LEFT_WITHIN_S)

        async with stuttering(servers):
            for first in range(0, ABORTS, AT_ONCE):
                await asyncio.gather(*map(abort, range(first, first + AT_ONCE)))
        await asyncio.sleep(5.0)

    assert servers.loaded_tokens("d1") > before
    for name in servers.names:
        counters = servers.counters(name)
        assert (counters["running"], counters["cache_usage"]) == (0, 0)
    prompt = history(100)
    calm = servers.complete("d0", prompt=prompt, max_tokens=24, **KVRS)
    before = servers.loaded_tokens("d1")
    found = servers.complete("d1", prompt=prompt, max_tokens=24, **KVRS)
    assert servers.loaded_tokens("d1") - before == BLOCKS * PAGE_TOKENS
    assert found["choices"][0]["token_ids"] == calm["choices"][0]["token_ids"]
