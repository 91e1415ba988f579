"""Anti-entropy: published facts reach all nodes, in packets of bounded size."""

import random

import pytest

from kvrs.errors import GossipError
from kvrs.gossip import swim
from kvrs.gossip.facts import FactKind, FailureFact, HolderFact, InstanceFact, SlotsFact
from kvrs.gossip.swim import Gossip
from kvrs.gossip.wire import (
    MAX_ENTRIES,
    MAX_PACKET_BYTES,
    Delta,
    Digest,
    Entry,
    KnownMember,
    Push,
    RecordDelta,
    Status,
    encode,
)
from kvrs.ids import NodeId
from kvrs.protocol.instance import Role
from kvrs_testkit.gossip_net import GossipNet, SimNode
from tests.gossip.gossip_cluster import INTERVAL_S, alive, dead

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def cluster(count: int) -> GossipNet:
    net = GossipNet(0, on_wire=True)
    for i in range(count):
        net.add(f"n{i}", {NodeId("n0"): "n0:7"})
    return net


def publish(net: GossipNet, node: SimNode, name: str, free: int) -> None:
    node.gossip.publish(name, SlotsFact(free, 0.0), node.clock_s(net.now_s))


def test_facts_of_one_node_reach_all_others() -> None:
    """With the time of writing by the readers' own clocks, which need not agree."""
    net = cluster(5)
    writer = net.nodes[NodeId("n3")]
    net.run(5.0)
    facts = (
        InstanceFact(Role.DECODE, 1, 2, 3, 0.5, 100),
        SlotsFact(32, 0.0),
        HolderFact(1 << 30, 1 << 20),
        FailureFact(1, "oom", 0.0),
    )
    for fact in facts:
        writer.gossip.publish("d3", fact, writer.clock_s(5.0))

    net.run(20.0)

    for node in net.nodes.values():
        read = node.gossip.facts
        tables = (
            read.of(InstanceFact),
            read.of(SlotsFact),
            read.of(HolderFact),
            read.of(FailureFact),
        )
        assert tuple(table[writer.id, "d3"].fact for table in tables) == facts
        assert node.clock_s(5.0) == pytest.approx(
            read.of(SlotsFact)[writer.id, "d3"].written_s, abs=0.1
        )


def test_facts_of_a_dead_node_are_gone_and_back_once_it_is_alive() -> None:
    """A decision never uses the last facts of a dead node; those of a stopped node return at
    once.
    """
    net = cluster(4)
    writer, reader = net.nodes[NodeId("n1")], net.nodes[NodeId("n2")].gossip
    publish(net, writer, "d1", 7)
    net.run(10.0)
    net.stop(writer, 20.0)

    net.run(25.0)
    assert reader.members[writer.id].status is Status.DEAD
    assert not reader.facts.of(SlotsFact)
    net.run(32.0)

    assert [report.fact.free for report in reader.facts.of(SlotsFact).values()] == [7]


@pytest.mark.parametrize(("before", "begins", "becomes"), [(1, 2, 2), (5, 3, 6)])
def test_a_new_process_starts_with_an_empty_record(before: int, begins: int, becomes: int) -> None:
    """Facts of the old process belong to no node any more. One that started with a lower epoch than
    the process before it takes a higher one, and so does its record.
    """
    net, seeds = cluster(4), {NodeId("n0"): "n0:7"}
    publish(net, net.restart("n1", seeds, epoch=before), "old", 7)
    net.run(10.0)

    again = net.restart("n1", seeds, epoch=begins)
    publish(net, again, "new", 8)
    net.run(30.0)

    assert again.gossip.epoch == becomes
    for node in net.nodes.values():
        assert [name for owner, name in node.gossip.facts.of(SlotsFact) if owner == again.id] == [
            "new"
        ]


@pytest.mark.parametrize("count", [20, 40])
def test_members_and_records_reach_all_nodes_in_packets_of_bounded_size(
    count: int,
) -> None:
    """With more members and entries than fit into a packet; the network asserts every size."""
    net = cluster(count)
    for node in net.nodes.values():
        for i in range(3):
            node.gossip.publish(
                f"a-rather-long-name-of-an-instance-{i}",
                FailureFact(1, "x" * 60, 0.0),
                node.clock_s(0.0),
            )

    net.run(20.0)

    for node in net.nodes.values():
        assert len(node.gossip.members) == count
        assert len(node.gossip.facts.of(FailureFact)) == 3 * count


def test_a_new_node_gets_all_members_at_once() -> None:
    """A digest is answered by several packets, so that it does not take a minute among 1,000."""
    net = cluster(120)
    net.run(6.0)

    new_node = net.add("newcomer", {NodeId("n7"): "n7:7"})
    net.run(6.1)

    assert len(new_node.gossip.members) == 121


def node_a() -> Gossip:
    node = Gossip(A, "a:7", 1, INTERVAL_S, random.Random(0).random, 0.0)
    node.handle(Push(1, 0, (alive(B), alive(C))), B, 0.0)
    return node


def slots(node: NodeId, epoch: int, end: int, *entries: Entry) -> Delta:
    return Delta(1, 0, (), (RecordDelta(node, epoch, 0, end, 0, entries),))


SLOT = Entry(FactKind.SLOTS, "d0", 1, 0, b"\x92\x05\x00")


