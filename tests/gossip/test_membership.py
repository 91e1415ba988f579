import asyncio
import socket
from typing import Any

import pytest
import uvloop

from kvrs.gossip import membership, swim
from kvrs.gossip.facts import FactKind, HolderFact, LinkFact, Superseded
from kvrs.gossip.membership import Membership, parse_address
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from tests.gossip.gatherings import gathering, until

pytestmark = pytest.mark.network

A, B, C = NodeId("n0"), NodeId("n1"), NodeId("n2")


def statuses(member: Membership) -> dict[NodeId, Status]:
    return {each.id: each.status for each in member.members.values()}


async def test_a_node_with_one_seed_learns_all_members_and_facts() -> None:
    """A proxy whose file names the agents finds other proxies through them."""
    async with gathering() as system:
        one = await system.add(A)
        one.publish("agent-n0", HolderFact(100, 10))
        two = await system.add(B)
        del system.seeds[B]
        three = await system.add(C)
        three.publish(A, LinkFact(1e9, 1e6, 0.5))

        members = (one, two, three)
        await until(
            lambda: all(
                statuses(each) == dict.fromkeys((A, B, C), Status.ALIVE) for each in members
            )
        )
        await until(
            lambda: all(
                (C, A) in each.facts.of(LinkFact) and (A, "agent-n0") in each.facts.of(HolderFact)
                for each in members
            )
        )
        three.withdraw(FactKind.LINK, A)
        await until(lambda: not any(each.facts.of(LinkFact) for each in members))

        assert two.facts.of(HolderFact)[A, "agent-n0"].fact == HolderFact(100, 10)


async def test_deaths_departures_and_returns_are_distinguished() -> None:
    """A later process has a higher epoch, so no update about the former one applies to it."""
    async with gathering() as system:
        one, two, three = [await system.add(name) for name in (A, B, C)]
        await until(lambda: all(len(statuses(each)) == 3 for each in (one, two, three)))
        two.publish("agent-n1", HolderFact(1, 1))
        await until(lambda: (B, "agent-n1") in one.facts.of(HolderFact))

        port = system.port_of(two)
        await system.kill(two)
        await until(lambda: one.is_dead(B) and three.is_dead(B))
        of_the_dead = dict(one.facts.of(HolderFact))
        await system.leave(three)
        await until(lambda: statuses(one)[C] is Status.LEFT)
        again = await system.add(B, port=port)
        await until(
            lambda: statuses(one)[B] is Status.ALIVE and statuses(again).get(A) is Status.ALIVE
        )

        assert (of_the_dead, one.is_dead(C), one.is_dead(NodeId("unknown"))) == ({}, False, False)
        assert one.members[B].epoch == again.describe()["epoch"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_the_only_agent_is_a_member_again_after_a_restart(*, leaves: bool) -> None:
    """A proxy on any free port is no seed of the agent, so the proxy has to contact it."""
    async with gathering() as system:
        agent = await system.add(A)
        port, proxy = system.port_of(agent), await system.add(B)
        await until(lambda: A in statuses(proxy) and B in statuses(agent))
        if leaves:
            await system.leave(agent)
        else:
            await system.kill(agent)
        gone = Status.LEFT if leaves else Status.DEAD
        await until(lambda: statuses(proxy)[A] is gone)

        del system.seeds[B]
        again = await system.add(A, port=port)
        await until(
            lambda: statuses(proxy)[A] is Status.ALIVE and statuses(again).get(B) is Status.ALIVE
        )


async def test_the_older_of_two_processes_with_one_name_stops_and_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not go on alone, with all others declared dead because its packets are rejected."""
    monkeypatch.setattr(swim, "_STARTUP_INTERVALS", 0.0)
    async with gathering() as system:
        one, older = await system.add(A), await system.add(B)
        await until(lambda: B in statuses(one) and A in statuses(older))

        received = system.received[B]
        younger = await system.add(B)
        await until(lambda: Superseded(younger.describe()["epoch"]) in received)

        assert older.describe()["over"]
        assert not one.is_dead(B)
        assert not older.is_dead(A)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("::1:7000", ("::1", 7000)),
        ("localhost:80", None),
        ("10.0.0.1:0", None),
        ("10.0.0.1:65536", None),
        ("10.0.0.1:x", None),
        ("10.0.0.1", None),
        ("", None),
    ],
)
def test_only_numeric_addresses_are_used(text: str, address: Any) -> None:
    """A name lookup for a member's address would block the event loop, and reveal it to a name
    server.
    """
    assert parse_address(text) == address


def test_a_tick_that_is_overdue_can_be_timed_again() -> None:
    """uvloop's handle for a time that has come is no timer, and has no `when`."""

    async def publish_twice() -> None:
        async with gathering() as system:
            one = await system.add(A)
            started_s = one._clock()
            one._clock = lambda: started_s + 3600.0
            for number in range(2):
                one._timer = None if number == 0 else one._timer
                one._set_timer()

            assert one._timer is not None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(publish_twice())


async def test_a_named_seed_that_gets_another_address_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod of a headless service has an address of its own after each start, also if it was a
    member before, and knows no other one.
    """
    asked: list[str] = []
    answers = {"gone.peers": "127.0.0.9"} | {host: host for host in ("127.0.0.1", "127.0.0.8")}

    async def first_address(host: str, family: int = socket.AF_INET) -> str:
        asked.append(host)
        if host not in answers:
            raise socket.gaierror("no such name")
        return answers[host]

    monkeypatch.setattr(membership, "first_address", first_address)
    async with gathering() as system:
        one = await system.add(A)
        system.seeds = {A: f"n1.peers:{system.port_of(one)}", C: "gone.peers:9"}
        two = await system.add(B)
        await until(lambda: asked.count("n1.peers") > 1)
        before = A in two.members
        answers["n1.peers"] = "127.0.0.1"
        await until(lambda: statuses(two).get(A) is Status.ALIVE)
        found = len(asked)
        await until(lambda: asked.count("gone.peers") > 3)
        while_up = asked[found:].count("n1.peers")

        port, of_the_first = system.port_of(one), two.members[A].address
        await system.kill(one)
        await until(lambda: two.is_dead(A))
        answers["n1.peers"] = "127.0.0.8"
        system.seeds = {}
        again = await system.add(A, port=port, host="127.0.0.8")
        await until(lambda: statuses(two)[A] is Status.ALIVE)
        of_the_second = again.members[A].address

    assert not before
    assert (of_the_first, of_the_second) == (f"127.0.0.1:{port}", f"127.0.0.8:{port}")
    # Of a member that is up no name is looked up.
    assert while_up == 0
