"""State of members: it only grows, in an order that only the member itself can raise."""

import itertools
import random

import pytest

from kvrs.gossip import swim
from kvrs.gossip.facts import MemberChanged, Superseded
from kvrs.gossip.swim import Gossip, Member, Members
from kvrs.gossip.wire import MemberUpdate, Push, Status
from kvrs.ids import NodeId
from tests.gossip.gossip_cluster import (
    INTERVAL_S,
    A,
    B,
    C,
    D,
    E,
    GossipCluster,
    alive,
    dead,
    suspect,
)

LEFT = MemberUpdate(B, 1, 1, Status.LEFT, "b:7")
UPDATES = (
    alive(B),
    suspect(B, C),
    dead(B, C),
    alive(B, 1, 1),
    suspect(B, D, incarnation=1),
    LEFT,
    alive(B, 2),
    dead(B, E, epoch=2),
)


def state(member: Member) -> tuple[int, int, Status]:
    return member.epoch, member.incarnation, member.status


@pytest.mark.parametrize("seed", range(30))
def test_the_order_of_updates_does_not_matter(seed: int) -> None:
    """Nodes that get the same updates in different orders, some twice, converge."""
    system, draw = GossipCluster(B, C, D, E), random.Random(seed)
    states = [*draw.sample(UPDATES, 8), *draw.choices(UPDATES, k=4)]

    for update in states:
        system.receive(C, update)

    assert state(system.node.members[B]) == (2, 0, Status.DEAD)


@pytest.mark.parametrize(("older", "newer"), list(itertools.combinations(UPDATES, 2)), ids=str)
def test_an_older_update_changes_nothing(older: MemberUpdate, newer: MemberUpdate) -> None:
    """It is no event either."""
    system = GossipCluster(B, C, D, E)
    system.receive(C, newer)
    system.node.take_events()

    system.receive(D, older)

    assert state(system.node.members[B]) == (newer.epoch, newer.incarnation, newer.status)
    assert system.node.take_events() == []


def test_packets_of_a_replaced_process_are_dropped_and_answered() -> None:
    """The older of two processes with one name learns of the newer from the first answer."""
    system = GossipCluster(B, C)
    system.receive(B, alive(B, 5))

    sends = system.handle(B, Push(4, 9, (dead(C, B),)))

    assert system.status(C) is Status.ALIVE
    assert [(send.to, send.packet.updates) for send in sends] == [(B, (alive(B, 5),))]


def test_a_node_refutes_its_suspicion_or_death() -> None:
    """With an incarnation above the suspected one, pushed at once."""
    for update in (suspect(A, B, incarnation=4), dead(A, B, incarnation=4)):
        system = GossipCluster(B, C)

        system.receive(B, update)
        pushed = system.pass_time(1.0)

        assert (system.node.members[A].incarnation, system.status(A)) == (5, Status.ALIVE)
        assert any(
            alive(A, 1, 5) in send.packet.updates
            for send in pushed
            if isinstance(send.packet, Push)
        )


def test_a_process_that_began_with_too_low_an_epoch_takes_a_higher_one() -> None:
    """It was started without knowledge of the process before."""
    system = GossipCluster(B, C)

    system.receive(B, alive(A, 7, 2))

    assert (system.node.epoch, system.node.over) == (8, False)


def test_the_older_of_two_processes_with_one_name_stops() -> None:
    """Some time after the start a higher epoch is not an earlier process, but a second one."""
    system = GossipCluster(B, C)
    system.pass_time(30.0)
    system.node.take_events()

    system.receive(B, alive(A, 7))

    assert system.node.take_events() == [Superseded(7)]
    assert system.node.over
    assert system.pass_time(60.0) == []


def test_leaving_is_announced_and_final() -> None:
    """No node has to detect it, and none suspects."""
    system = GossipCluster(B, C)
    other = Gossip(B, "b:7", 1, INTERVAL_S, random.Random(0).random, 0.0)
    other.handle(Push(1, 0, (alive(A),)), A, 0.0)

    sends = system.node.leave(system.now_s)
    other.handle(sends[0].packet, A, 1.0)

    assert other.members[A].status is Status.LEFT
    assert system.pass_time(5.0) == []


def test_events_report_changes_of_members() -> None:
    """In order, with the suspectors."""
    system = GossipCluster(B, C)

    system.receive(C, suspect(B, C))
    system.receive(C, dead(B, C, D))
    system.receive(B, alive(B, 1, 1))

    assert system.node.take_events() == [
        MemberChanged(B, 1, 0, Status.SUSPECT, (C,)),
        MemberChanged(B, 1, 0, Status.DEAD, (C, D)),
        MemberChanged(B, 1, 1, Status.ALIVE, ()),
    ]


def test_a_full_table_forgets_only_dead_members_for_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An invented name never removes a member that is alive."""
    monkeypatch.setattr(swim, "MEMBERS_MAX", 4)
    system = GossipCluster(B, C, D)
    system.receive(B, alive(E))
    assert E not in system.node.members

    system.receive(B, dead(D, B))
    system.receive(B, alive(E))

    assert set(system.node.members) == {A, B, C, E}


def test_dead_members_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `FORGET_S`; long before they are not sent any more."""
    monkeypatch.setattr(swim, "FORGET_S", 20.0)
    system = GossipCluster(B, C)
    system.receive(B, dead(C, B))

    system.pass_time(15.0)
    assert C in system.node.members
    system.pass_time(10.0)

    assert C not in system.node.members


def probed(members: Members) -> NodeId:
    member = members.next_to_probe()
    assert member is not None
    return member.id


def test_members_are_probed_once_per_round_and_new_ones_in_the_present_round() -> None:
    """Round robin: no member waits longer than two rounds (SWIM, section 4.3)."""
    draw = random.Random(3)
    members = Members(Member(alive(A), 0.0), draw.random)
    for node in (B, C, D):
        members.add(Member(alive(node), 0.0))

    first = [probed(members) for _ in range(3)]
    members.next_to_probe()
    members.add(Member(alive(E), 0.0))
    rest = {probed(members) for _ in range(3)}

    assert set(first) == {B, C, D}
    assert E in rest


def test_random_peers_are_distinct_and_not_excluded() -> None:
    """A relay asked twice, or the target itself, would be no second path."""
    draw = random.Random(3)
    members = Members(Member(alive(A), 0.0), draw.random)
    for node in (B, C, D, E):
        members.add(Member(alive(node), 0.0))

    for _ in range(50):
        chosen = [member.id for member in members.random_peers(2, but=(B,))]
        assert len(set(chosen)) == 2
        assert B not in chosen
    assert {member.id for member in members.random_peers(9, but=(B,))} == {C, D, E}
