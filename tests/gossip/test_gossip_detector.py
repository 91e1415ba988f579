"""Failure detection of SWIM with Lifeguard: which nodes are declared dead, and which are not."""

import pytest

from kvrs.gossip.facts import MemberChanged
from kvrs.gossip.swim import HEALTH_MAX, SUSPICION_MAX_MULT, SUSPICION_MULT, Suspicion
from kvrs.gossip.wire import Ack, IndirectAck, Nack, Ping, PingReq, Push, Status
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

LONGEST_S = 2 * SUSPICION_MULT * SUSPICION_MAX_MULT * INTERVAL_S


def answer(system: GossipCluster, node: NodeId) -> None:
    """Wait until `node` is probed, and answer for it."""
    ping = system.probe(node)
    known = system.node.members[node]
    system.handle(node, Ack(known.epoch, known.incarnation, ping.seq))


def keep_answering(system: GossipCluster, nodes: set[NodeId], for_s: float) -> None:
    """All of `nodes` acknowledge every ping at once; relayed pings of others get no answer."""
    until_s, done = system.now_s + for_s, len(system.sent)
    while system.now_s < until_s:
        system.pass_time(0.02)
        for send in system.sent[done:]:
            if send.to in nodes and isinstance(send.packet, Ping):
                known = system.node.members[send.to]
                system.handle(send.to, Ack(known.epoch, known.incarnation, send.packet.seq))
        done = len(system.sent)


def test_a_node_that_answers_is_not_suspected() -> None:
    """An ack of the target with the right number ends the probe; no relay is asked."""
    system = GossipCluster(B, C, D)

    answer(system, B)
    system.pass_time(INTERVAL_S)

    assert system.status(B) is Status.ALIVE
    assert not [packet for packet in system.packets(PingReq) if packet.target == B]


def test_a_silent_target_is_probed_by_relays_before_suspicion() -> None:
    """Three pings, the last of them over TCP, and two rounds of relays."""
    system = GossipCluster(B, C, D, E)
    ping = system.probe(B)

    system.pass_time(INTERVAL_S * 0.99)
    assert system.status(B) is Status.ALIVE
    system.pass_time(INTERVAL_S * 0.05)

    pings = [
        send
        for send in system.sent
        if isinstance(send.packet, Ping) and send.packet.seq == ping.seq
    ]
    assert [send.to for send in pings] == [B, B, B]
    assert {
        send.to
        for send in system.sent
        if isinstance(send.packet, PingReq) and send.packet.seq == ping.seq
    } == {C, D, E}
    assert system.status(B) is Status.SUSPECT
    assert system.node.members[B].suspectors == (A,)


def test_an_indirect_ack_ends_a_probe() -> None:
    """A node that others can reach is alive."""
    system = GossipCluster(B, C, D)
    ping = system.probe(B)
    system.pass_time(INTERVAL_S * 0.4)

    system.handle(C, IndirectAck(1, 0, ping.seq, B, 1, 0))
    system.pass_time(INTERVAL_S)

    assert system.status(B) is Status.ALIVE


@pytest.mark.parametrize("is_indirect", [False, True])
def test_an_ack_of_another_node_does_not_end_a_probe(is_indirect: bool) -> None:
    """Another node may listen at the target's address by now, and an indirect ack may be late, and
    answer a process before this one, whose numbers began the same.
    """
    system = GossipCluster(B, C, D)
    ping = system.probe(B)
    system.pass_time(INTERVAL_S * 0.4)

    system.handle(C, IndirectAck(1, 0, ping.seq, D, 1, 4) if is_indirect else Ack(1, 0, ping.seq))
    system.pass_time(INTERVAL_S)

    assert system.status(B) is Status.SUSPECT
    assert system.node.members[B].incarnation == 0


def test_a_relay_sends_the_ack_of_the_target_on() -> None:
    """It pings under a number of its own, and reports the epoch and incarnation that answered."""
    system = GossipCluster(B, C, D)

    ping = system.relayed_ping(C, 77, B)
    assert system.handle(D, Ack(1, 0, ping.seq)) == []
    [indirect_ack] = system.handle(B, Ack(1, 0, ping.seq))

    assert (indirect_ack.to, indirect_ack.packet) == (
        C,
        IndirectAck(1, 0, 77, B, 1, 0, indirect_ack.packet.updates),
    )


