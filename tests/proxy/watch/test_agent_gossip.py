"""Gossip of an agent with a scripted instance on its node."""

import asyncio
import signal
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrs.agent import gossip, gpu
from kvrs.config.file import parse_config
from kvrs.core.fleet import silence
from kvrs.gossip.facts import FailureFact, HolderFact, SlotsFact
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from kvrs.protocol.instance import AgentInfo, Role
from kvrs_testkit import scripted
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.proxy_cluster import open_proxy_cluster
from kvrs_testkit.scripted import Script, Scripted
from kvrs_testkit.scripted_model import expected_ids, text_of
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
            await until(lambda: (N0, "e0") in facts.instances)
            await olds.kill()
            await until(lambda: (N0, "e0") in facts.failures)
            written["cluster"]["nodes"][0]["instances"][0]["port"] = news.port
            signal.raise_signal(signal.SIGHUP)
            await until(lambda: (N0, "e0") in facts.instances and not facts.failures)
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


async def test_streams_are_moved_off_a_gpu_with_an_xid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the library, through the agent's gossip and the proxy's policy: answers are exact, and
    the instance still runs.
    """
    # Streams that wait at a gate are not to be taken for silent ones.
    monkeypatch.setattr(silence, "SHORTEST_SILENCE_S", 60.0)
    monkeypatch.setattr(gpu, "_POLL_S", 0.05)
    boards = [FakeGpu("GPU-n0"), FakeGpu("GPU-n1")]
    libraries = [FakeNvml(board) for board in boards]
    left = libraries.copy()
    monkeypatch.setattr(gossip, "open_sensor", lambda: gpu.open_sensor(lambda: left.pop(0)))
    nodes = ("n0", "n1")
    ports = [dict(zip(nodes, free_ports(2), strict=True)) for _ in range(3)]
    named = [
        {"port": port, "page_port": pages, "gossip_port": talk}
        for port, pages, talk in zip(*(p.values() for p in ports), strict=True)
    ]
    listed = [
        {"id": node, "agent": agent, "instances": [{"id": f"unseen-{node}", "role": "both"}]}
        for node, agent in zip(nodes, named, strict=True)
    ]
    config = parse_config(
        {
            "cluster": {"nodes": listed},
            "gossip": {"enabled": True, **QUICK},
            "backup": {"mode": "off", "directory": str(tmp_path)},
        }
    )
    prompt, tokens = [1, 2, 3], 20
    async with running(config, scripted.SECRET), AsyncExitStack() as later:
        await until(lambda: len(left) == 1)
        await later.enter_async_context(running(config, scripted.SECRET, NodeId("n1")))
        await until(lambda: not left)
        sections: dict[str, Any] = {
            "gossip": {"enabled": True, **QUICK},
            "policy": {"gpu": {"failing": "move"}},
        }
        system = await later.enter_async_context(
            open_proxy_cluster(agent_ports=ports[0], gossip_ports=ports[2], **sections)
        )
        gate, system.script.gate_at = asyncio.Event(), 5
        system.script.gate = gate
        asking = [
            asyncio.create_task(system.complete(prompt=prompt, max_tokens=tokens, temperature=0))
            for _ in range(6)
        ]
        await system.until_streams_hold(3, count=6)

        libraries[0].xid(boards[0], 79)

        async def nothing_runs_there() -> bool:
            return all(row["decode"] == "d1" for row in (await system.state())["streams"])

        await system.until(nothing_runs_there)
        gate.set()
        answers = await asyncio.gather(*asking)
        health, moves = await system.health(), (await system.state())["recoveries"]

    wanted = "".join(map(text_of, expected_ids(prompt, tokens)))
    assert [msgspec.json.decode(body)["choices"][0]["text"] for _, body in answers] == [wanted] * 6
    assert {move["cause"] for move in moves} == {"moved: its GPU is failing: xid 79"}
    assert set(health.values()) == {"up"}


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
