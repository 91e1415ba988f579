"""How soon all know of a death, how often the living are declared dead, what it costs: in virtual time, over many seeds.

The nodes are the product's own objects (`kvrs.gossip.node.Gossip`), the network and the clocks are `kvrs.sim.gossip`.
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.gossip_detection.chunks import NODES, Chunk, run_chunk, run_chunks
from experiments.gossip_detection.clusters import SEEDS, any_node, joined
from kvrs.gossip.config import GossipSettings
from kvrs.gossip.events import Event, MemberChanged
from kvrs.gossip.facts import Fact, HolderFact, InstanceFact, LinkFact, SlotsFact
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from kvrs.protocol.instance import Role
from kvrs.sim.gossip import GossipNet, SimNode

BARS = {"5": ("p99", 3.0), "64": ("median", 5.0), "1000": ("median", 10.0)}
HOURS = 1000
TRAFFIC_BAR = 20_000
LOSS = 0.2
# What the sealed transport adds to a packet (54 bytes of header, a name of 12, a MAC of 32), and UDP/IP (28).
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
            len(ordered), statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], ordered[-1]
        )


class _Deaths:
    """When whom who came to hold dead."""

    def __init__(self) -> None:
        self.known_s: dict[NodeId, dict[NodeId, float]] = {}

    def __call__(self, now_s: float, node: SimNode, event: Event) -> None:
        if isinstance(event, MemberChanged) and event.status is Status.DEAD:
            self.known_s.setdefault(event.id, {})[node.id] = now_s


def death_times(count: int, seeds: range, kills: int, loss: float) -> tuple[Quantiles, Quantiles]:
    """From the kill of a random node until the first, and until all others, hold it dead; it comes back before the next."""
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
                assert net.now_s < killed_s + 120, "a death that not everybody comes to know"
            first.append(min(deaths.known_s[victim.id].values()) - killed_s)
            all_others.append(max(deaths.known_s[victim.id].values()) - killed_s)
            assert set(deaths.known_s) == {victim.id}, "somebody else was declared dead"
            net.restart(victim.id, SEEDS, epoch=kill + 2)
        print(f"{count} nodes, loss {loss:.0%}, seed {seed}: {statistics.median(all_others):.2f} s", flush=True)
    return Quantiles.of(first), Quantiles.of(all_others)


def deaths_by_stops(seeds: range, minutes: float) -> tuple[int, int, int]:
    """Lifeguard's scenario: 8 of 64 stop for up to 5 s again and again. Stops; deaths of those; deaths of all the others."""
    stops = of_stopped = of_others = 0
    for seed in seeds:
        declared = set[tuple[NodeId, int]]()

        def observe(_: float, node: SimNode, event: Event, declared: set[tuple[NodeId, int]] = declared) -> None:
            if isinstance(event, MemberChanged) and event.status is Status.DEAD:
                declared.add((event.id, event.incarnation))

        net = joined(NODES, seed, GossipSettings(), observer=observe)
        net.loss, shaky = 0.3, list(net.nodes.values())[:8]
        until_s = net.now_s + minutes * 60
        while net.now_s < until_s:
            net.stop(net.random.choice(shaky), net.random.uniform(0.1, 5.0), noticed=net.random.random() < 0.5)
            stops += 1
            net.run(net.now_s + net.random.expovariate(0.5))
        names = {node.id for node in shaky}
        of_stopped += sum(node in names for node, _ in declared)
        of_others += sum(node not in names for node, _ in declared)
    return stops, of_stopped, of_others


def _publish(net: GossipNet, second: int) -> None:
    """What an agent has to say: load of two instances every second, slots, holder and three links every fifth."""
    draw = net.random.random
    for i, node in enumerate(net.nodes.values()):
        facts: list[tuple[str, Fact]] = [
            (f"{role[0]}{i}", InstanceFact(Role(role), 1, int(draw() * 9), int(draw() * 30), draw(), int(draw() * 4000)))
            for role in (Role.PREFILL, Role.DECODE)
        ]
        if second % 5 == i % 5:
            facts += [
                (f"d{i}", SlotsFact(int(draw() * 33), draw())),
                (f"agent-n{i}", HolderFact(1 << 34, int(draw() * (1 << 34)))),
            ]
            facts += [(f"n{(i + k) % len(net.nodes)}", LinkFact(draw() * 1e9, draw() * 1e8, draw())) for k in (1, 2, 3)]
        for name, fact in facts:
            node.gossip.publish(name, fact, node.clock_s(net.now_s))


@dataclass(slots=True)
class Traffic:
    loss: float
    publishing: bool
    bytes_per_s: float  # Sent, per node.
    packets_per_s: float
    age_s_median: float  # Of other nodes' load as read, half a second after everybody wrote anew; 0 without publishing.
    age_s_p99: float


def traffic(loss: float, publishing: bool, seconds: int = 60) -> Traffic:
    net = joined(NODES, 0, GossipSettings(), on_wire=True)
    nodes = list(net.nodes.values())
    net.loss, ages = loss, list[float]()
    packets = size = 0
    for second in range(2 * seconds):
        if second == seconds:
            packets, size = sum(node.sent_packets for node in nodes), sum(node.sent_bytes for node in nodes)
        if publishing:
            _publish(net, second)
        net.run(net.now_s + 0.5)
        if second >= seconds:
            for node in nodes[::8]:
                table, clock_s = node.gossip.facts.instances, node.clock_s(net.now_s)
                ages += [clock_s - report.written_s for (owner, _), report in table.items() if owner != node.id]
        net.run(net.now_s + 0.5)
    per_s = (sum(node.sent_packets for node in nodes) - packets) / NODES / seconds
    bytes_per_s = (sum(node.sent_bytes for node in nodes) - size) / NODES / seconds + OVERHEAD_BYTES * per_s
    age = Quantiles.of(ages or [0.0])
    return Traffic(loss, publishing, bytes_per_s, per_s, age.median, age.p99)


