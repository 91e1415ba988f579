"""Limits of a cluster outside of its decisions: the age of another node's load by gossip and what
each node sends for it, and how long the streams of a lost rack wait for slots.

    python -m experiments.simulator.limits [--nodes 16 64 256 512] [--workers 64 256 1000]

Both run in virtual time, so nothing here depends on the machine. *Gossip*: an agent on each node
publishes the load of its instance every second; ages are those of all other nodes' loads, as some
nodes have them half a second after all have written. *Slots*: a rack of 16 nodes (a quarter at
most) is lost as the middle request comes; its streams may not go on at one target together.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from experiments.command_line import parser_of
from experiments.lumen import simulated as lumen
from experiments.record import Record
from experiments.simulator.scale import rack_lost
from kvrs.gossip.facts import InstanceFact
from kvrs.ids import NodeId
from kvrs.protocol.instance import Role
from kvrs_lab.report.metrics import percentile
from kvrs_testkit.gossip_net import GossipNet

SEEDS = {NodeId(f"n{i}"): f"n{i}:7" for i in range(3)}
WARM_UP_S = 20
MEASURED_S = 10
INTERVAL_S = 0.25  # Between reports of a process.
READERS = 8  # Nodes whose tables are read.


@dataclass(frozen=True, slots=True)
class Spread:
    nodes: int
    bytes_per_s: float  # Sent by each node, without headers of UDP and IP.
    age_s: float  # Median.
    age_s_p99: float


@dataclass(frozen=True, slots=True)
class Rack:
    workers: int
    requests: int
    interrupted: int
    slot_denials: int
    pause_s: float  # Median of the interrupted streams.
    pause_s_max: float


def spread(count: int) -> Spread:
    net = GossipNet(0, on_wire=True)
    for i in range(count):
        net.add(f"n{i}", SEEDS)
    while any(len(node.gossip.members) < count for node in net.nodes.values()):
        net.run(net.now_s + 1.0)
    nodes, ages = list(net.nodes.values()), list[float]()
    for second in range(WARM_UP_S + MEASURED_S):
        if second == WARM_UP_S:
            before = sum(node.sent_bytes for node in nodes)
        for node in nodes:
            load = InstanceFact(Role.DECODE, 1, int(net.random.random() * 9), second, 0.1, 4000)
            node.gossip.publish(f"d-{node.id}", load, node.clock_s(net.now_s))
        net.run(net.now_s + 0.5)
        if second >= WARM_UP_S:
            for node in nodes[:: count // READERS]:
                ages += [
                    node.clock_s(net.now_s) - report.written_s
                    for (owner, _), report in node.gossip.facts.of(InstanceFact).items()
                    if owner != node.id
                ]
        net.run(net.now_s + 0.5)
    sent = sum(node.sent_bytes for node in nodes) - before
    return Spread(
        count,
        sent / count / MEASURED_S,
        percentile(ages, 50) or 0.0,
        percentile(ages, 99) or 0.0,
    )


def rack(workers: int, each: int) -> Rack:
    world, asked = rack_lost(workers, each, INTERVAL_S)
    outcome = world.run()
    pauses_s = outcome.pauses_s
    return Rack(
        workers,
        len(asked),
        outcome.recovered_streams,
        outcome.slot_denials,
        percentile(pauses_s, 50) or 0.0,
        max(pauses_s, default=0.0),
    )


def as_text(spreads: Sequence[Spread], racks: Sequence[Rack]) -> str:
    lines = ["load of every node, each second, by gossip"]
    lines.append(f"{'nodes':>8}{'sent by each, kB/s':>20}{'age s':>8}{'p99':>8}")
    lines += [
        f"{row.nodes:>8,}{row.bytes_per_s / 1e3:>20.1f}{row.age_s:>8.1f}{row.age_s_p99:>8.1f}"
        for row in spreads
    ]
    lines += ["", f"a rack is lost; {lumen.LLAMA.pace}, virtual time"]
    lines.append(
        f"{'workers':>8}{'requests':>10}{'interrupted':>13}{'slots denied':>14}"
        f"{'pause s':>9}{'longest':>9}"
    )
    lines += [
        f"{row.workers:>8,}{row.requests:>10,}{row.interrupted:>13}{row.slot_denials:>14}"
        f"{row.pause_s:>9.2f}{row.pause_s_max:>9.2f}"
        for row in racks
    ]
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 64, 256, 512])
    parser.add_argument("--workers", nargs="+", type=int, default=[64, 256, 1000])
    parser.add_argument("--each", type=int, default=6, help="requests of a worker")
    options = parser.parse_args()
    record = Record(0, timed=False)
    spreads, racks = list[Spread](), list[Rack]()
    for count in options.nodes:
        spreads.append(spread(count))
        print(as_text(spreads[-1:], []), flush=True)
    for workers in options.workers:
        racks.append(rack(workers, options.each))
        print(as_text([], racks[-1:]), flush=True)
    text = as_text(spreads, racks)
    print(text)
    rows = {"gossip": [asdict(row) for row in spreads], "racks": [asdict(row) for row in racks]}
    record.keep(options.out, "limits", rows, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
