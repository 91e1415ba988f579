"""Detection times of deaths, effects of stops, and costs of gossip, for clusters in virtual
time.
"""

import statistics
from dataclasses import dataclass

from experiments.gossip_detection.clusters import SEEDS, any_node, joined
from experiments.gossip_detection.hours import NODES
from kvrs.config.gossip import GossipSettings
from kvrs.gossip.facts import (
    Event,
    Fact,
    HolderFact,
    InstanceFact,
    LinkFact,
    MemberChanged,
    SlotsFact,
)
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from kvrs.protocol.instance import Role
from kvrs_testkit.gossip_net import GossipNet, SimNode

# What the sealed transport adds to a packet (54 bytes of header, a name of 12, a MAC of 32), and
# UDP/IP (28).
OVERHEAD_BYTES = 126


@dataclass(slots=True)
class Quantiles:
    times: int
    median: float
    p99: float
    most: float

    @classmethod
    def of(cls, values: list[float]) -> "Quantiles":
        ordered = sorted(values)
        return cls(
            len(ordered),
            statistics.median(ordered),
            ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            ordered[-1],
        )


class _Deaths:
    """The time at which each member declared each other one dead."""

    def __init__(self) -> None:
        self.known_s: dict[NodeId, dict[NodeId, float]] = {}

    def __call__(self, now_s: float, node: SimNode, event: Event) -> None:
        if isinstance(event, MemberChanged) and event.status is Status.DEAD:
            self.known_s.setdefault(event.id, {})[node.id] = now_s


def death_times(count: int, seeds: range, kills: int, loss: float) -> tuple[Quantiles, Quantiles]:
    """From the kill of a random node until the first, and until all others, hold it dead; it comes
    back before the next.
    """
    first, all_others = list[float](), list[float]()
    for seed in seeds:
        deaths = _Deaths()
        net = joined(count, seed, GossipSettings(), observer=deaths)
        net.loss = loss
        for kill in range(kills):
            net.run(net.now_s + 5 + net.random.random())
            victim, killed_s = any_node(net), net.now_s
            deaths.known_s.clear()
            net.kill(victim)
            while len(deaths.known_s.get(victim.id, {})) < count - 1:
                net.run(net.now_s + 0.1)
                assert net.now_s < killed_s + 120, "a death that not all have declared"
            first.append(min(deaths.known_s[victim.id].values()) - killed_s)
            all_others.append(max(deaths.known_s[victim.id].values()) - killed_s)
            assert set(deaths.known_s) == {victim.id}, "another node was declared dead"
            net.restart(victim.id, SEEDS, epoch=kill + 2)
        print(
            f"{count} nodes, loss {loss:.0%}, seed {seed}: {statistics.median(all_others):.2f} s",
            flush=True,
        )
    return Quantiles.of(first), Quantiles.of(all_others)


def deaths_by_stops(seeds: range, minutes: float) -> tuple[int, int, int]:
    """Lifeguard's scenario: 8 of 64 stop for up to 5 s again and again. Stops; deaths of those;
    deaths of all the others.
    """
    stops = of_stopped = of_others = 0
    for seed in seeds:
        declared = set[tuple[NodeId, int]]()

        def observe(
            _: float, node: SimNode, event: Event, declared: set[tuple[NodeId, int]] = declared
        ) -> None:
            if isinstance(event, MemberChanged) and event.status is Status.DEAD:
                declared.add((event.id, event.incarnation))

        net = joined(NODES, seed, GossipSettings(), observer=observe)
        net.loss, shaky = 0.3, list(net.nodes.values())[:8]
        until_s = net.now_s + minutes * 60
        while net.now_s < until_s:
            net.stop(
                net.random.choice(shaky),
                net.random.uniform(0.1, 5.0),
                noticed=net.random.random() < 0.5,
            )
            stops += 1
            net.run(net.now_s + net.random.expovariate(0.5))
        names = {node.id for node in shaky}
        of_stopped += sum(node in names for node, _ in declared)
        of_others += sum(node not in names for node, _ in declared)
    return stops, of_stopped, of_others


def _publish(net: GossipNet, second: int) -> None:
    """Facts of an agent: load of two instances every second, slots, holder and three links
    every fifth.
    """
    draw = net.random.random
    for i, node in enumerate(net.nodes.values()):
        facts: list[tuple[str, Fact]] = [
            (
                f"{role[0]}{i}",
                InstanceFact(
                    Role(role), 1, int(draw() * 9), int(draw() * 30), draw(), int(draw() * 4000)
                ),
            )
            for role in (Role.PREFILL, Role.DECODE)
        ]
        if second % 5 == i % 5:
            facts += [
                (f"d{i}", SlotsFact(int(draw() * 33), draw())),
                (f"agent-n{i}", HolderFact(1 << 34, int(draw() * (1 << 34)))),
            ]
            facts += [
                (f"n{(i + k) % len(net.nodes)}", LinkFact(draw() * 1e9, draw() * 1e8, draw()))
                for k in (1, 2, 3)
            ]
        for name, fact in facts:
            node.gossip.publish(name, fact, node.clock_s(net.now_s))


@dataclass(slots=True)
class Traffic:
    loss: float
    publishing: bool
    bytes_per_s: float  # Sent, per node.
    packets_per_s: float
    # Age of other nodes' load as read, half a second after all have written; 0 without publishing.
    age_s_median: float
    age_s_p99: float


def traffic(loss: float, publishing: bool, seconds: int = 60) -> Traffic:
    net = joined(NODES, 0, GossipSettings(), on_wire=True)
    nodes = list(net.nodes.values())
    net.loss, ages = loss, list[float]()
    packets = size = 0
    for second in range(2 * seconds):
        if second == seconds:
            packets, size = (
                sum(node.sent_packets for node in nodes),
                sum(node.sent_bytes for node in nodes),
            )
        if publishing:
            _publish(net, second)
        net.run(net.now_s + 0.5)
        if second >= seconds:
            for node in nodes[::8]:
                table, clock_s = node.gossip.facts.instances, node.clock_s(net.now_s)
                ages += [
                    clock_s - report.written_s
                    for (owner, _), report in table.items()
                    if owner != node.id
                ]
        net.run(net.now_s + 0.5)
    per_s = (sum(node.sent_packets for node in nodes) - packets) / NODES / seconds
    bytes_per_s = (
        sum(node.sent_bytes for node in nodes) - size
    ) / NODES / seconds + OVERHEAD_BYTES * per_s
    age = Quantiles.of(ages or [0.0])
    return Traffic(loss, publishing, bytes_per_s, per_s, age.median, age.p99)