def test_a_relay_without_an_ack_sends_a_nack_in_time() -> None:
    """So the prober learns that its own network works; a later ack is dropped."""
    system = GossipCluster(B, C)
    ping = system.relayed_ping(C, 77, B)

    system.pass_time(INTERVAL_S / 3)

    assert [packet.seq for packet in system.packets(Nack, to=C)] == [77]
    assert not [
        send
        for send in system.handle(B, Ack(1, 0, ping.seq))
        if isinstance(send.packet, IndirectAck)
    ]


def test_a_relay_that_does_not_know_the_target_sends_a_nack_at_once() -> None:
    """There is nothing to wait for."""
    system = GossipCluster(B, C)

    [nack] = system.handle(C, PingReq(1, 0, 77, E))

    assert (nack.to, nack.packet) == (C, Nack(1, 0, 77, nack.packet.updates))


def test_every_packet_to_a_suspect_carries_the_suspicion() -> None:
    """Lifeguard's Buddy System: the suspect can refute before the suspicion ends."""
    system = GossipCluster(B, C, D)
    system.receive(C, suspect(B, C))
    system.pass_time(INTERVAL_S)
    # Until the update was sent often enough, and is not piggybacked on every packet any more.
    for seq in range(30):
        system.handle(C, Ping(1, 0, seq))
    [ack] = system.handle(C, Ping(1, 0, 31))
    assert ack.packet == Ack(1, 0, 31)

    [ack] = system.handle(B, Ping(1, 0, 9))

    assert [(update.id, update.status) for update in ack.packet.updates] == [(B, Status.SUSPECT)]


def test_a_refutation_ends_the_suspicion() -> None:
    """At any time before its end; an older death of a node that has missed it does not count."""
    system = GossipCluster(B, C, D)
    system.probe(B)
    system.pass_time(INTERVAL_S * 1.1)
    assert system.status(B) is Status.SUSPECT

    system.receive(C, alive(B, 1, 1))
    system.receive(D, dead(B, D))
    keep_answering(system, {B, C, D}, LONGEST_S)

    assert system.status(B) is Status.ALIVE


def test_a_dead_node_is_declared_dead_with_all_suspectors() -> None:
    """The first suspector comes first, then those that confirmed."""
    system = GossipCluster(B, C, D, E)

    system.probe(B)
    system.pass_time(INTERVAL_S * 1.1)
    system.receive(C, suspect(B, C, D, E))
    keep_answering(system, {C, D, E}, 2.2 * SUSPICION_MULT * INTERVAL_S)

    assert (system.status(B), system.node.members[B].suspectors) == (Status.DEAD, (A, C, D, E))


def test_confirmations_shorten_a_suspicion_from_its_longest_to_its_least() -> None:
    """A node that one node suspects gets six times as long as one that all suspect; of two members
    none can confirm. With more members updates take longer to reach all, and so does a refutation.
    """
    least_s = SUSPICION_MULT * INTERVAL_S
    lengths = [Suspicion(INTERVAL_S, 5, 0.0).ends_s(suspectors) for suspectors in (1, 2, 3, 4, 5)]

    assert lengths[0] == pytest.approx(6 * least_s)
    assert lengths[3] == lengths[4] == pytest.approx(least_s)
    assert lengths == sorted(lengths, reverse=True)
    assert Suspicion(INTERVAL_S, 2, 0.0).ends_s(1) == pytest.approx(least_s)
    assert Suspicion(INTERVAL_S, 1000, 0.0).ends_s(4) == pytest.approx(3 * least_s)


def test_a_node_that_answers_is_not_declared_dead_whatever_others_report() -> None:
    """A node that receives a confirmed suspicion probes the suspect itself, and its ack is
    enough: the suspicion begins anew.
    """
    system = GossipCluster(B, C, D, E)

    system.receive(C, suspect(B, C, D, E))
    keep_answering(system, {B, C, D, E}, LONGEST_S)

    assert system.status(B) is Status.SUSPECT
    assert len(system.packets(Ping, to=B)) < 2 * LONGEST_S / INTERVAL_S


