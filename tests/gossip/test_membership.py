from typing import Any

import pytest

from kvrs.gossip import detector
from kvrs.gossip.events import Superseded
from kvrs.gossip.facts import HolderFact, Kind, LinkFact
from kvrs.gossip.membership import Membership, parse_address
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from tests.gossip.gatherings import gathering, until

A, B, C = NodeId("n0"), NodeId("n1"), NodeId("n2")


def statuses(member: Membership) -> dict[NodeId, Status]:
    return {each.id: each.status for each in member.members.values()}


async def test_whoever_knows_one_member_comes_to_know_all_and_what_they_say() -> None:
    """A proxy whose file names the agents finds other proxies through them."""
    async with gathering() as house:
        one = await house.add(A)
        one.publish("agent-n0", HolderFact(100, 10))
        two = await house.add(B)
        del house.seeds[B]
        three = await house.add(C)
        three.publish(A, LinkFact(1e9, 1e6, 0.5))

        everybody = (one, two, three)
        await until(lambda: all(statuses(each) == dict.fromkeys((A, B, C), Status.ALIVE) for each in everybody))
        await until(lambda: all((C, A) in each.facts.links and (A, "agent-n0") in each.facts.holders for each in everybody))
        three.withdraw(Kind.LINK, A)
        await until(lambda: not any(each.facts.links for each in everybody))

        assert two.facts.holders[A, "agent-n0"].fact == HolderFact(100, 10)


async def test_who_dies_is_dead_who_leaves_has_left_and_who_comes_back_lives() -> None:
    """The epoch of a later process is higher by itself, so no word of its former life says anything about it."""
    async with gathering() as house:
        one, two, three = [await house.add(name) for name in (A, B, C)]
        await until(lambda: all(len(statuses(each)) == 3 for each in (one, two, three)))
        two.publish("agent-n1", HolderFact(1, 1))
        await until(lambda: (B, "agent-n1") in one.facts.holders)

        port = house.port_of(two)
        await house.kill(two)
        await until(lambda: one.is_dead(B) and three.is_dead(B))
        of_the_dead = dict(one.facts.holders)
        await three.close()
        await until(lambda: statuses(one)[C] is Status.LEFT)
        again = await house.add(B, port=port)
        await until(lambda: statuses(one)[B] is Status.ALIVE and statuses(again).get(A) is Status.ALIVE)

        assert (of_the_dead, one.is_dead(C), one.is_dead(NodeId("nobody"))) == ({}, False, False)
        assert one.members[B].epoch == again.describe()["epoch"]
        house._members.remove(three)


async def test_a_clock_that_was_set_back_keeps_nobody_out() -> None:
    """The epoch of a process is the wall clock at its start: who began with too low a number hears so, and takes a higher."""
    async with gathering() as house:
        one, two = await house.add(A), await house.add(B)
        await until(lambda: B in statuses(one) and A in statuses(two))
        port, epoch = house.port_of(two), one.members[B].epoch
        await house.kill(two)
        await until(lambda: one.is_dead(B))

        again = await house.add(B, epoch=epoch - 3600 * 10**9, port=port)
        await until(lambda: statuses(one)[B] is Status.ALIVE and statuses(again).get(A) is Status.ALIVE)
        again.publish("agent-n1", HolderFact(1, 1))
        await until(lambda: (B, "agent-n1") in one.facts.holders)

        assert one.members[B].epoch == again.describe()["epoch"] == epoch + 1


async def test_the_older_of_two_processes_with_one_name_falls_silent_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not go on by itself, holding all others dead because nobody hears it."""
    monkeypatch.setattr(detector, "_SETTLING_INTERVALS", 0.0)
    async with gathering() as house:
        one, older = await house.add(A), await house.add(B)
        await until(lambda: B in statuses(one) and A in statuses(older))

        heard = house.heard[B]
        younger = await house.add(B)
        await until(lambda: Superseded(younger.describe()["epoch"]) in heard)

        assert older.describe()["over"]
        assert not one.is_dead(B)
        assert not older.is_dead(A)


async def test_a_stranger_is_not_heard_and_counted() -> None:
    """Gossip moves decisions, so only holders of the cluster's secret take part; an older secret of the ring does too."""
    async with gathering() as house:
        one = await house.add(A, ring=(b"the secret of today....", b"the secret of yesterday"))
        await house.add(B, ring=(b"somebody else's secret.",))
        await until(lambda: one.drops().get("key", 0) > 0)
        two = await house.add(C, ring=(b"the secret of yesterday", b"the secret of today...."))

        await until(lambda: C in statuses(one) and A in statuses(two))

        assert B not in statuses(one)


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
def test_only_numeric_addresses_are_spoken_to(text: str, address: Any) -> None:
    """To look a name up on a member's word would stop the event loop, and tell a name server about it."""
    assert parse_address(text) == address
