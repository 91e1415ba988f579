"""Who is declared dead, and who is not (SWIM with Lifeguard)."""

import pytest

from kvrs.gossip.events import MemberChanged
from kvrs.gossip.suspicion import Suspicion
from kvrs.gossip.wire import Ack, Ask, Nack, Ping, Push, Status, Vouch
from kvrs.ids import NodeId
from tests.gossip.gossip_house import INTERVAL_S, SETTINGS, A, B, C, D, E, House, alive, dead, suspect

LONGEST_S = 2 * SETTINGS.suspicion_mult * SETTINGS.suspicion_max_mult * INTERVAL_S


def answer(house: House, node: NodeId) -> None:
    """Wait until `node` is probed, and answer for it."""
    ping = house.probe(node)
    known = house.node.members[node]
    house.handle(node, Ack(known.epoch, known.incarnation, ping.seq))


def keep_answering(house: House, nodes: set[NodeId], for_s: float) -> None:
    """All of `nodes` answer at once, whatever they are asked, except for others."""
    until_s, done = house.now_s + for_s, len(house.sent)
    while house.now_s < until_s:
        house.pass_time(0.02)
        for send in house.sent[done:]:
            if send.to in nodes and isinstance(send.packet, Ping):
                known = house.node.members[send.to]
                house.handle(send.to, Ack(known.epoch, known.incarnation, send.packet.seq))
        done = len(house.sent)


def test_who_answers_is_not_suspected() -> None:
    """An Ack of the right number from the target ends the probe: nobody else is asked."""
    house = House(B, C, D)

    answer(house, B)
    house.pass_time(INTERVAL_S)

    assert house.status(B) is Status.ALIVE
    assert not [packet for packet in house.packets(Ask) if packet.target == B]


def test_a_silent_target_is_pinged_again_by_others_and_over_a_stream_before_it_is_suspected() -> None:
    """Three pings, the last of them over TCP, and two rounds of relays."""
    house = House(B, C, D, E)
    ping = house.probe(B)

    house.pass_time(INTERVAL_S * 0.99)
    assert house.status(B) is Status.ALIVE
    house.pass_time(INTERVAL_S * 0.05)

    pings = [send for send in house.sent if isinstance(send.packet, Ping) and send.packet.seq == ping.seq]
    assert [(send.to, send.stream) for send in pings] == [(B, False), (B, False), (B, True)]
    assert {send.to for send in house.sent if isinstance(send.packet, Ask) and send.packet.seq == ping.seq} == {C, D, E}
    assert house.status(B) is Status.SUSPECT
    assert house.node.members[B].by == (A,)


def test_an_answer_that_reached_a_relay_is_as_good() -> None:
    """A node that others can reach is alive."""
    house = House(B, C, D)
    ping = house.probe(B)
    house.pass_time(INTERVAL_S * 0.4)

    house.handle(C, Vouch(1, 0, ping.seq, B, 1, 0))
    house.pass_time(INTERVAL_S)

    assert house.status(B) is Status.ALIVE


def test_an_answer_that_reached_a_relay_for_somebody_else_is_none() -> None:
    """It may be late, and meant for a process before this one, which began to count at the same number."""
    house = House(B, C, D)
    ping = house.probe(B)
    house.pass_time(INTERVAL_S * 0.4)

    house.handle(C, Vouch(1, 0, ping.seq, D, 1, 4))
    house.pass_time(INTERVAL_S)

    assert house.status(B) is Status.SUSPECT
    assert house.node.members[B].incarnation == 0


def test_an_answer_of_somebody_else_is_none() -> None:
    """At the target's address another node may listen by now."""
    house = House(B, C, D)
    ping = house.probe(B)

    house.handle(C, Ack(1, 0, ping.seq))
    house.pass_time(INTERVAL_S)

    assert house.status(B) is Status.SUSPECT


def test_a_ping_over_a_stream_is_answered_over_one() -> None:
    """Where datagrams are what fails, their answers would fail too."""
    house = House(B, C)

    sends = [*house.handle(B, Ping(1, 0, 7, True)), *house.handle(B, Ping(1, 0, 8, False))]

    assert [(send.to, send.stream) for send in sends] == [(B, True), (B, False)]


def test_a_relay_passes_the_answer_on() -> None:
    """It pings under a number of its own, and says which life answered."""
    house = House(B, C)

    ping = house.asked(C, 77, B)
    [vouch] = house.handle(B, Ack(1, 0, ping.seq))

    assert (vouch.to, vouch.packet) == (C, Vouch(1, 0, 77, B, 1, 0, vouch.packet.news))


