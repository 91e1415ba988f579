"""Where the checkpoints of a dead node are: with what share on one agent, and how many die with it
when a quarter of all nodes does.

python -m experiments.lumen.placement [--out DIR]
"""

import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.backup import Placement
from kvrs.core.checkpoints import PlacementCandidate, choose_agent
from kvrs.ids import InstanceId, NodeId

NODES = 8
LIVE = 200  # Checkpoints at a time.
PLACED = 1500
LOOK_EVERY = 50
FOOTPRINT_BYTES = 419_430_400  # 512 tokens of OPT-13B.
HOST_TO_DEVICE_BYTES_PER_S = 26e9
ALPHAS = (0.25, 0.5, 1.0, 2.0, 4.0)
BAR = 0.20
SEEDS = range(5)

# LUMEN, experiment B.4: 16 of 64 workers fail at once.
CO_FAILURE_NODES = 64
CO_FAILED = 16
CO_FAILURE_LIVE = 1600
CO_FAILURE_DRAWS = 20
PUBLISHED_CO_FAILURE = 0.238

FOOTPRINTS: dict[str, Callable[[random.Random], int]] = {
    "equal": lambda draw: FOOTPRINT_BYTES,
    "lognormal, sigma 1": lambda draw: int(FOOTPRINT_BYTES * draw.lognormvariate(0.0, 1.0)),
}


@dataclass(frozen=True)
class Checkpoint:
    serving: NodeId
    node: NodeId
    size_bytes: int


class Cluster:
    """The load table as one proxy keeps it, with idle queues."""

    def __init__(self, how: Placement, alpha: float, seed: int, nodes: int, live: int) -> None:
        self._how = how
        self._alpha = alpha
        self._draw = random.Random(seed)
        self._live = live
        self.nodes = [NodeId(f"n{number}") for number in range(nodes)]
        self.held: list[Checkpoint] = []
        self._bytes: Counter[NodeId] = Counter()
        self._count: Counter[NodeId] = Counter()
        self._between: defaultdict[NodeId, Counter[NodeId]] = defaultdict(Counter)

    def place(self, number: int, size_bytes: int) -> None:
        """A new stream at a random node; the first ends that is drawn once there are too many."""
        serving = self._draw.choice(self.nodes)
        found = choose_agent(
            self._how, list(self._table(serving)), serving, size_bytes, self._alpha, number
        )
        assert found is not None
        self._add(Checkpoint(serving, found.node, size_bytes), 1)
        if len(self.held) > self._live:
            self._add(self.held.pop(self._draw.randrange(len(self.held))), -1)

    def _add(self, checkpoint: Checkpoint, sign: int) -> None:
        if sign > 0:
            self.held.append(checkpoint)
        self._count[checkpoint.node] += sign
        self._bytes[checkpoint.node] += sign * checkpoint.size_bytes
        self._between[checkpoint.serving][checkpoint.node] += sign * checkpoint.size_bytes

    def _table(self, serving: NodeId) -> Iterator[PlacementCandidate]:
        for node in self.nodes:
            yield PlacementCandidate(
                InstanceId(f"agent-{node}"),
                node,
                queueing_delay_s=0.0,
                reserved_bytes=self._bytes[node],
                checkpoints=self._count[node],
                capacity_bytes=1 << 50,
                host_to_device_bytes_per_s=HOST_TO_DEVICE_BYTES_PER_S,
                of_serving_bytes=self._between[serving][node],
            )

    def shares(self) -> list[float]:
        """For each node: the largest share of its checkpoints that one agent keeps."""
        found = []
        for node in self.nodes:
            holders = Counter(each.node for each in self.held if each.serving == node)
            if holders:
                found.append(max(holders.values()) / holders.total())
        return found

    def lost_together(self, dead: set[NodeId]) -> float:
        """The share of the streams of the dead nodes whose holder is dead too."""
        victims = [each for each in self.held if each.serving in dead]
        return sum(each.node in dead for each in victims) / len(victims)


def co_failure(how: Placement) -> float:
    """The mean over seeds and draws of the nodes that fail."""
    found: list[float] = []
    for seed in SEEDS:
        cluster = Cluster(how, 1.0, seed, CO_FAILURE_NODES, CO_FAILURE_LIVE)
        draw = random.Random(seed + 2000)
        for number in range(2 * CO_FAILURE_LIVE):
            cluster.place(number, FOOTPRINTS["equal"](draw))
        for _ in range(CO_FAILURE_DRAWS):
            found.append(cluster.lost_together(set(draw.sample(cluster.nodes, CO_FAILED))))
    return fmean(found)


def spread(how: Placement, alpha: float, footprint: str) -> float:
    """The mean over nodes, moments and seeds."""
    found: list[float] = []
    for seed in SEEDS:
        cluster, draw = Cluster(how, alpha, seed, NODES, LIVE), random.Random(seed + 1000)
        for number in range(PLACED):
            cluster.place(number, FOOTPRINTS[footprint](draw))
            if number >= 2 * LIVE and number % LOOK_EVERY == 0:
                found += cluster.shares()
    return fmean(found)


def main() -> int:
    options = parser_of(__doc__, __file__).parse_args()
    record = Record(*SEEDS, timed=False)
    rows: list[dict[str, Any]] = [
        {
            "footprints": footprint,
            "placement": how.value,
            "alpha": alpha,
            "largest_share": round(spread(how, alpha, footprint), 3),
        }
        for footprint in FOOTPRINTS
        for how in Placement
        for alpha in (ALPHAS if how is Placement.LOAD else (1.0,))
    ]
    equal = next(row for row in rows if row["placement"] == "load" and row["alpha"] == 1.0)
    lines = [f"{'footprints':20} {'placement':10} {'alpha':>6} {'largest share':>14}"]
    lines += [
        f"{row['footprints']:20} {row['placement']:10} {row['alpha']:6} {row['largest_share']:14}"
        for row in rows
    ]
    passed = equal["largest_share"] <= BAR
    lines.append(f"{'PASSED' if passed else 'FAILED'}: {equal['largest_share']}, bar {BAR}")
    together = {how.value: round(co_failure(how), 3) for how in Placement}
    lines += [
        "",
        f"{CO_FAILED} of {CO_FAILURE_NODES} nodes fail at once: victims whose holder is among them",
        *(f"{how:10} {share:6.1%}" for how, share in together.items()),
        f"published, LUMEN B.4: {PUBLISHED_CO_FAILURE:.1%}; with holders drawn evenly from the "
        f"others: {(CO_FAILED - 1) / (CO_FAILURE_NODES - 1):.1%}",
    ]
    text = "\n".join(lines)
    print(text)
    figures = {"bar": BAR, "rows": rows, "co_failure": together}
    record.keep(options.out, "placement", figures, text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
