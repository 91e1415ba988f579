"""Gossip of an agent with a scripted instance on its node."""

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.agent import gossip, gpu
from kvrs.config.file import parse_config
from kvrs.gossip.facts import FailureFact, HolderFact, InstanceFact, SlotsFact
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from kvrs.protocol.instance import AgentInfo, GpuHealth, GpuState, Role
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.scripted import Script, Scripted
from tests.agent.agents import SECRET, ask, document, running, session
from tests.agent.fake_nvml import FakeGpu, FakeNvml
from tests.gossip.gatherings import QUICK, gathering, until

pytestmark = pytest.mark.network

N0 = NodeId("n0")


def with_gossip(base: Path, instance_port: int) -> dict[str, Any]:
    written = document(base)
    (node,) = written["cluster"]["nodes"]
    node["instances"][0]["port"] = instance_port
    node["agent"]["gossip_port"] = free_ports(1)[0]
    return written | {
        "gossip": {"enabled": True, **QUICK},
        "backup": {"mode": "off", "directory": str(base)},
    }


async def test_an_agent_publishes_the_load_and_deaths_of_its_instances(tmp_path: Path) -> None:
    """A node without a connection to an instance has its load, slots and death by gossip."""
    instance = Scripted("e0", "n0", role=Role.BOTH, script=Script(), created=1, secret=SECRET)
    await instance.start()
    async with gathering() as members:
        other = await members.add("n1", ring=(SECRET,))
        written = with_gossip(tmp_path, instance.port)
        written["proxy"] = {"id": "n1", "gossip_port": members.port_of(other)}
        config = parse_config(written)
        async with running(config), session(config) as http:
            facts = other.facts
            await until(
                lambda: (N0, "e0") in facts.of(InstanceFact) and (N0, "e0") in facts.of(SlotsFact)
            )
            shown = facts.of(InstanceFact)[N0, "e0"].fact
            slots = facts.of(SlotsFact)[N0, "e0"].fact
            holder = facts.of(HolderFact)[N0, "agent-n0"].fact
            info = await ask(http, "/kvrs/v1/agent", AgentInfo)
            await instance.kill()
            await until(lambda: (N0, "e0") in facts.of(FailureFact))
            died = facts.of(FailureFact)[N0, "e0"].fact
            left = (N0, "e0") in facts.of(InstanceFact)
            await instance.restart()
            await until(lambda: (N0, "e0") in facts.of(InstanceFact) and not facts.of(FailureFact))
            again = facts.of(InstanceFact)[N0, "e0"].fact
        await until(lambda: other.members[N0].status is Status.LEFT)
    await instance.close()

    assert (shown.role, shown.epoch, again.epoch) == (Role.BOTH, 1, 2)
    assert slots == SlotsFact(config.policy.slots_max, 0.0)
    assert (holder, info.capacity_bytes) == (HolderFact(0, 0), 0)
    assert isinstance(died, FailureFact)
    assert (died.epoch, left) == (1, False)
    assert "connection" in died.cause


async def test_an_instance_that_comes_back_elsewhere_is_watched_there(tmp_path: Path) -> None:
    """A reload names its new address."""
    olds, news = (
        Scripted("e0", "n0", script=Script(), created=created, secret=SECRET) for created in (1, 2)
    )
    await olds.start()
    await news.start()
    async with gathering() as members:
        other = await members.add("n1", ring=(SECRET,))
        written = with_gossip(tmp_path, olds.port)
        written["proxy"] = {"id": "n1", "gossip_port": members.port_of(other)}
        config = parse_config(written)
        facts = other.facts
        async with running(config, read=lambda: parse_config(written)):
            await until(lambda: (N0, "e0") in facts.of(InstanceFact))
            await olds.kill()
            await until(lambda: (N0, "e0") in facts.of(FailureFact))
            written["cluster"]["nodes"][0]["instances"][0]["port"] = news.port
            signal.raise_signal(signal.SIGHUP)
            await until(lambda: (N0, "e0") in facts.of(InstanceFact) and not facts.of(FailureFact))
    await olds.close()
    await news.close()


async def test_an_agent_serves_while_nvml_is_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that hangs with a dying GPU hangs already when it is opened."""
    let_go, waited = threading.Event(), list[bool]()

    def hang() -> None:
        waited.append(let_go.wait(60.0))

    monkeypatch.setattr(gossip, "open_sensor", hang)
    config = parse_config(with_gossip(tmp_path, 1))
    async with running(config), session(config) as http:
        info = await ask(http, "/kvrs/v1/agent", AgentInfo)
        given_up = list(waited)
        let_go.set()

    assert (info.id, given_up) == ("agent-n0", [])


async def test_a_gpu_with_an_xid_is_published_as_failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the library through the agent to the table of another member, which a proxy decides
    by.
    """
    monkeypatch.setattr(gpu, "_POLL_S", 0.05)
    board = FakeGpu("GPU-n0")
    library = FakeNvml(board)
    monkeypatch.setattr(gossip, "open_sensor", lambda: gpu.open_sensor(lambda: library))
    async with gathering() as members:
        other = await members.add("n1", ring=(SECRET,))
        written = with_gossip(tmp_path, 1)
        written["proxy"] = {"id": "n1", "gossip_port": members.port_of(other)}
        async with running(parse_config(written)):
            facts, at = other.facts, (N0, "GPU-n0")
            await until(lambda: at in facts.of(GpuHealth))
            before = facts.of(GpuHealth)[at].fact
            library.xid(board, 79)
            await until(lambda: facts.of(GpuHealth)[at].fact != before)
            after = facts.of(GpuHealth)[at].fact

    assert (before.state, after.state) == (GpuState.HEALTHY, GpuState.FAILING)
    assert after.reason == "xid 79"


async def test_members_are_shown_only_with_the_secret(tmp_path: Path) -> None:
    """Other requests get 401."""
    config = parse_config(with_gossip(tmp_path, 1))
    async with running(config), session(config) as http, aiohttp.ClientSession() as stranger:
        async with http.get("/kvrs/v1/members") as answer:
            known = await answer.json()
        async with stranger.get(f"{config.cluster.nodes[0].agent.url}/kvrs/v1/members") as refused:
            status = refused.status
        await asyncio.sleep(0)

    assert [row["id"] for row in known["members"]] == ["n0"]
    assert status == 401
