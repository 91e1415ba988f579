"""Gossip under faults: loss, duplicates, reordering, partitions, stops, deaths, restarts, clock
jumps.
"""

import pytest

from kvrs.gossip.facts import Event, MemberChanged
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from kvrs_testkit.gossip_chaos import ChaosNetwork
from kvrs_testkit.gossip_net import GossipNet, SimNode


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_after_any_faults_all_nodes_agree_on_members_and_facts(first: int) -> None:
    """Meanwhile no state of a member goes back, and only its owner raises it (checked at each
    step).
    """
    for seed in range(first, first + 10):
        chaos = ChaosNetwork(seed)

        chaos.run_with_faults(12)
        chaos.run_without_faults(40.0)

        chaos.assert_agreed()


def test_a_seed_determines_a_run() -> None:
    """A failure can be reproduced."""
    runs = []
    for _ in range(2):
        chaos = ChaosNetwork(7)
        chaos.run_with_faults(10)
        runs.append((chaos.net.now_s, chaos.net.delivered, sorted(map(str, chaos.states.values()))))

    assert runs[0] == runs[1]


class Deaths:
    """Deaths, with the nodes that declared them first."""

    def __init__(self) -> None:
        self.declared: list[tuple[NodeId, NodeId]] = []

    def __call__(self, now_s: float, node: SimNode, event: Event) -> None:
        if (
            isinstance(event, MemberChanged)
            and event.status is Status.DEAD
            and event.suspectors[0] == node.id
        ):
            self.declared.append((node.id, event.id))


def cluster(count: int, seed: int, deaths: Deaths | None = None) -> GossipNet:
    net = GossipNet(seed, observer=deaths)
    for i in range(count):
        net.add(f"n{i}", {NodeId("n0"): "n0:7", NodeId("n1"): "n1:7"})
    net.run(10.0)
    return net


def held(net: GossipNet, of: SimNode) -> set[Status]:
    return {
        node.gossip.members[of.id].status
        for node in net.nodes.values()
        if node is not of and node.up
    }


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("buffered_packets", [0, 512])
@pytest.mark.parametrize("seed", range(2))
def test_a_stopped_node_declares_no_death_and_refutes_within_two_seconds(
    seed: int, buffered_packets: int, noticed: bool
) -> None:
    """Its clock may not show the stop, its socket may have buffered packets, and some are lost."""
    deaths = Deaths()
    net = cluster(16, seed, deaths)
    net.loss, net.buffered_packets = 0.2, buffered_packets
    stopped = net.nodes[NodeId(f"n{seed + 3}")]

    net.stop(stopped, 12.0, noticed=noticed)
    net.run(21.9)
    assert held(net, stopped) == {Status.DEAD}
    net.run(24.0)

    assert held(net, stopped) <= {Status.ALIVE, Status.SUSPECT}
    net.run(60.0)
    assert {victim for _, victim in deaths.declared} == {stopped.id}
    assert stopped.id not in {suspector for suspector, _ in deaths.declared}


@pytest.mark.parametrize("seed", range(2))
def test_stops_of_some_are_no_deaths_of_others(seed: int) -> None:
    """Lifeguard's scenario: a quarter of the members stops again and again, and 30 % of all packets
    are lost.
    """
    deaths = Deaths()
    net = cluster(16, seed, deaths)
    net.loss, shaky = 0.3, list(net.nodes.values())[:4]

    for _ in range(30):
        net.stop(
            net.random.choice(shaky),
            net.random.uniform(0.2, 5.0),
            noticed=net.random.random() < 0.5,
        )
        net.run(net.now_s + net.random.uniform(0.5, 3.0))

    assert {victim for _, victim in deaths.declared} <= {node.id for node in shaky}


@pytest.mark.parametrize("seed", range(2))
def test_a_node_that_receives_nothing_causes_no_deaths_of_others(seed: int) -> None:
    """One-way partition: its suspicions reach all nodes, and so do the refutations, except
    itself.
    """
    net = cluster(12, seed)
    deaf = net.nodes[NodeId("n5")]

    net.cut = lambda _, target: target == deaf.id
    for _ in range(60):
        net.run(net.now_s + 0.5)
        others = [node for node in net.nodes.values() if node is not deaf]
        for node in others:
            assert all(node.gossip.members[other.id].reachable for other in others)

    assert held(net, deaf) == {Status.DEAD}


@pytest.mark.parametrize("seed", range(2))
def test_a_cut_link_between_two_nodes_is_no_death(seed: int) -> None:
    """In both directions or one: relays still reach both."""
    deaths = Deaths()
    net = cluster(8, seed, deaths)

    net.cut = lambda a, b: {a, b} == {"n2", "n3"} or (a, b) == ("n4", "n5")
    net.run(60.0)

    assert deaths.declared == []


@pytest.mark.parametrize("count", [2, 3, 5, 16])
def test_a_death_is_known_to_all_within_seconds(count: int) -> None:
    """With and without loss."""
    for seed in range(2):
        net = cluster(count, seed)
        net.loss = 0.2 * (seed % 2)
        victim = net.nodes[NodeId("n1")]

        net.kill(victim)
        net.run(net.now_s + 12.0)

        assert held(net, victim) == {Status.DEAD}


@pytest.mark.parametrize(
    ("probe_interval_s", "delay_s"),
    [(0.5, (0.0001, 0.01)), (2.5, (0.05, 0.25)), (0.5, (0.00001, 0.001))],
)
def test_an_interval_that_suits_the_network_detects_deaths_and_only_deaths(
    probe_interval_s: float, delay_s: tuple[float, float]
) -> None:
    """Round trips of half a second are no deaths with 2.5 s; with 5 % loss."""
    deaths = Deaths()
    net = GossipNet(4, probe_interval_s=probe_interval_s, on_wire=True, observer=deaths)
    net.delay_s, net.loss = delay_s, 0.05
    for i in range(12):
        net.add(f"n{i}", {NodeId("n0"): "n0:7"})
    net.run(60.0)
    assert deaths.declared == []

    net.kill(net.nodes[NodeId("n5")])
    net.run(60.0 + 30 * probe_interval_s)

    assert held(net, net.nodes[NodeId("n5")]) == {Status.DEAD}
    assert {victim for _, victim in deaths.declared} == {"n5"}


def test_many_deaths_at_once_are_all_detected() -> None:
    """Most relays, and most nodes that could confirm, are dead too."""
    net = cluster(20, 1)
    dead = list(net.nodes.values())[:15]

    for node in dead:
        net.kill(node)
    net.run(net.now_s + 30.0)

    assert all(held(net, node) == {Status.DEAD} for node in dead)
    living = [node for node in net.nodes.values() if node.up]
    assert all(held(net, node) == {Status.ALIVE} for node in living)


def test_clocks_need_not_agree() -> None:
    """Neither in what they show nor in how fast they run."""
    deaths = Deaths()
    net = GossipNet(3, observer=deaths)
    for i in range(10):
        net.add(f"n{i}", {NodeId("n0"): "n0:7"}, rate=0.9 + 0.02 * i)

    net.loss = 0.1
    net.run(120.0)

    assert deaths.declared == []
