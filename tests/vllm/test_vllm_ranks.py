"""The kvrs connector in real vLLM of several ranks: each stores the cells of its own heads, and any
number of ranks loads them.
"""

import asyncio
import os
from collections.abc import Iterator

import pytest

from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.ids import StreamId
from kvrs.protocol.instance import CheckpointTarget, KvrsParams
from kvrs_testkit.vllm_clients import Clients, clients
from kvrs_testkit.vllm_servers import PAGE_TOKENS, PYTHON_ENV, VllmServers, connector_config
from tests.vllm.marks import REAL_VLLM

pytestmark = REAL_VLLM

PROMPT = [*range(5, 45)]
# The server computes on while its death is on its way, on a busy machine for long.
TOKENS, CUT = 480, 150
DEADLINE_S = 240.0
TWO = ["--tensor-parallel-size", "2"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    """Two decode instances of two ranks, and an agent on the node of each."""
    config = connector_config(tmp_path_factory.mktemp("ranks"))
    with VllmServers(config, os.environ[PYTHON_ENV]) as servers:
        servers.flags |= {"d0": TWO, "d1": TWO}
        agents = [str(node.agent_id) for node in servers.config.cluster.nodes]
        servers.start(*agents, *servers.names)
        servers.wait_ready(*servers.names)
        yield servers


async def moved(
    client: Clients,
    here: InstanceSettings,
    there: InstanceSettings,
    node: NodeSettings,
    name: str,
    kill_at: int | None = None,
) -> list[int]:
    """A stream that goes on at another instance, which loads all its pages from an agent."""
    stream = StreamId(name.encode().hex().ljust(32, "0"))
    target = CheckpointTarget(node.agent_id, 8 << 20)
    first = KvrsParams(stream, 1, len(PROMPT), checkpoints=[target])
    tokens = TOKENS if kill_at else CUT
    cut = await client.generate(here, PROMPT, tokens, first, kill_at, salt=name)
    assert CUT <= len(cut) < TOKENS

    source, before = await client.source(node, stream), await client.report(there)
    assert source.pages * PAGE_TOKENS >= 0.9 * CUT
    again = KvrsParams(stream, 2, len(PROMPT), sources=[source])
    rest = await client.generate(there, PROMPT + cut, TOKENS - len(cut), again, salt=name)

    report = await client.report(there)
    assert report.pages_loaded - before.pages_loaded == source.pages
    assert report.off_reason is None
    return cut + rest


async def test_two_ranks_and_one_load_each_other_s_pages(servers: VllmServers) -> None:
    (_, d0), (n1, d1) = servers.config.cluster.instances()
    async with asyncio.timeout(DEADLINE_S), clients(servers) as client:
        calm = await client.generate(d1, PROMPT, TOKENS, salt="calm")
        assert await moved(client, d0, d1, n1, "two to two", kill_at=CUT) == calm

        servers.flags["d0"] = []
        servers.start("d0")
        await asyncio.to_thread(servers.wait_ready, "d0")
        assert await moved(client, d1, d0, n1, "two to one") == calm
        assert await moved(client, d0, d1, n1, "one to two") == calm
