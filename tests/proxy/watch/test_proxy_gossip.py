"""A proxy that is a member: what it makes of others' words beside what it sees itself."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from kvrs.config.proxy import ProxySettings
from kvrs.core.watch import WatchLimits
from kvrs.gossip.facts import FailureFact, LinkFact
from kvrs.gossip.membership import Membership
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from kvrs.protocol.instance import GpuHealth, GpuState
from kvrs.transfer.meter import Measurement, lower_bound
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster
from kvrs_testkit.scripted import SECRET
from kvrs_testkit.scripted_model import expected_ids, text_of
from tests.gossip.gatherings import QUICK, Gathering, gathering, until

pytestmark = pytest.mark.network

GOSSIP = {"enabled": True, **QUICK}


@asynccontextmanager
async def cluster(
    **sections: Any,
) -> AsyncIterator[tuple[ProxyCluster, Gathering, Membership, Membership]]:
    """Two nodes of scripted instances and agents, a member for each node, and a proxy that is one
    as well.
    """
    async with gathering() as members:
        n0, n1 = [await members.add(name, ring=(SECRET,)) for name in ("n0", "n1")]
        ports = {str(member.id): members.port_of(member) for member in (n0, n1)}
        async with open_proxy_cluster(gossip_ports=ports, gossip=GOSSIP, **sections) as system:
            everybody = {"n0", "n1", "proxy-0"}
            await until(lambda: all(set(each.members) == everybody for each in (n0, n1)))

            async def knows_all() -> bool:
                return {row["id"] for row in (await system.state())["members"]} == everybody

            await system.until(knows_all)
            yield system, members, n0, n1


async def test_the_state_shows_members_and_what_they_say() -> None:
    """The members, each with its epoch and its record; and metrics count them."""
    async with cluster() as (system, _, n0, _):
        n0.publish("n1", LinkFact(1e9, 1e7, 0.5))

        async def shows_it() -> bool:
            rows = {row["id"]: row for row in (await system.state())["members"]}
            return "link" in rows["n0"]["record"]

        await system.until(shows_it)
        state, metrics = await system.state(), await system.metrics()

    rows = {row["id"]: row for row in state["members"]}
    assert {row["status"] for row in rows.values()} == {"alive"}
    assert rows["n0"]["record"]["link"]["n1"]["bytes_per_s"] == 1e9
    assert state["gossip"]["id"] == "proxy-0"
    assert 'kvrs_gossip_members{status="alive"} 3.0' in metrics


async def test_a_link_that_only_gossip_knows_counts_with_its_lower_bound() -> None:
    """An instance that has just been lost measured it, and its neighbour's agent still knows."""
    async with cluster() as (system, _, _, n1):
        n1.publish("n0", LinkFact(1e8, 1e7, 4.0))

        async def is_measured() -> bool:
            return any(link["measured"] for link in (await system.state())["links"])

        await system.until(is_measured)
        (link,) = (await system.state())["links"]

    assert (link["source"], link["target"]) == ("n0", "n1")
    assert (
        link["bytes_per_s"] <= lower_bound(Measurement(1e8, 1e7, 4.0)) <= link["bytes_per_s"] * 1.05
    )


async def test_an_instance_of_a_node_that_is_held_dead_is_given_up_when_its_own_word_is_overdue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that lost its power closes no connection; silence alone would count only much
    later.
    """
    limits = WatchLimits.of

    def patient(settings: ProxySettings) -> WatchLimits:
        return replace(limits(settings), usual_s=3600.0)

    monkeypatch.setattr(WatchLimits, "of", patient)
    async with cluster() as (system, members, _, n1):
        for name in ("p1", "d1"):
            system.instances[name].freeze()
            # What was written before is still read.
        system.agents["agent-n1"].freeze()
        await members.kill(n1)

        await system.until_health(p1="down", d1="down")
        health = await system.health()

    assert {name: health[name] for name in ("p0", "d0", "agent-n0")} == dict.fromkeys(
        ("p0", "d0", "agent-n0"), "up"
    )


async def test_an_instance_that_reports_lives_whatever_is_said_of_its_agent() -> None:
    """The death of an agent costs its node's streams nothing."""
    async with cluster() as (system, members, n0, n1):
        await members.kill(n1)
        n0.publish("d1", FailureFact(99, "a wrong report", 0.0))
        await until(lambda: n0.is_dead(NodeId("n1")))

        async def is_dead_here() -> bool:
            rows = {row["id"]: row["status"] for row in (await system.state())["members"]}
            return bool(rows["n1"] == "dead")

        await system.until(is_dead_here)
        await asyncio.sleep(1.5)  # Longer than a report may be late.
        health = await system.health()

    assert set(health.values()) == {"up"}


async def test_what_the_proxy_saw_die_is_told_with_its_epoch_until_it_is_back() -> None:
    """Others look at once whether it is gone for them as well."""
    async with cluster() as (system, _, n0, _):
        await system.instances["d1"].kill()
        await until(lambda: ("proxy-0", "d1") in n0.facts.of(FailureFact))
        told = n0.facts.of(FailureFact)[NodeId("proxy-0"), "d1"].fact
        await system.instances["d1"].restart()
        await until(lambda: not n0.facts.of(FailureFact))

        assert told.epoch == 1
        assert "connection" in told.cause


async def test_a_proxy_that_ends_says_goodbye() -> None:
    """Its end need not be detected."""
    async with cluster() as (system, _, n0, _):
        await system.proxy.close()

        await until(lambda: n0.members[NodeId("proxy-0")].status is Status.LEFT)


async def test_a_stream_leaves_a_failing_gpu_before_it_dies() -> None:
    """The answer goes on elsewhere while the instance still runs, and its client cannot tell. The
    old attempt ends at once: what the policy decides by must not change while it gathers.
    """
    async with cluster(policy={"recovery": {"gather_s": 3.0}}) as (system, _, n0, n1):
        gate = system.script.gate = asyncio.Event()
        system.script.gate_at = 5
        asking = asyncio.create_task(
            system.complete(prompt=[1, 2, 3], max_tokens=20, temperature=0)
        )
        await system.until_streams_hold(3)
        (stream,) = (await system.state())["streams"]
        node = "n" + stream["decode"][1:]
        member = {"n0": n0, "n1": n1}[node]
        member.publish("GPU-1", GpuHealth("GPU-1", 0, GpuState.FAILING, "xid 79", 0.0))

        await until(lambda: system.instances[stream["decode"]].aborted == 1)
        (halted,) = (await system.state())["streams"]

        async def has_moved() -> bool:
            (row,) = (await system.state())["streams"]
            return bool(row["attempt"] == 2)

        await system.until(has_moved)
        gate.set()
        status, body = await asking
        health, (moved,) = await system.health(), (await system.state())["recoveries"]

    (choice,) = msgspec.json.decode(body)["choices"]
    assert choice["text"] == "".join(map(text_of, expected_ids([1, 2, 3], 20)))
    assert (status, halted["attempt"]) == (200, 1)
    assert (moved["cause"], moved["from"]) == (
        "moved: its GPU is failing: xid 79",
        stream["decode"],
    )
    assert set(health.values()) == {"up"}
