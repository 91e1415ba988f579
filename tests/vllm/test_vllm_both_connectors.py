"""NIXL's connector and that of kvrs in the same real vLLM servers: prompts are handed over by the
one, and streams restored by the other.
"""

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.ids import StreamId
from kvrs.protocol.instance import CheckpointTarget, KvrsParams
from kvrs_testkit.vllm_clients import Clients, clients
from kvrs_testkit.vllm_servers import PAGE_TOKENS, PYTHON_ENV, VllmServers, vllm_config
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

PROMPT = [*range(5, 175)]
PAGES = len(PROMPT) // PAGE_TOKENS
TOKENS, CUT = 300, 150
DEADLINE_S = 240.0
STATISTICS_S = 11.0  # vLLM logs and resets its statistics every 10 s.


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    config = vllm_config(tmp_path_factory.mktemp("both"), with_kvrs=True)
    with VllmServers(config, os.environ[PYTHON_ENV]) as servers:
        agents = [str(node.agent_id) for node in servers.config.cluster.nodes]
        servers.start(*agents, *servers.names)
        servers.wait_ready(*servers.names)
        yield servers


Place = tuple[NodeSettings, InstanceSettings]


def place(servers: VllmServers, name: str) -> Place:
    return next(each for each in servers.config.cluster.instances() if each[1].id == name)


def params(name: str, attempt: int, node: NodeSettings, **more: Any) -> KvrsParams:
    stream = StreamId(name.encode().hex().ljust(32, "0"))
    target = CheckpointTarget(node.agent_id, 8 << 20)
    return KvrsParams(stream, attempt, len(PROMPT), checkpoints=[target], **more)


async def prefilled(client: Clients, name: str) -> dict[str, Any]:
    """A hand-off of p0, whose pages the agent of n1 has in the end, though p0 is done with it."""
    (_, p0), (n1, _) = place(client.servers, "p0"), place(client.servers, "d1")
    before = await client.report(p0)
    asked = params(name, 1, n1)
    found = await client.hand_off(p0, PROMPT, asked, salt=name)
    assert found["do_remote_prefill"]

    while (await client.source(n1, asked.stream)).pages < PAGES:
        await asyncio.sleep(0.02)
    while (report := await client.report(p0)).pinned_blocks:
        await asyncio.sleep(0.02)
    assert report.pages_saved - before.pages_saved == PAGES
    assert report.off_reason is None
    return found


async def test_a_stream_that_nixl_handed_over_is_restored_by_kvrs(servers: VllmServers) -> None:
    """Its decode server dies; what prefill and decode have saved is one checkpoint."""
    (_, d0), (n1, d1) = place(servers, "d0"), place(servers, "d1")
    async with asyncio.timeout(DEADLINE_S), clients(servers) as client:
        before = servers.counters("d1")
        calm = await client.generate(
            d1, PROMPT, TOKENS, salt="calm", hand_off=await prefilled(client, "calm")
        )
        pulled = servers.counters("d1")
        assert pulled["pulled_tokens"] - before["pulled_tokens"] >= PAGES * PAGE_TOKENS
        assert pulled["pulled_bytes"] > before["pulled_bytes"]
        assert (await client.report(d1)).pages_loaded == 0

        hand_off = await prefilled(client, "cut")
        cut = await client.generate(
            d0, PROMPT, TOKENS, params("cut", 1, n1), CUT, salt="cut", hand_off=hand_off
        )
        assert CUT <= len(cut) < TOKENS
        source = await client.source(n1, params("cut", 1, n1).stream)
        assert source.pages * PAGE_TOKENS >= 0.9 * (len(PROMPT) + CUT)
        again = params("cut", 2, n1, sources=[source])
        rest = await client.generate(d1, PROMPT + cut, TOKENS - len(cut), again, salt="cut")

        assert cut + rest == calm
        report = await client.report(d1)
        assert (report.pages_loaded, report.off_reason) == (source.pages, None)
        assert servers.counters("d1")["pulled_bytes"] == pulled["pulled_bytes"]


async def test_with_prefill_dead_its_pages_come_from_the_agent(servers: VllmServers) -> None:
    """The hand-off cannot be pulled any more; servers live on with statistics."""
    n1, d1 = place(servers, "d1")
    async with asyncio.timeout(DEADLINE_S), clients(servers) as client:
        calm = await client.generate(d1, PROMPT, TOKENS, salt="calm of dead")
        await prefilled(client, "dead")
        servers.kill("p0")
        before = await client.report(d1)

        source = await client.source(n1, params("dead", 1, n1).stream)
        again = params("dead", 2, n1, sources=[source])
        assert await client.generate(d1, PROMPT, TOKENS, again, salt="dead") == calm

        assert (await client.report(d1)).pages_loaded - before.pages_loaded == PAGES
        await asyncio.sleep(STATISTICS_S)
        assert await client.generate(d1, PROMPT, 20, salt="later") == calm[:20]
        assert (await client.report(d1)).off_reason is None
