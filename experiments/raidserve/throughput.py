"""RaidServe's figure 9, simulated: throughput of eight nodes of eight GPUs whose GPUs fail and come
back as the availability trace of a cloud says, under four ways to use what is left of a node.

Simulated throughout: step times come from profiles of vLLM on H100 through
`experiments/step_times.py`, not from a GPU. Ours drives the state machine of
`kvrs_engine/elastic/reforming.py` through every loss and return; its layouts are those that it
comes to.
"""

import datetime
import random
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.sentinels.rates import GPU_BYTES, Model, models, tokens_per_s
from kvrs_engine.elastic.layouts import hybrid, staged, uneven
from kvrs_engine.elastic.moving import LinkRates
from kvrs_engine.elastic.reforming import (
    CarryOut,
    Event,
    RankOffered,
    RanksLost,
    Reforming,
    ReformingPhase,
)
from kvrs_engine.elastic.speed import shares
from kvrs_engine.elastic.ways import Costs, Room
from kvrs_testkit.layouts import even
from kvrs_testkit.reforming import carry_through

# Beside the repository, outside of it.
DEFAULT_TRACE = (
    Path(__file__).parents[2].parent / "shared" / "data" / "availability" / "gcp_a100x1_east1b.txt"
)
NODES = GPUS = 8
LIMITED = ", batches of at most 256"
RECONFIGURING_S = 10.0  # Of every system, as in the paper.
# Sequences in a batch: as many as there is memory for, and as servers are usually set up.
BATCHES = {"": 1 << 30, LIMITED: 256}
RATES = LinkRates(host_bytes_per_s=50e9, peer_bytes_per_s=362.2e9)


# By model. GPUs that are left: those that standard tensor parallelism uses.
STANDARD = {
    "Llama-3.1-70B": {8: 8} | dict.fromkeys((4, 5, 6, 7), 4),
    "Mixtral-8x22B": {8: 8},
}
LEAST = {"Llama-3.1-70B": 3, "Mixtral-8x22B": 5}  # GPUs on which a node serves.
PUBLISHED = {
    "Llama-3.1-70B": {"of fault-scaled": 0.95, "over standard": 1.28, "over non-uniform": 1.20},
    "Mixtral-8x22B": {"of fault-scaled": 0.92, "over standard": 1.71, "over non-uniform": 1.17},
}


def static_rates(model: Model, most: int) -> dict[str, list[float]]:
    """Rates of each system that depends on the number of GPUs only: by that number."""
    layers = model.units.layers
    whole = tokens_per_s(model, even(model.units, GPUS), most)

    def non_uniform(left: int) -> float:
        if left < LEAST[model.name]:
            return 0.0
        return tokens_per_s(model, uneven(model.units, staged(layers, [range(left)])), most)

    def standard(left: int) -> float:
        used = STANDARD[model.name].get(left, 0)
        return tokens_per_s(model, even(model.units, used), most) if used else 0.0

    counts = range(GPUS + 1)
    return {
        "fault-free": [whole] * (GPUS + 1),
        "fault-scaled": [whole * left / GPUS for left in counts],
        "standard": [standard(left) for left in counts],
        "non-uniform": [non_uniform(left) for left in counts],
    }


@dataclass(slots=True)
class Node:
    """One instance of ours: it re-forms at every loss and return."""

    model: Model
    cache: dict[object, list[float]]
    own: Reforming | None = None
    alive: list[int] = field(default_factory=lambda: list(range(GPUS)))
    next_rank: int = GPUS
    ready_s: list[float] = field(default_factory=list)  # Predicted, of each change.
    # Tokens, for each of BATCHES, until the next change; None: not computed yet.
    per_s: list[float] | None = None

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        if len(self.alive) < LEAST[self.model.name]:
            self.own = None
            return
        units = self.model.units
        room = Room(capacity_bytes=GPU_BYTES, cell_bytes=1, pages=1)
        costs = Costs(rates=RATES, join_s=0.05, restart_s=1.0)
        start = hybrid(units, staged(units.layers, [self.alive]))
        self.own = Reforming(units, start, room, costs, min_ranks=LEAST[self.model.name])

    def lose(self, draw: random.Random) -> None:
        self.per_s = None
        rank = self.alive.pop(draw.randrange(len(self.alive)))
        if self.own is not None:
            self._drive(RanksLost(frozenset({rank})))
            if self.own.phase is ReformingPhase.GIVEN_UP:
                self.own = None

    def regain(self) -> None:
        self.per_s = None
        self.alive.append(self.next_rank)
        self.next_rank += 1
        if self.own is None:
            self._begin()
        else:
            self._drive(RankOffered(self.alive[-1], stage=0))

    def rates(self) -> list[float]:
        if self.per_s is None:
            self.per_s = self._rates()
        return self.per_s

    def _rates(self) -> list[float]:
        if self.own is None:
            return [0.0] * len(BATCHES)
        layout = self.own.layout
        assert sorted(layout.ranks) == sorted(self.alive)
        key = shares(layout, self.model.units), len(self.alive)
        if key not in self.cache:
            found = [tokens_per_s(self.model, layout, most) for most in BATCHES.values()]
            self.cache[key] = found
        return self.cache[key]

    def _drive(self, event: Event) -> None:
        assert self.own is not None
        done = carry_through(self.own, self.own.handle(event))
        self.ready_s += [action.ready_s for action in done if isinstance(action, CarryOut)]