def test_a_node_without_answers_of_relays_probes_slower() -> None:
    """Relays that send not even a nack indicate a fault of the prober (local health multiplier)."""
    system = GossipCluster(B, C, D, E)

    system.pass_time(4 * INTERVAL_S)
    assert system.node.health == HEALTH_MAX
    before = len(system.packets(Ping))
    system.pass_time(4 * INTERVAL_S)

    assert len(system.packets(Ping)) - before <= 6


def test_a_nack_keeps_the_health_score_once_and_only_from_an_asked_relay() -> None:
    """A relay that has no ack either shows that the fault is the target's. Packets are duplicated,
    and any holder of the secret can send nacks.
    """
    system = GossipCluster(B, C, D, E)
    system.receive(B, suspect(A, B))
    ping = system.probe(B)
    system.pass_time(INTERVAL_S)
    for relay in (C, C, NodeId("unasked")):
        system.handle(relay, Nack(1, 0, ping.seq))

    system.pass_time(INTERVAL_S * 1.1)

    assert system.status(B) is Status.SUSPECT
    assert system.node.health == 1 + 2


def test_acks_restore_the_health_score() -> None:
    """By one each."""
    system = GossipCluster(B, C)
    system.receive(B, suspect(A, B))
    assert system.node.health == 1

    answer(system, B)

    assert system.node.health == 0


def test_a_node_can_be_probed_out_of_turn() -> None:
    """A closed connection is a reason for a probe, not a death; one at a time."""
    system = GossipCluster(B, C, D)

    sends = system.node.probe_now(B, system.now_s)

    assert [(send.to, type(send.packet)) for send in sends] == [(B, Ping)]
    assert system.node.probe_now(B, system.now_s) == []
    assert system.status(B) is Status.ALIVE


def test_a_node_stopped_near_the_end_of_a_suspicion_probes_once_more() -> None:
    """Silence of others while the node was stopped does not count, and a refutation may have been
    missed: only a probe of the running node counts.
    """
    system = GossipCluster(B, C, D, E)
    system.probe(B)
    system.pass_time(INTERVAL_S * 1.1)
    system.receive(C, suspect(B, C, D, E))
    system.pass_time(SUSPICION_MULT * INTERVAL_S - INTERVAL_S * 0.3)
    assert system.status(B) is Status.SUSPECT
    system.node.take_events()

    system.now_s += 300.0
    system.node.tick(system.now_s)
    system.pass_time(INTERVAL_S * 0.9)
    assert system.status(B) is Status.SUSPECT
    assert not [event for event in system.node.take_events() if isinstance(event, MemberChanged)]
    system.pass_time(INTERVAL_S * 2 * (1 + system.node.health))

    assert system.status(B) is Status.DEAD


@pytest.mark.parametrize("first", ["the timer", "a packet"])
def test_a_node_voids_its_probes_and_announces_itself_after_a_stop(first: str) -> None:
    """Sockets may be served before timers. It has a new incarnation, since the old one may have
    been declared dead, and pushes it to the first reachable peers.
    """
    system = GossipCluster(B, C, D)
    system.probe(B)

    system.now_s += 60.0
    if first == "a packet":
        system.receive(C, suspect(D, C))
    pushed = [*system.node.tick(system.now_s), *system.pass_time(INTERVAL_S * 0.5)]

    assert system.status(B) is Status.ALIVE
    assert system.node.members[A].incarnation == 1
    assert {
        send.to
        for send in pushed
        if isinstance(send.packet, Push) and alive(A, 1, 1) in send.packet.updates
    }


def test_a_clock_that_jumps_changes_nothing() -> None:
    """In either direction, by any amount."""
    system = GossipCluster(B, C, D)
    for jump_s in (3600.0, -7200.0, 1e9, -1e9):
        system.now_s += jump_s
        system.receive(C, alive(D))
        keep_answering(system, {B, C, D}, 4 * INTERVAL_S)

    assert {system.status(node) for node in (B, C, D)} == {Status.ALIVE}
    system.probe(B)
    system.pass_time(2 * INTERVAL_S)
    assert system.status(B) is Status.SUSPECT


def test_relayed_pings_are_bounded() -> None:
    """Further requests push the oldest out."""
    system = GossipCluster(*(NodeId(f"n{i}") for i in range(50)))

    for seq in range(1200):
        system.handle(NodeId("n0"), PingReq(1, 0, seq, NodeId("n1")))
    system.pass_time(INTERVAL_S)

    assert len(system.packets(Nack)) <= 1024
