"""The simulator beside formulas: an M/D/1 queue of prefills, a full batch of decode steps, and a
hand-off.

    python -m experiments.simulator.queueing [--requests 4000] [--seeds 5]

In virtual time; the figures depend on the seeds alone.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, floor, log
from random import Random
from statistics import fmean
from typing import Any

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.profiles import catalog
from kvrs_lab.report import metrics
from kvrs_lab.report.student import interval
from kvrs_lab.sim.clients import records_of
from kvrs_lab.sim.first_token import FirstToken
from kvrs_lab.sim.site import LATENCY_S
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_lab.traces.records import StreamRecord

PACE = "opt-13b-a100-distserve-tp1"
PROMPT = 512
BEGIN_S = 2.0  # Before it, proxies get to know their instances.
LOADS = (0.3, 0.5, 0.7)
BAR = 0.03
_TERM = 1e-12


def waits_at_most(load: float, services: float) -> float:
    """P(W <= t) of an M/D/1 queue, t in service times (Erlang, 1909): (1 - load) times the sum over
    k = 0..floor(t) of (load (k - t))^k / k! e^(-load (k - t)).
    """
    total = 0.0
    for k in range(floor(services) + 1):
        x, term = load * (k - services), 1.0
        for factor in range(1, k + 1):
            term *= x / factor
        total += term * exp(-x)
    return (1 - load) * total


def wait_percentile(load: float, q: float) -> float:
    """The q-th percentile of W, in service times, by bisection."""
    low, high = 0.0, 1.0
    if waits_at_most(load, 0.0) >= q / 100:
        return 0.0
    while waits_at_most(load, high) < q / 100:
        high *= 2
    while high - low > _TERM * high and (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if waits_at_most(load, middle) < q / 100 else (low, middle)
    return high


def mean_wait(load: float) -> float:
    """In service times (Pollaczek and Khinchine)."""
    return load / (2 * (1 - load))


def waits(arrivals_s: Sequence[float], service_s: float) -> list[float]:
    """The waits of these arrivals at one server (Lindley's recursion)."""
    found, free_s = [], 0.0
    for at_s in arrivals_s:
        found.append(max(0.0, free_s - at_s))
        free_s = max(free_s, at_s) + service_s
    return found


def config_of(*, divided: bool, **engine: Any) -> Config:
    """One instance for both stages, or one for each, on nodes of their own."""
    roles = ("prefill", "decode") if divided else ("both",)
    nodes = [
        {"id": f"n{n}", "instances": [{"id": role, "role": role}]} for n, role in enumerate(roles)
    ]
    settings = {"pace": PACE, "pages": 8192, "max_batch_tokens": PROMPT, **engine}
    return parse_config(
        {"cluster": {"engine": settings, "nodes": nodes}, "backup": {"mode": "off"}}
    )


def prompt(number: int, tokens: int = PROMPT) -> list[int]:
    """No two share a page."""
    return [number + 1, *range(100, 99 + tokens)]


def play(
    config: Config, arrivals: Sequence[Arrival], first_token: FirstToken, seed: int = 0
) -> tuple[list[StreamRecord], World]:
    world = World(config, arrivals, [], seed=seed, first_token=first_token)
    world.run()
    return records_of(arrivals, world.cluster.proxies), world


def network_s(world: World, name: str) -> float:
    """From the proxy to the instance and back."""
    return 2 * world.cluster.serving[0].delay_s(InstanceId(name))


def poisson(seed: int, count: int, per_s: float) -> list[float]:
    rng, at_s, found = Random(seed), BEGIN_S, []
    for _ in range(count):
        at_s += -log(1 - rng.random()) / per_s
        found.append(at_s)
    return found


def queue(load: float, seed: int, count: int) -> tuple[list[float], list[float]]:
    """TTFT of each request of one token behind a prompt of 512: simulated, and by the recursion
    over the same arrivals.
    """
    service_s = catalog.prefill_table(PACE).seconds_for(PROMPT)
    times_s = poisson(seed, count, load / service_s)
    arrivals = [Arrival(at_s, prompt(n), 1) for n, at_s in enumerate(times_s)]
    records, world = play(config_of(divided=False), arrivals, FirstToken.DECODE, seed)
    away_s = network_s(world, "both")
    assert all(record.completed for record in records)
    expected = [wait_s + service_s + away_s for wait_s in waits(times_s, service_s)]
    return [metrics.arrival_ttft_s(record) or 0.0 for record in records], expected


@dataclass(frozen=True, slots=True)
class Compared:
    name: str
    simulated_s: float
    formula_s: float
    half_width_s: float | None = None  # Of the simulated one, 95 %.

    @property
    def error(self) -> float:
        return self.simulated_s / self.formula_s - 1


def queues(seeds: Sequence[int], count: int) -> tuple[list[Compared], float]:
    """Medians and means by the formulas, and the largest error of a request by the recursion."""
    service_s = catalog.prefill_table(PACE).seconds_for(PROMPT)
    found, worst = [], 0.0
    for load in LOADS:
        by_seed = [queue(load, seed, count) for seed in seeds]
        worst = max(
            [worst, *(abs(a / b - 1) for run in by_seed for a, b in zip(*run, strict=True))]
        )
        away_s = fmean(fmean(run[1]) for run in by_seed) - service_s  # Includes the wait.
        away_s -= fmean(
            fmean(waits(poisson(seed, count, load / service_s), service_s)) for seed in seeds
        )
        fixed_s = service_s + away_s
        rows = {
            "p50": ([metrics.percentile(run[0], 50) or 0.0 for run in by_seed], 50.0),
            "p90": ([metrics.percentile(run[0], 90) or 0.0 for run in by_seed], 90.0),
            "mean": ([fmean(run[0]) for run in by_seed], None),
        }
        for name, (values, q) in rows.items():
            wait = mean_wait(load) if q is None else wait_percentile(load, q)
            half = interval(values)
            found.append(
                Compared(
                    f"TTFT {name}, load {load:.0%}",
                    fmean(values),
                    fixed_s + wait * service_s,
                    None if half is None else half.half_width,
                )
            )
    return found, worst


def decode_batch(batch: int = 16, tokens: int = 100) -> Compared:
    """TPOT of equal streams that decode together from the first token to the last."""
    # All prompts fit into one step.
    arrivals = [Arrival(BEGIN_S, prompt(n, 16), tokens) for n in range(batch)]
    config = config_of(divided=False, max_batch_tokens=PROMPT)
    records, _ = play(config, arrivals, FirstToken.DECODE)
    table = catalog.decode_table(PACE)
    steps_s = [table.seconds_for(batch, batch * (16 + n)) for n in range(1, tokens)]
    simulated = metrics.spread(map(metrics.tpot_s, records))["p50"]
    assert simulated is not None
    return Compared(f"TPOT p50, {batch} streams together", simulated, fmean(steps_s))


def hand_off(bytes_per_s: float = 3.125e9) -> list[Compared]:
    """TTFT of single requests where prefill and decode are instances of their own."""
    config = config_of(divided=True)
    config = config.model_copy(
        update={"transfer": config.transfer.model_copy(update={"link_bytes_per_s": bytes_per_s})}
    )
    arrivals = [Arrival(BEGIN_S + 5.0 * n, prompt(n), 2) for n in range(20)]
    prefill_s = catalog.prefill_table(PACE).seconds_for(PROMPT)
    size = config.cluster.engine.page_size_tokens
    # All full pages, and the tail of the last one but for its last token, which is computed anew.
    pages = ceil((PROMPT - 1) / size)
    page_bytes = (
        catalog.kv_geometry(PACE).page_bytes * size / catalog.kv_geometry(PACE).page_size_tokens
    )
    found = []
    for kind in FirstToken:
        records, world = play(config, arrivals, kind)
        formula_s = network_s(world, "prefill") + prefill_s
        if kind is FirstToken.DECODE:
            moved_s = 3 * LATENCY_S + pages * page_bytes / bytes_per_s
            step_s = catalog.decode_table(PACE).seconds_for(1, PROMPT)
            formula_s += network_s(world, "decode") + moved_s + step_s
        simulated = metrics.spread(map(metrics.arrival_ttft_s, records))["p50"]
        assert simulated is not None
        found.append(Compared(f"TTFT p50, first token of {kind.value}", simulated, formula_s))
    return found


def largest(rows: Sequence[Compared]) -> float:
    """The largest error of a median."""
    return max(abs(row.error) for row in rows if "p50" in row.name)


def as_text(rows: Sequence[Compared], worst: float) -> str:
    lines = [f"{'':34}{'simulated':>12}{'formula':>12}{'error':>9}"]
    for row in rows:
        half = "" if row.half_width_s is None else f" ± {row.half_width_s * 1e3:.1f}"
        lines.append(
            f"{row.name:34}{row.simulated_s * 1e3:>9.1f} ms{row.formula_s * 1e3:>9.1f} ms"
            f"{row.error:>+9.2%}{half}"
        )
    most = largest(rows)
    verdict = "met" if most <= BAR else "MISSED"
    lines += [
        "",
        f"largest error of a single request by Lindley's recursion: {worst:.2e}",
        f"largest error of a median: {most:.2%}; bar {BAR:.0%}: {verdict}",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    seeds = range(options.seeds)
    record = Record(*seeds, timed=False)
    rows, worst = queues(seeds, options.requests)
    rows += [decode_batch(), *hand_off()]
    text = as_text(rows, worst)
    print(text)
    figures = {
        "rows": [
            {"name": row.name, "simulated_s": row.simulated_s, "formula_s": row.formula_s}
            for row in rows
        ],
        "worst": worst,
    }
    record.keep(options.out, "queueing", figures, text)
    return 0 if largest(rows) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
