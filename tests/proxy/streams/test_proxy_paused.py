"""Instances that are stopped and go on (SIGSTOP, SIGCONT), in processes of their own."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import pytest

from kvrs.config.file import parse_config
from kvrs.proxy.server import Proxy
from kvrs_testkit.scripted import SECRET, Script
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.vllm_cluster import PROMPT, Vllms, document
from kvrs_testkit.vllm_process import vllm_process
from tests.proxy.backends.conftest import vllm_model as vllm_model

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.usefixtures("quick_suspicion")]

TOKENS = 60
PACE_S = 0.01
# Longer than any limit but the longest one, which has room for a busy machine.
PAUSE_S, LONGEST_S = 4.0, 60.0


@dataclass
class Stoppable:
    system: Vllms
    processes: dict[str, asyncio.subprocess.Process]

    def pause(self, *names: str) -> None:
        for name in names:
            self.processes[name].send_signal(signal.SIGSTOP)

    def go_on(self, *names: str) -> None:
        for name in names:
            self.processes[name].send_signal(signal.SIGCONT)

    async def lost(self) -> float:
        """Attempts and instances that were given up."""
        failed = await self.system.count("kvrs_attempts_failed_total")
        return failed + await self.system.count("kvrs_worker_deaths_total")


@pytest.fixture
async def stoppable(vllm_model: str) -> AsyncIterator[Stoppable]:
    """A prefill and two decode instances."""
    async with AsyncExitStack() as stack:
        processes, ports = {}, {}
        for name, node in (("p0", "n0"), ("d0", "n0"), ("d1", "n1")):
            role = "prefill" if name == "p0" else "decode"
            started = vllm_process(name, node, role, PACE_S)
            processes[name], ports[name] = await stack.enter_async_context(started)
        settings = document(vllm_model, ports, proxy={"token_gap_s": LONGEST_S})
        proxy = Proxy(parse_config(settings), SECRET)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        system = Vllms(proxy, Script(), {}, {}, http)
        await system.until_health(p0="up", d0="up", d1="up")
        yield Stoppable(system, processes)


async def test_streams_wait_for_decode_instances_that_are_all_stopped(
    stoppable: Stoppable,
) -> None:
    """Nothing else can take them: their attempts go on when the instances do, and so do those of
    requests that came meanwhile.
    """
    system = stoppable.system
    asked = [asyncio.create_task(system.ids(max_tokens=TOKENS)) for _ in range(8)]
    await system.until_streams_hold(10, count=8)

    stoppable.pause("d0", "d1")
    await asyncio.sleep(PAUSE_S / 2)
    asked += [asyncio.create_task(system.ids(max_tokens=TOKENS)) for _ in range(2)]
    await asyncio.sleep(PAUSE_S / 2)
    stoppable.go_on("d0", "d1")
    answers = await asyncio.gather(*asked)

    assert answers == [expected_ids(PROMPT, TOKENS)] * 10
    assert await stoppable.lost() == 0
    assert (await system.state())["recoveries"] == []