def as_text(figures: dict[str, object], chunks: list[Chunk], harder: list[Chunk], deaths: dict[str, Quantiles]) -> str:
    lines = [f"{'death known by all others, s':<40}{'median':>9}{'p99':>9}{'longest':>9}{'kills':>7}   bar"]
    for name, quantiles in deaths.items():
        count = name.split(" ")[0]
        bar = f"{BARS[count][0]} {BARS[count][1]:g}" if name == f"{count} nodes" else ""
        row = f"{quantiles.median:>9.2f}{quantiles.p99:>9.2f}{quantiles.most:>9.2f}{quantiles.times:>7}   {bar}"
        lines.append(f"{name:<40}{row}".rstrip())
    lines += [
        "",
        f"{'nobody dies, 64 nodes':<26}{'hours':>7}{'false deaths':>14}{'suspicions':>12}{'accusers':>10}{'nearest':>9}   bar",
    ]
    for label, some in ((f"{LOSS:.0%} of all packets lost", chunks), *((f"{chunk.loss:.0%}", [chunk]) for chunk in harder)):
        hours, dead = sum(chunk.hours for chunk in some), sum(chunk.deaths for chunk in some)
        suspicions, accusers = sum(chunk.suspicions for chunk in some), max(chunk.most_accusers for chunk in some)
        bar = f"   0 in {HOURS:,} h" if some is chunks else ""
        lines.append(
            f"{label:<26}{hours:>7g}{dead:>14}{suspicions:>12,}{accusers:>10}{max(chunk.nearest for chunk in some):>9.2f}{bar}"
        )
    stops = figures["stops"]
    assert isinstance(stops, dict)
    lines += [
        "  nearest: longest time that anybody held a suspicion, as a share of what one without confirmation is given",
        "",
        f"8 of 64 nodes stop {stops['stops']:,} times for up to 5 s, 30 % loss: "
        f"{stops['of_stopped']} times a stopped one was declared dead, {stops['of_others']} times another (bar 0)",
        "",
        f"{'sent per node, 64 nodes':<40}{'kB/s':>9}{'packets/s':>11}{'age of load, s: median':>24}{'p99':>7}   bar",
    ]
    for row in figures["traffic"]:  # type: ignore[attr-defined] # It is what main() put there.
        label = f"loss {row['loss']:.0%}, {'load every second' if row['publishing'] else 'nothing published'}"
        ages = f"{row['age_s_median']:>24.2f}{row['age_s_p99']:>7.2f}" if row["publishing"] else f"{'':>31}"
        lines.append(f"{label:<40}{row['bytes_per_s'] / 1e3:>9.2f}{row['packets_per_s']:>11.1f}{ages}   {TRAFFIC_BAR // 1000}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=HOURS, help="simulated, without a death; those of earlier runs count")
    parser.add_argument("--budget-s", type=float, default=600.0, help="after which no further hour is begun")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--large-seeds", type=int, default=2, help="clusters of 1,000 nodes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    os.nice(19 - os.nice(0))
    arguments.out.mkdir(parents=True, exist_ok=True)
    begun_s = time.process_time()
    first: dict[str, Quantiles] = {}
    deaths: dict[str, Quantiles] = {}
    for name, count, seeds, kills, loss in (
        ("5 nodes", 5, range(20), 20, 0.0),
        ("64 nodes", 64, range(10), 20, 0.0),
        ("64 nodes, 20 % loss", 64, range(5), 20, LOSS),
        ("1000 nodes", 1000, range(arguments.large_seeds), 10, 0.0),
    ):
        first[name], deaths[name] = death_times(count, seeds, kills, loss)
    stops = dict(zip(("stops", "of_stopped", "of_others"), deaths_by_stops(range(5), 10.0), strict=True))
    costs = [asdict(traffic(loss, publishing)) for loss, publishing in ((0.0, False), (0.0, True), (LOSS, True))]
    harder = [run_chunk(0, 0.25, loss) for loss in (0.3, 0.4)]
    chunks = run_chunks(arguments.out / "hours.json", LOSS, arguments.hours, arguments.budget_s, arguments.workers)
    figures: dict[str, object] = {
        "first_s": {name: asdict(quantiles) for name, quantiles in first.items()},
        "all_s": {name: asdict(quantiles) for name, quantiles in deaths.items()},
        "stops": stops,
        "traffic": costs,
        "harder": [asdict(chunk) for chunk in harder],
        "hours": sum(chunk.hours for chunk in chunks),
        "false_deaths": sum(chunk.deaths for chunk in chunks),
        "cpu_s": round(time.process_time() - begun_s + sum(chunk.cpu_s for chunk in chunks)),
        "settings": GossipSettings().model_dump(mode="json"),
    }
    table = as_text(figures, chunks, harder, deaths)
    (arguments.out / "gossip_detection.json").write_text(json.dumps(figures, indent=2) + "\n")
    (arguments.out / "gossip_detection.txt").write_text(table)
    print(table, end="")
    slow = [name for name, (which, bar_s) in BARS.items() if getattr(deaths[f"{name} nodes"], which) > bar_s]
    wrong = sum(chunk.deaths for chunk in chunks) + stops["of_others"]
    return 1 if slow or wrong or max(row["bytes_per_s"] for row in costs) > TRAFFIC_BAR else 0


if __name__ == "__main__":
    raise SystemExit(main())
