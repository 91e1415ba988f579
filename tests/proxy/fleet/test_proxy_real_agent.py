"""The proxy and agents as they are: `python -m kvrs.agent`, processes of their own, with pages
pushed as an engine does.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.file import Config, dump_config, parse_config
from kvrs.config.sections import TransferSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.pages import Tag
from kvrs.transfer.checkpoint_sender import PagePusher
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import CheckpointClaim, Identity, Peer, StoredPages
from kvrs_lab.cluster.ports import resolve_ports
from kvrs_testkit.awaited import forked
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import GEOMETRY, SECRET
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = [pytest.mark.process, pytest.mark.network]

REQUEST = {"prompt": list(range(40)), "max_tokens": 8, "temperature": 0}
TAGS = tuple(Tag(bytes([number]) * 16) for number in range(2))
PAGES = [memoryview(bytes([number]) * GEOMETRY.page_bytes) for number in range(2)]
NODES = (NodeId("n0"), NodeId("n1"))


PORTS = {"port": 0, "admin_port": 0}  # Any: other tests run beside these.


class Agent:
    """A process of its own, which can be killed and started again at the same ports."""

    def __init__(self, config: Config, file: Path, node: NodeId) -> None:
        self.settings = next(each for each in config.cluster.nodes if each.id == node)
        self._command = ["kvrs.agent", "--config", str(file), "--node", node]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await forked(
            *self._command,
            environment=os.environ | {"KVRS_SECRET": SECRET.decode()},
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            assert await self._process.stdout.readline() == b"ready\n"

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.communicate()

    async def end(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.communicate()


@pytest.fixture
async def agents(tmp_path: Path) -> AsyncIterator[dict[str, Agent]]:
    """One per node, up."""
    instances = [[{"id": f"b{n}", "role": "both"}] for n in range(2)]
    nodes = [{"id": node, "instances": instances[n]} for n, node in enumerate(NODES)]
    backup = {"mode": "remote", "directory": str(tmp_path), "capacity_bytes": 1 << 20}
    config = resolve_ports(
        parse_config({"proxy": PORTS, "cluster": {"nodes": nodes}, "backup": backup})
    )
    file = tmp_path / "kvrs.yaml"
    file.write_text(dump_config(config))
    async with AsyncExitStack() as stack:
        made = {}
        for node in NODES:
            made[f"agent-{node}"] = agent = Agent(config, file, node)
            await agent.start()
            stack.push_async_callback(agent.end)
        yield made


@asynccontextmanager
async def pusher() -> AsyncIterator[PagePusher]:
    settings = TransferSettings()
    identity = Identity(InstanceId("b0"), NODES[0], 1, "same", GEOMETRY.page_bytes)
    made = PagePusher(
        lambda: identity, SECRET, settings, SendingLinks(settings, SendingFaults(), NODES[0])
    )
    try:
        yield made
    finally:
        await made.close()


async def test_a_stream_is_protected_by_real_agents(
    agents: dict[str, Agent], build: ProxyClusterBuilder
) -> None:
    """Reserved, stored, shown, renewed beyond its first lease, and given back when the stream
    ends.
    """
    ports = {str(agent.settings.id): agent.settings.agent.port for agent in agents.values()}
    system = await build(agent_ports=ports, backup={"mode": "remote"}, transfer={"lease_s": 2.4})
    system.script.gate, system.script.gate_at = asyncio.Event(), 3
    asked = asyncio.create_task(system.complete(**REQUEST))
    await system.until_streams_hold(3)
    row = await stream_of(system)
    (name,) = row["protected"]
    settings = agents[name].settings
    peer = Peer(settings.agent_id, settings.id, settings.agent.host, settings.agent.page_port)
    claim = CheckpointClaim(StreamId(row["id"]), 0, row["attempt"])

    async with pusher() as engine:
        await engine.offer(peer, claim, 4 * GEOMETRY.page_bytes, TAGS)
        await engine.store(peer, [StoredPages(claim, 0, TAGS, PAGES)])
        await system.until(protected(system, name, 2))
        await asyncio.sleep(3.0)
        renewed = await stream_of(system)
        reserved = await shown(system, name)
        system.script.gate.set()
        assert (await asked)[0] == 200
        await system.until(given_back(system, name))

    assert (renewed["protected"], renewed["unprotected"]) == ({name: 2}, None)
    assert (reserved["reserved_bytes"], reserved["checkpoints"]) == (4 * GEOMETRY.page_bytes, 1)


async def test_a_killed_agent_is_lost_and_returns_in_another_life(
    agents: dict[str, Agent], build: ProxyClusterBuilder
) -> None:
    """An agent's loss shows by the end of its connection, like an instance's."""
    ports = {str(agent.settings.id): agent.settings.agent.port for agent in agents.values()}
    system = await build(agent_ports=ports, backup={"mode": "both"})
    before = await shown(system, "agent-n0")

    await agents["agent-n0"].kill()
    await system.until_health(**{"agent-n0": "down", "agent-n1": "up"})
    await agents["agent-n0"].start()
    await system.until_health(**{"agent-n0": "up"})

    after = await shown(system, "agent-n0")
    assert after["epoch"] > before["epoch"]
    assert after["pid"] != before["pid"]


async def stream_of(system: ProxyCluster) -> Any:
    (row,) = (await system.state())["streams"]
    return row


async def shown(system: ProxyCluster, agent: str) -> Any:
    return next(row for row in (await system.state())["agents"] if row["id"] == agent)


def protected(system: ProxyCluster, agent: str, pages: int) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return bool((await stream_of(system))["protected"] == {agent: pages})

    return holds


def given_back(system: ProxyCluster, agent: str) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        row = await shown(system, agent)
        return bool(row["reserved_bytes"] == 0 and row["checkpoints"] == 0)

    return holds
