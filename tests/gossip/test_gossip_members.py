"""What is held of others: it only grows, in an order in which the node's own word weighs most."""

import itertools
import random

import pytest

from kvrs.gossip.config import GossipSettings
from kvrs.gossip.events import MemberChanged, Superseded
from kvrs.gossip.members import Member, Members
from kvrs.gossip.node import Gossip
from kvrs.gossip.wire import Push, Statement, Status
from kvrs.ids import NodeId
from tests.gossip.gossip_house import SETTINGS, A, B, C, D, E, House, alive, dead, suspect

LEFT = Statement(B, 1, 1, Status.LEFT, "b:7")
WORDS = (
    alive(B),
    suspect(B, C),
    dead(B, C),
    alive(B, 1, 1),
    suspect(B, D, incarnation=1),
    LEFT,
    alive(B, 2),
    dead(B, E, epoch=2),
)


def word(member: Member) -> tuple[int, int, Status]:
    return member.epoch, member.incarnation, member.status


@pytest.mark.parametrize("seed", range(30))
def test_the_order_of_words_does_not_matter(seed: int) -> None:
    """All nodes hear the same words in another order each, some of them twice, and hold the same in the end."""
    house, draw = House(B, C, D, E), random.Random(seed)
    words = [*draw.sample(WORDS, 8), *draw.choices(WORDS, k=4)]

    for statement in words:
        house.hear(C, statement)

    assert word(house.node.members[B]) == (2, 0, Status.DEAD)


@pytest.mark.parametrize(("older", "newer"), list(itertools.combinations(WORDS, 2)), ids=str)
def test_an_older_word_changes_nothing(older: Statement, newer: Statement) -> None:
    """Nor is it news: only what changed is told."""
    house = House(B, C, D, E)
    house.hear(C, newer)
    house.node.take_events()

    house.hear(D, older)

    assert word(house.node.members[B]) == (newer.epoch, newer.incarnation, newer.status)
    assert house.node.take_events() == []


def test_an_old_alive_does_not_revive_the_dead() -> None:
    """Neither the word of the life that ended, nor one of a life before; a new process does, and starts with an empty record."""
    house = House(B, C)
    house.hear(B, alive(B, 5, 3))
    house.hear(C, dead(B, C, epoch=5, incarnation=3))

    house.hear(C, alive(B, 5, 3))
    house.hear(C, alive(B, 4, 99))
    assert house.status(B) is Status.DEAD
    house.hear(B, alive(B, 6, 0))

    assert word(house.node.members[B]) == (6, 0, Status.ALIVE)


def test_packets_of_a_process_that_was_replaced_are_dropped_and_it_is_told() -> None:
    """The older of two processes with one name learns from the first that it speaks to."""
    house = House(B, C)
    house.hear(B, alive(B, 5))

    sends = house.handle(B, Push(4, 9, (dead(C, B),)))

    assert house.status(C) is Status.ALIVE
    assert [(send.to, send.packet.news) for send in sends] == [(B, (alive(B, 5),))]


def test_who_is_held_suspect_or_dead_refutes() -> None:
    """With an incarnation above the one that was suspected, told to others at once."""
    for said in (suspect(A, B, incarnation=4), dead(A, B, incarnation=4)):
        house = House(B, C)

        house.hear(B, said)
        pushed = house.pass_time(1.0)

        assert (house.node.members[A].incarnation, house.status(A)) == (5, Status.ALIVE)
        assert any(alive(A, 1, 5) in send.packet.news for send in pushed if isinstance(send.packet, Push))


def test_a_process_that_began_with_too_low_an_epoch_takes_a_higher_one() -> None:
    """Whoever started it did not know of the one before; its facts are then told under the new epoch."""
    house = House(B, C)

    house.hear(B, alive(A, 7, 2))

    assert (house.node.epoch, house.node.over) == (8, False)


def test_the_older_of_two_processes_with_one_name_falls_silent() -> None:
    """After a while among others a higher epoch is not the past, but a second process: it has the name now."""
    house = House(B, C)
    house.pass_time(30.0)
    house.node.take_events()

    house.hear(B, alive(A, 7))

    assert house.node.take_events() == [Superseded(7)]
    assert house.node.over
    assert house.pass_time(60.0) == []


def test_leaving_is_told_and_final() -> None:
    """Nobody has to find out, and nobody suspects."""
    house = House(B, C)
    other = Gossip(B, "b:7", 1, SETTINGS, random.Random(0).random, 0.0)
    other.handle(Push(1, 0, (alive(A),)), A, 0.0)

    sends = house.node.leave(house.now_s)
    other.handle(sends[0].packet, A, 1.0)

    assert other.members[A].status is Status.LEFT
    assert house.pass_time(5.0) == []


def test_events_tell_what_became_of_others() -> None:
    """In order, with by whose word."""
    house = House(B, C)

    house.hear(C, suspect(B, C))
    house.hear(C, dead(B, C, D))
    house.hear(B, alive(B, 1, 1))

    assert house.node.take_events() == [
        MemberChanged(B, 1, 0, Status.SUSPECT, (C,)),
        MemberChanged(B, 1, 0, Status.DEAD, (C, D)),
        MemberChanged(B, 1, 1, Status.ALIVE, ()),
    ]


def test_the_longest_dead_give_way_to_newcomers_and_nobody_else_does() -> None:
    """The table is bounded; the living are never thrown out for a name that somebody made up."""
    house = House(B, C, D, settings=GossipSettings(members_max=4))
    house.hear(B, alive(E))
    assert E not in house.node.members

    house.hear(B, dead(D, B))
    house.hear(B, alive(E))

    assert set(house.node.members) == {A, B, C, E}


def test_the_dead_are_forgotten_in_time() -> None:
    """After `forget_s`; long before that they are no longer spoken of."""
    house = House(B, C, settings=GossipSettings(forget_s=20.0))
    house.hear(B, dead(C, B))

    house.pass_time(15.0)
    assert C in house.node.members
    house.pass_time(10.0)

    assert C not in house.node.members


def probed(members: Members) -> NodeId:
    member = members.next_to_probe()
    assert member is not None
    return member.id


def test_everybody_is_probed_once_a_round_and_newcomers_in_the_round_under_way() -> None:
    """Round robin: nobody waits longer than two rounds (SWIM, section 4.3)."""
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


def test_random_peers_are_different_and_none_of_those_excluded() -> None:
    """Relays asked twice, or the target itself, would be no second way."""
    draw = random.Random(3)
    members = Members(Member(alive(A), 0.0), draw.random)
    for node in (B, C, D, E):
        members.add(Member(alive(node), 0.0))

    for _ in range(50):
        chosen = [member.id for member in members.random_peers(2, but=(B,))]
        assert len(set(chosen)) == 2
        assert B not in chosen
    assert {member.id for member in members.random_peers(9, but=(B,))} == {C, D, E}