def test_a_relay_that_hears_nothing_says_so_in_time() -> None:
    """So the prober knows that it is not its own network that failed; a later answer is nobody's."""
    house = House(B, C)
    ping = house.asked(C, 77, B)

    house.pass_time(INTERVAL_S / 3)

    assert [packet.seq for packet in house.packets(Nack, to=C)] == [77]
    assert not [send for send in house.handle(B, Ack(1, 0, ping.seq)) if isinstance(send.packet, Vouch)]


def test_a_relay_that_does_not_know_the_target_says_so_at_once() -> None:
    """Nothing to wait for."""
    house = House(B, C)

    [nack] = house.handle(C, Ask(1, 0, 77, E))

    assert (nack.to, nack.packet) == (C, Nack(1, 0, 77, nack.packet.news))


def test_a_suspect_hears_of_it_in_whatever_it_is_sent() -> None:
    """Buddy system: so it can refute before its time is over (Lifeguard)."""
    house = House(B, C, D)
    house.hear(C, suspect(B, C))
    house.pass_time(INTERVAL_S)
    for seq in range(30):  # Until the news has been told often enough, and no longer rides along by itself.
        house.handle(C, Ping(1, 0, seq))
    [ack] = house.handle(C, Ping(1, 0, 31))
    assert ack.packet == Ack(1, 0, 31)

    [ack] = house.handle(B, Ping(1, 0, 9))

    assert [(said.id, said.status) for said in ack.packet.news] == [(B, Status.SUSPECT)]


def test_a_refutation_ends_the_suspicion() -> None:
    """Whenever it comes before the end."""
    house = House(B, C, D)
    house.probe(B)
    house.pass_time(INTERVAL_S * 1.1)
    assert house.status(B) is Status.SUSPECT

    house.hear(C, alive(B, 1, 1))
    keep_answering(house, {B, C, D}, LONGEST_S)

    assert house.status(B) is Status.ALIVE


def test_a_dead_node_is_declared_dead_with_all_accusers() -> None:
    """First by whose word, then who confirmed it."""
    house = House(B, C, D, E)

    house.probe(B)
    house.pass_time(INTERVAL_S * 1.1)
    house.hear(C, suspect(B, C, D, E))
    keep_answering(house, {C, D, E}, 2.2 * SETTINGS.suspicion_mult * INTERVAL_S)

    assert (house.status(B), house.node.members[B].by) == (Status.DEAD, (A, C, D, E))


def test_confirmations_shorten_a_suspicion_from_its_longest_to_its_least() -> None:
    """A node that only one misses gets six times as long as one that everybody misses."""
    suspicion = Suspicion(SETTINGS, 5, 0.0)

    lengths = [suspicion.ends_s(accusers) for accusers in (1, 2, 3, 4, 5)]

    least_s = SETTINGS.suspicion_mult * INTERVAL_S
    assert lengths[0] == pytest.approx(6 * least_s)
    assert lengths[3] == lengths[4] == pytest.approx(least_s)
    assert lengths == sorted(lengths, reverse=True)


def test_a_suspicion_is_longer_among_more() -> None:
    """News takes longer to reach everybody, and so does a refutation; with one other there is nobody to confirm."""
    assert Suspicion(SETTINGS, 1000, 0.0).ends_s(4) == pytest.approx(3 * SETTINGS.suspicion_mult * INTERVAL_S)
    assert Suspicion(SETTINGS, 2, 0.0).ends_s(1) == pytest.approx(SETTINGS.suspicion_mult * INTERVAL_S)


def test_nobody_declares_dead_whom_he_can_reach_whatever_others_say() -> None:
    """Told that B is suspected by everybody, a node asks B itself, and B's answer is enough."""
    house = House(B, C, D, E)

    house.hear(C, suspect(B, C, D, E))
    keep_answering(house, {B, C, D, E}, LONGEST_S)

    assert house.status(B) is Status.SUSPECT


def test_an_older_death_does_not_end_a_refuted_suspicion() -> None:
    """The accuser did not hear of the refutation; it is alone with its word."""
    house = House(B, C, D)
    house.hear(B, alive(B, 1, 1))

    house.hear(C, dead(B, C))

    assert house.status(B) is Status.ALIVE


def test_a_node_whose_probes_fail_for_no_fault_of_others_gives_them_more_time() -> None:
    """Relays that say nothing at all point at the prober (local health multiplier): it probes slower."""
    house = House(B, C, D, E)

    house.pass_time(4 * INTERVAL_S)
    assert house.node.health == SETTINGS.health_max
    before = len(house.packets(Ping))
    house.pass_time(4 * INTERVAL_S)

    assert len(house.packets(Ping)) - before <= 6