def test_only_the_owner_writes_its_record_and_each_epoch_has_its_own() -> None:
    """Entries of this node's record are ignored; copies of other records are applied."""
    node = node_a()

    node.handle(slots(A, 1, 1, SLOT), B, 0.1)
    node.handle(slots(C, 2, 1, SLOT), B, 0.1)
    assert not node.facts.of(SlotsFact)
    node.handle(slots(C, 1, 1, SLOT), B, 0.1)

    assert list(node.facts.of(SlotsFact)) == [(C, "d0")]


def test_an_answer_is_a_bounded_number_of_packets() -> None:
    """Together they bring what fits into them, a record of several packets in its order."""
    node, reader = node_a(), Gossip(B, "b:7", 1, INTERVAL_S, random.Random(0).random, 0.0)
    for i in range(250):
        node.publish(f"d{i}", FailureFact(1, "x" * 100, 0.0), 0.0)

    sends = node.handle(Digest(1, 0, "", "", ()), B, 0.1)
    assert len(sends) == 16
    assert all(len(encode(send.packet)) <= MAX_PACKET_BYTES for send in sends)
    for send in sends:
        reader.handle(send.packet, A, 0.1)

    assert 100 < len(reader.facts.of(FailureFact)) < 250
    assert [name for _, name in reader.facts.of(FailureFact)] == [
        f"d{i}" for i in range(len(reader.facts.of(FailureFact)))
    ]


def test_a_delta_answers_the_wants_of_the_other() -> None:
    """Push and pull in one exchange."""
    node = node_a()
    node.publish("d0", SlotsFact(3, 0.0), 0.0)

    [send] = node.handle(Delta(1, 0, (), (), (KnownMember(A, 1, 0, Status.ALIVE, 0, 0),)), B, 0.1)

    assert isinstance(send.packet, Delta)
    assert [(record.id, record.end) for record in send.packet.records] == [(A, 1)]
    assert send.packet.wants == ()


def test_a_digest_with_an_older_state_is_answered_with_the_newer_one() -> None:
    """Its sender may have missed the update, and the next digest would go elsewhere."""
    node = node_a()
    node.handle(Push(1, 0, (dead(C, B),)), B, 0.1)

    known = (KnownMember(C, 1, 0, Status.ALIVE, 0, 0),)
    [send] = node.handle(Digest(1, 0, B, C, known), B, 0.2)

    assert send.packet.updates == (dead(C, B),)


def test_digests_are_bounded_and_cover_all_members_in_turns() -> None:
    """With more members than fit, each digest continues where the last one ended."""
    node = Gossip(A, "a:7", 1, INTERVAL_S, random.Random(0).random, 0.0)
    others = [NodeId(f"node-with-a-long-name-{i:03}") for i in range(300)]
    for other in others:
        node.handle(Push(1, 0, (alive(other),)), other, 0.0)

    named, after, digests = list[NodeId](), "", 0
    while digests < 6 or after:
        sends = node.tick(node.next_tick_s)
        for send in sends:
            if isinstance(send.packet, Digest):
                assert len(encode(send.packet)) <= MAX_PACKET_BYTES
                assert send.packet.after == after
                named += [known.id for known in send.packet.known]
                after, digests = send.packet.until, digests + 1

    assert sorted(set(named)) == [A, *others]


def test_a_digest_without_differences_gets_no_answer() -> None:
    """Quiet clusters send little."""
    net = cluster(3)
    net.run(20.0)
    one, two = list(net.nodes.values())[:2]
    known = tuple(one.gossip.members[node].known()[0] for node in sorted(one.gossip.members))

    sends = two.gossip.handle(Digest(1, 0, "", "", known), one.id, two.clock_s(20.0))

    assert sends == []


def test_long_dead_members_are_not_sent_to_nodes_that_forgot_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After half of `FORGET_S` they are left out, otherwise they would circulate for ever."""
    monkeypatch.setattr(swim, "FORGET_S", 20.0)
    net = cluster(3)
    net.run(5.0)
    node, dead = net.nodes[NodeId("n0")], net.nodes[NodeId("n2")]
    net.kill(dead)
    known = [node.gossip.members[NodeId(name)].known()[0] for name in ("n0", "n1")]
    ignorant = Digest(1, 0, "", "", tuple(known))

    sent = []
    for now_s in (12.0, 24.0, 60.0):
        net.run(now_s)
        sends = node.gossip.handle(ignorant, NodeId("n1"), node.clock_s(now_s))
        sent.append(
            [update.id for send in sends for update in send.packet.updates if update.id == dead.id]
        )

    assert sent == [[dead.id], [], []]
    assert all(dead.id not in node.gossip.members for node in net.nodes.values() if node.up)


def test_a_full_record_refuses_more() -> None:
    """The writer gets an error; an existing entry may always be written again."""
    node = node_a()
    for i in range(MAX_ENTRIES):
        node.publish(f"d{i}", SlotsFact(1, 0.0), 0.0)

    node.publish("d0", SlotsFact(2, 0.0), 0.0)
    with pytest.raises(GossipError, match="256"):
        node.publish("more", SlotsFact(1, 0.0), 0.0)
    with pytest.raises(GossipError, match="name"):
        node.publish("x" * 65, SlotsFact(1, 0.0), 0.0)


def test_an_address_comes_from_the_node_itself_or_from_the_configuration() -> None:
    """A restarted node may listen elsewhere."""
    node = Gossip(A, "a:7", 1, INTERVAL_S, random.Random(0).random, 0.0, {B: "seed:1", A: "me:1"})

    assert (node.address_of(B), node.address_of(C)) == ("seed:1", None)
    node.handle(Push(1, 0, (alive(B),)), B, 0.0)

    assert node.address_of(B) == "b:7"
