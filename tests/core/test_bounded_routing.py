"""A new stream is placed as if every prefill instance had been weighed, though few are."""

from random import Random
from unittest.mock import patch

import msgspec

from kvrs.core import routing
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Capability, Role, assumed_instance
from tests.core.policy_harness import GEOMETRY, TABLE

SEEDS, STEPS = 40, 120
_NODES = 6


def weighed(view: ClusterView, stream: Stream, is_free: bool, *, barred_too: bool) -> Member | None:
    """The choice among all, each of them weighed."""

    def key(member: Member) -> tuple[bool, float, int, InstanceId]:
        decode = routing.own_decode(view, member, stream, is_free, barred_too=True, closed_too=True)
        takes = view.takes_recovery if stream.attempt.number else view.takes_start
        streams = 0 if decode is None else decode.streams
        return not takes(member), member.queue_s, streams, member.id

    allowed = [
        member
        for member in view.members.values()
        if member.abilities.prefills
        and not member.is_drained
        and routing.may_have(view, member, stream, barred_too=barred_too)
    ]
    return min(allowed, key=key, default=None)


class Fleet:
    """A view of which everything changes that a choice depends on."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.view = ClusterView(1e9)
        self.made = 0
        for _ in range(14):
            self.add()

    def add(self) -> None:
        self.made += 1
        rng = self.rng
        can = set(Capability) if rng.random() < 0.7 else {Capability.PREFIX_CACHE}
        name = InstanceId(f"i{rng.randrange(1000)}-{self.made}")
        node = NodeId(f"n{rng.randrange(_NODES)}")
        info = assumed_instance(name, node, rng.choice([*Role]), GEOMETRY, can)
        there = [each.id for each in self.view.by_node.get(node, ()) if each.abilities.prefills]
        if there and info.role is Role.DECODE and rng.random() < 0.3:
            info = msgspec.structs.replace(info, own_prefill=rng.choice(there))
        self.view.add(Member.of(info, TABLE))

    def change(self) -> None:
        """One thing of one instance, as a decision, a report or an answer would."""
        view, rng = self.view, self.rng
        view.now_s += rng.choice([0.0, 0.0, 0.1, 1.0])
        member = rng.choice([*view.members.values()])
        health = member.answers
        match rng.randrange(11):
            case 0 | 1:
                view.prefill_order.note_queue(member, rng.choice([0.0, 0.0, 0.1, 0.2]))
            case 2:
                view.prefill_order.book(member, 0.1, 0.0, is_history=False)
            case 3 if member.bookings:
                view.prefill_order.unbook(member, 0.1, 0.0, is_history=False)
            case 4 | 5 if member.abilities.decodes:
                change = rng.choice([1, 1, -1]) if member.streams else 1
                view.count_stream(member, change)
            case 6:
                health.note_busy(member.id, StreamId("s"), 0.5, view.now_s)
                view.prefill_order.restrict(member)
            case 7:
                member.is_doubted = rng.random() < 0.3
                view.prefill_order.restrict(member)
            case 8:
                (health.open if rng.random() < 0.5 else lambda: health.close("", view.now_s, 1))()
            case 9:
                member.drain_ordered = rng.random() < 0.3
                view.update(member)
            case 10 if rng.random() < 0.3:
                view.remove(member)
                self.add()
            case _:
                if not health.awaited:
                    health.awaited_from_s = view.now_s
                health.awaited[StreamId(f"s{view.now_s}")] = view.now_s, 0.0

    def stream(self) -> Stream:
        rng = self.rng
        stream = Stream(StreamId("new"), 9, 10, 0.0)
        if rng.random() < 0.2:
            for member in rng.sample([*self.view.members.values()], 3):
                stream.exclude(member)
        return stream


def test_the_choice_is_that_of_weighing_all() -> None:
    """Busy instances, those of a minority, drained ones and those that answer nothing among them;
    most choices differ from one another.
    """
    chosen = set()
    for seed in range(SEEDS):
        fleet = Fleet(seed)
        for step in range(STEPS):
            fleet.change()
            stream = fleet.stream()
            is_free, barred_too = not stream.excluded_epochs, fleet.rng.random() < 0.5
            found = routing.least_work(fleet.view, stream, is_free, barred_too=barred_too)
            expected = weighed(fleet.view, stream, is_free, barred_too=barred_too)
            assert found is expected, (seed, step)
            chosen.add((seed, found and found.id))

    assert len(chosen) > 5 * SEEDS


def test_few_of_many_are_weighed() -> None:
    """All are idle, so that all but their ids are equal."""
    view = ClusterView(1e9)
    for number in range(500):
        name, node = InstanceId(f"i{number:03}"), NodeId(f"n{number}")
        view.add(Member.of(assumed_instance(name, node, Role.BOTH, GEOMETRY), TABLE))
    stream = Stream(StreamId("new"), 0, 10, 0.0)
    members = [view.members[InstanceId(f"i{number:03}")] for number in range(4)]

    def chosen() -> tuple[Member | None, bool]:
        with patch.object(routing, "own_decode", wraps=routing.own_decode) as asked:
            return routing.least_work(view, stream, True, barred_too=False), asked.call_count <= 2

    assert chosen() == (members[0], True)
    view.prefill_order.book(members[0], 0.1, 0.0, is_history=False)
    assert chosen() == (members[1], True)
    view.count_stream(members[1], 1)
    assert chosen() == (members[2], True)
    view.prefill_order.note_queue(members[2], 0.05)
    assert chosen() == (members[3], True)
    view.prefill_order.unbook(members[0], 0.1, 0.0, is_history=False)
    assert chosen() == (members[0], True)
    view.count_stream(members[0], 1)
    assert chosen() == (members[3], True)
    view.count_stream(members[0], -1)
    assert chosen() == (members[0], True)


def test_a_removed_instance_restricts_no_choice() -> None:
    """Also one that is removed during a pause, which would never end."""
    fleet = Fleet(0)
    view = fleet.view
    paused = next(member for member in view.members.values() if member.abilities.decodes)
    paused.answers.busy_until_s = 5.0
    view.prefill_order.restrict(paused)
    assert view.prefill_order.has_restricted()

    view.remove(paused)

    assert not view.prefill_order.has_restricted()