def test_relays_that_answer_keep_a_prober_s_trust_in_itself() -> None:
    """All of them heard nothing either: it is the target."""
    house = House(B, C, D, E)
    ping = house.probe(B)
    house.pass_time(INTERVAL_S * 0.4)
    for relay in (C, D, E):
        house.handle(relay, Nack(1, 0, ping.seq))

    before = house.node.health
    house.pass_time(INTERVAL_S * 0.65)

    assert house.status(B) is Status.SUSPECT
    assert house.node.health == before


def test_trust_in_itself_is_never_more_than_whole() -> None:
    """A Nack counts once, and only from whom was asked: packets arrive twice, and any holder of the secret can send many."""
    house = House(B, C, D, E)
    house.hear(B, suspect(A, B))
    ping = house.probe(B)
    house.pass_time(INTERVAL_S)
    for relay in (C, C, NodeId("nobody")):
        house.handle(relay, Nack(1, 0, ping.seq))

    house.pass_time(INTERVAL_S * 1.1)

    assert house.status(B) is Status.SUSPECT
    assert house.node.health == 1 + 2


def test_answers_restore_trust() -> None:
    """One by one."""
    house = House(B, C)
    house.hear(B, suspect(A, B))
    assert house.node.health == 1

    answer(house, B)

    assert house.node.health == 0


def test_a_node_that_others_doubt_is_probed_at_once() -> None:
    """A closed connection is a reason to look, not a death."""
    house = House(B, C, D)

    sends = house.node.doubt(B, house.now_s)

    assert [(send.to, type(send.packet)) for send in sends] == [(B, Ping)]
    assert house.status(B) is Status.ALIVE


def test_waking_from_a_stop_nobody_is_dead() -> None:
    """What was about to be concluded is void: the time in which a node stood still is no time that others were silent."""
    house = House(B, C, D, E)
    house.probe(B)
    house.pass_time(INTERVAL_S * 1.1)
    house.hear(C, suspect(B, C, D, E))
    house.node.take_events()

    house.now_s += 300.0
    house.node.tick(house.now_s)
    house.pass_time(INTERVAL_S * 0.9)

    assert house.status(B) is Status.SUSPECT
    assert not [event for event in house.node.take_events() if isinstance(event, MemberChanged)]


def test_waking_in_the_last_moment_of_a_suspicion_a_node_asks_once_more() -> None:
    """What the suspect may have said meanwhile was not heard; only a silence that was listened to counts."""
    house = House(B, C, D, E)
    house.probe(B)
    house.pass_time(INTERVAL_S * 1.1)
    house.hear(C, suspect(B, C, D, E))
    house.pass_time(SETTINGS.suspicion_mult * INTERVAL_S - INTERVAL_S * 0.3)
    assert house.status(B) is Status.SUSPECT

    house.now_s += 300.0
    house.node.tick(house.now_s)
    house.pass_time(INTERVAL_S * 0.9)
    assert house.status(B) is Status.SUSPECT
    house.pass_time(INTERVAL_S * 2 * (1 + house.node.health))

    assert house.status(B) is Status.DEAD


def test_waking_from_a_stop_a_node_says_that_it_lives_before_it_is_told_that_it_is_dead() -> None:
    """With a new incarnation, since the old one may have been declared dead; to the first that it can reach."""
    house = House(B, C, D)

    house.now_s += 5.0
    sends = house.node.tick(house.now_s)

    assert {send.to for send in sends if isinstance(send.packet, Push) and alive(A, 1, 1) in send.packet.news}
    assert house.node.members[A].incarnation == 1


def test_a_stop_is_noticed_too_when_a_packet_comes_first() -> None:
    """Sockets may be served before timers."""
    house = House(B, C, D)
    house.probe(B)

    house.now_s += 60.0
    house.hear(C, suspect(D, C))
    house.pass_time(INTERVAL_S * 0.5)

    assert house.status(B) is Status.ALIVE
    assert house.node.members[A].incarnation == 1


def test_a_clock_that_jumps_changes_nothing() -> None:
    """Neither forth nor back, by however much."""
    house = House(B, C, D)
    for jump_s in (3600.0, -7200.0, 1e9, -1e9):
        house.now_s += jump_s
        house.hear(C, alive(D))
        keep_answering(house, {B, C, D}, 4 * INTERVAL_S)

    assert {house.status(node) for node in (B, C, D)} == {Status.ALIVE}
    house.probe(B)
    house.pass_time(2 * INTERVAL_S)
    assert house.status(B) is Status.SUSPECT


def test_pings_for_others_are_bounded() -> None:
    """Whoever asks for more than that pushes the oldest out."""
    house = House(*(NodeId(f"n{i}") for i in range(50)))

    for seq in range(5000):
        house.handle(NodeId("n0"), Ask(1, 0, seq, NodeId("n1")))
    house.pass_time(INTERVAL_S)

    assert len(house.packets(Nack)) <= 1024