def read_trace(path: Path) -> list[tuple[float, int]]:
    """Seconds from the start, and GPUs that are there, out of 64."""
    rows = [line.split(", ") for line in path.read_text().splitlines() if line.strip()]
    times = [datetime.datetime.fromisoformat(f"{day}T{clock}") for day, clock, _ in rows]
    most = max(int(count) for *_, count in rows)
    return [
        ((at - times[0]).total_seconds(), round(int(count) * NODES * GPUS / most))
        for at, (*_, count) in zip(times, rows, strict=True)
    ]


def simulate(model: Model, trace: list[tuple[float, int]], seed: int) -> dict[str, float]:
    """Mean tokens per second of each system over the whole trace, and our predicted seconds of
    re-forming (median).
    """
    draw = random.Random(seed)
    static = {
        f"{system}{limit}": rates
        for limit, most in BATCHES.items()
        for system, rates in static_rates(model, most).items()
    }
    cache: dict[object, list[float]] = {}
    nodes = [Node(model, cache) for _ in range(NODES)]
    total = dict.fromkeys([*static, *(f"ours{limit}" for limit in BATCHES)], 0.0)
    there = NODES * GPUS
    for (at_s, count), (until_s, _) in pairwise(trace):
        changed: set[int] = set()
        while there > count:
            at = draw.choice([at for at, node in enumerate(nodes) for _ in node.alive])
            nodes[at].lose(draw)
            changed.add(at)
            there -= 1
        while there < count:
            missing = [at for at, node in enumerate(nodes) for _ in range(GPUS - len(node.alive))]
            at = draw.choice(missing)
            nodes[at].regain()
            changed.add(at)
            there += 1
        for at, node in enumerate(nodes):
            lasting_s = until_s - at_s
            pause_s = min(lasting_s, RECONFIGURING_S) if at in changed else 0.0
            for system, rates in static.items():
                stops = 0.0 if system.startswith("fault") else pause_s
                total[system] += rates[len(node.alive)] * (lasting_s - stops)
            for limit, rate in zip(BATCHES, node.rates(), strict=True):
                total[f"ours{limit}"] += rate * (lasting_s - pause_s)
    seconds = trace[-1][0]
    found = {system: value / seconds for system, value in total.items()}
    return found | {"ready_s": statistics.median([s for node in nodes for s in node.ready_s])}


def ratios(found: dict[str, float], limit: str) -> dict[str, float]:
    ours = found[f"ours{limit}"]
    return {
        "of fault-scaled": ours / found[f"fault-scaled{limit}"],
        "over standard": ours / found[f"standard{limit}"],
        "over non-uniform": ours / found[f"non-uniform{limit}"],
    }


def as_text(
    results: dict[str, list[dict[str, float]]], rates: dict[str, dict[str, list[float]]]
) -> str:
    lines = [
        "SIMULATED: step times from profiles, no GPU; published figures are of 8 real H100",
        "",
    ]
    for model in models():
        found = results[model.name]
        lines.append(
            f"{model.name}: output tokens/s of 64 GPUs over the trace, mean of {len(found)} seeds"
        )
        for system in ("fault-free", "fault-scaled", "ours", "non-uniform", "standard"):
            mean = statistics.fmean(each[system] for each in found)
            lines.append(f"  {system:18} {mean:12,.0f}")
        for limit in BATCHES:
            ratio = f"ratio{limit}"
            lines.append(f"  {ratio:30} {'ours':>9} {'least .. most':>16} {'RaidServe':>10}")
            for name, published in PUBLISHED[model.name].items():
                values = [ratios(each, limit)[name] for each in found]
                span = f"{min(values):.3f} .. {max(values):.3f}"
                lines.append(
                    f"  {name:30} {statistics.fmean(values):9.3f} {span:>16} {published:10.2f}"
                )
        ready_s = statistics.median(each["ready_s"] for each in found)
        lines.append(f"  weights on demand, predicted, median of all changes: {ready_s:.2f} s")
        least = LEAST[model.name]
        lines.append(f"  tokens/s of one node by GPUs that are left, {least} to {GPUS}:")
        for system in ("fault-scaled", "hybrid", "non-uniform", "standard"):
            values = rates[model.name][system][least:]
            lines.append(f"  {system:18} " + " ".join(f"{value:8,.0f}" for value in values))
        lines.append("")
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    record = Record(*range(options.seeds), timed=False)
    trace = read_trace(options.trace)
    results, rates = {}, {}
    with ProcessPoolExecutor() as pool:  # As many at a time as there are CPUs.
        running = {
            model.name: [pool.submit(simulate, model, trace, seed) for seed in range(options.seeds)]
            for model in models()
        }
        for name, futures in running.items():
            results[name] = [future.result() for future in futures]
    for model in models():
        layouts = {
            left: hybrid(model.units, staged(model.units.layers, [range(left)]))
            for left in range(LEAST[model.name], GPUS + 1)
        }
        most = BATCHES[""]
        rates[model.name] = static_rates(model, most) | {
            "hybrid": [
                tokens_per_s(model, layouts[left], most) if left in layouts else 0.0
                for left in range(GPUS + 1)
            ]
        }
    text = as_text(results, rates)
    print(text)
    figures = {"results": results, "rates": rates}
    record.keep(options.out, "throughput", figures, text)


if __name__ == "__main__":
    main()
