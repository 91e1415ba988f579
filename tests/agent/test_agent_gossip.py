"""An agent as its node's member, in front of a scripted instance."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from kvrs.config import parse_config
from kvrs.gossip.facts import FailureFact, HolderFact, SlotsFact
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from kvrs.protocol.instance import AgentInfo, Role
from tests.agent.agents import SECRET, ask, document, free_ports, running, session
from tests.gossip.gatherings import QUICK, gathering, until
from tests.proxy.scripted import Script, Scripted

N0 = NodeId("n0")


def with_gossip(base: Path, instance_port: int) -> dict[str, Any]:
    written = document(base)
    (node,) = written["cluster"]["nodes"]
    node["instances"][0]["port"] = instance_port
    node["agent"]["gossip_port"] = free_ports(1)[0]
    return written | {"gossip": {"enabled": True, **QUICK}, "backup": {"mode": "off", "directory": str(base)}}


async def test_an_agent_says_what_runs_beside_it_and_what_died(tmp_path: Path) -> None:
    """Whoever has no connection to an instance knows its load, its slots and its death all the same."""
    instance = Scripted("e0", "n0", role=Role.BOTH, script=Script(), created=1)
    await instance.start()
    async with gathering() as members:
        other = await members.add("n1", ring=(SECRET,))
        written = with_gossip(tmp_path, instance.port)
        written["proxy"] = {"id": "n1", "gossip_port": members.port_of(other)}
        config = parse_config(written)
        async with running(config), session(config) as http:
            facts = other.facts
            await until(lambda: (N0, "e0") in facts.instances and (N0, "e0") in facts.slots)
            shown, slots = facts.instances[N0, "e0"].fact, facts.slots[N0, "e0"].fact
            holder = facts.holders[N0, "agent-n0"].fact
            info = await ask(http, "/kvrs/v1/agent", AgentInfo)
            await instance.kill()
            await until(lambda: (N0, "e0") in facts.failures)
            died, left = facts.failures[N0, "e0"].fact, (N0, "e0") in facts.instances
            await instance.restart()
            await until(lambda: (N0, "e0") in facts.instances and not facts.failures)
            again = facts.instances[N0, "e0"].fact
        await until(lambda: other.members[N0].status is Status.LEFT)
    await instance.close()

    assert (shown.role, shown.epoch, again.epoch) == (Role.BOTH, 1, 2)
    assert slots == SlotsFact(config.policy.slots_max, 0.0)
    assert (holder, info.capacity_bytes) == (HolderFact(0, 0), 0)
    assert isinstance(died, FailureFact)
    assert (died.epoch, left) == (1, False)
    assert "connection" in died.cause


async def test_an_agent_shows_its_members_to_who_has_the_secret(tmp_path: Path) -> None:
    """And to nobody else."""
    config = parse_config(with_gossip(tmp_path, 1))
    async with running(config), session(config) as http, aiohttp.ClientSession() as stranger:
        async with http.get("/kvrs/v1/members") as answer:
            known = await answer.json()
        async with stranger.get(f"{config.cluster.nodes[0].agent.url}/kvrs/v1/members") as refused:
            status = refused.status
        await asyncio.sleep(0)

    assert [row["id"] for row in known["members"]] == ["n0"]
    assert status == 401
