"""RaidServe's Figure 10: throughput and latency of an instance of 7 GPUs that prefills or decodes
Mooncake's trace, beside all 8 and beside 4, at many rates; and the most throughput within the
paper's limits.

    python -m experiments.raidserve.curves

Simulated: layouts, bases and batches are the product's; step times come from profiles.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from experiments.raidserve.peaks import NAMES, PROFILES, REQUESTS, STAGES, SYSTEMS, drawn, run
from experiments.raidserve.stages import Instance, Played
from experiments.sentinels.rates import models
from kvrs_lab.report.metrics import percentile
from kvrs_lab.traces.mooncake import Trace, at_rate, jitter

NAME = "curves"
CELLS = {
    "Llama-3.1-70B": (("standard", 8), ("ours", 7), ("naive", 7), ("standard", 4)),
    "Mixtral-8x22B": (("standard", 8), ("ours", 7), ("naive", 7)),
}
LIMIT_S = {"prefill": 10.0, "decode": 0.040}  # Of the mean: TTFT, and TBT.
PER_S = {
    "Llama-3.1-70B": {
        "prefill": (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25),
        "decode": (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0),
    },
    "Mixtral-8x22B": {
        "prefill": (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5),
        "decode": (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0),
    },
}
PUBLISHED = {
    ("Llama-3.1-70B", "prefill", "standard 4"): 2.0,
    ("Llama-3.1-70B", "prefill", "naive 7"): 1.28,
    ("Llama-3.1-70B", "decode", "standard 4"): 2.0,
    ("Llama-3.1-70B", "decode", "naive 7"): 1.60,
    ("Mixtral-8x22B", "prefill", "naive 7"): 1.14,
    ("Mixtral-8x22B", "decode", "naive 7"): 1.85,
}
_LOGGED_S = 3.0  # The trace has its requests in batches of that length.
_HALVINGS = 7


@dataclass(frozen=True, slots=True)
class Cell:
    """One system with one sample of the trace."""

    model: str
    stage: str
    system: str
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.system} {self.gpus}"

    def instance(self) -> Instance:
        model = next(each for each in models() if each.name == self.model)
        return SYSTEMS[self.system](model, PROFILES[self.model], self.gpus)


def play(cell: Cell, trace: Trace) -> dict[str, Any]:
    """The points of the curve, and the most throughput within the limit: at the highest rate, by
    halving, at which the mean is within it.
    """
    instance, limit_s = cell.instance(), LIMIT_S[cell.stage]

    def at(per_s: float) -> Played:
        return STAGES[cell.stage](instance, at_rate(trace, per_s).requests)

    rates = PER_S[cell.model][cell.stage]
    points = [at(per_s) for per_s in rates]
    within = [fmean(point.waits_s) <= limit_s for point in points]
    assert (within[0], within[-1]) == (True, False), f"{cell}: no rate is at the limit"
    # The first rate that is beyond it, and the one before.
    bad = within.index(False)
    low, high = rates[bad - 1], rates[bad]
    best = max(point.per_s for point in points[:bad])
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        point = at(middle)
        if fmean(point.waits_s) <= limit_s:
            low, best = middle, max(best, point.per_s)
        else:
            high = middle
    return {
        "points": [
            {
                "requests_per_s": per_s,
                "tokens_per_s": point.per_s,
                "mean_s": fmean(point.waits_s),
                "p50_s": percentile(point.waits_s, 50),
                "p90_s": percentile(point.waits_s, 90),
            }
            for per_s, point in zip(rates, points, strict=True)
        ],
        "at_limit": {"requests_per_s": low, "tokens_per_s": best},
    }


Found = dict[str, dict[str, dict[str, list[dict[str, Any]]]]]


def measure(whole: Trace, seeds: int, jobs: int) -> Found:
    """By model, stage and system: what each seed gave."""
    traces = [jitter(drawn(whole, seed), _LOGGED_S, seed) for seed in range(seeds)]
    cells = [
        Cell(model, stage, *system)
        for model, systems in CELLS.items()
        for stage in STAGES
        for system in systems
    ]
    found: Found = {model: {stage: {} for stage in STAGES} for model in CELLS}
    with ProcessPoolExecutor(jobs) as pool:
        running = [[pool.submit(partial(play, cell), trace) for trace in traces] for cell in cells]
        for cell, those in zip(cells, running, strict=True):
            found[cell.model][cell.stage][cell.name] = [each.result() for each in those]
            print(f"{cell.model}, {cell.stage}, {cell.name}", flush=True)
    return found


def ratios(found: Mapping[str, Any], model: str, stage: str, below: str) -> list[float]:
    """Throughput at the limit of 7 GPUs with everything, over another system, seed by seed."""
    own, other = (found[model][stage][name] for name in ("ours 7", below))
    return [
        a["at_limit"]["tokens_per_s"] / b["at_limit"]["tokens_per_s"]
        for a, b in zip(own, other, strict=True)
    ]


def as_text(found: Mapping[str, Any]) -> str:
    lines = [
        "SIMULATED: step times from profiles, no GPU; published figures are of 8 real H100",
        f"{REQUESTS:,} requests of Mooncake's trace; means of the seeds: tokens/s (input tokens of "
        "prefill, output tokens of decode) @ mean TTFT in s, or mean time between tokens in ms, "
        "waiting for memory included",
    ]
    for model, stages in found.items():
        for stage, systems in stages.items():
            lines += ["", f"{model}, {stage}", _head(systems)]
            lines += [
                _row(per_s, [_point(stage, seeds, at) for seeds in systems.values()])
                for at, per_s in enumerate(PER_S[model][stage])
            ]
            limit = "10 s TTFT" if stage == "prefill" else "40 ms TBT"
            at_limit = [
                f"{fmean(seed['at_limit']['tokens_per_s'] for seed in seeds):,.0f}"
                for seeds in systems.values()
            ]
            lines.append(_row(f"at {limit}", at_limit))
            for (of_model, of_stage, below), published in PUBLISHED.items():
                if (of_model, of_stage) == (model, stage):
                    values = ratios(found, model, stage, below)
                    lines.append(
                        f"  RaidServe at {limit} over {_title(below)}: {fmean(values):.2f} "
                        f"({min(values):.2f} .. {max(values):.2f}) times; published {published:g}"
                    )
    return "\n".join(lines)


def _title(name: str) -> str:
    system, gpus = name.split()
    return f"{NAMES[system].partition(':')[0]} {gpus}"


def _head(systems: Sequence[str] | Mapping[str, Any]) -> str:
    return _row("requests/s", [_title(name) for name in systems])


def _row(first: object, cells: Sequence[str]) -> str:
    return f"  {first:<14}" + "".join(f"{cell:>22}" for cell in cells)


def _point(stage: str, seeds: Sequence[Mapping[str, Any]], at: int) -> str:
    points = [seed["points"][at] for seed in seeds]
    tokens, mean_s = (fmean(point[key] for point in points) for key in ("tokens_per_s", "mean_s"))
    wait = f"{mean_s:8.2f}" if stage == "prefill" else f"{mean_s * 1e3:8.1f}"
    return f"{tokens:,.0f} @ {wait}"


if __name__ == "__main__":
    run(__doc__, NAME, "curves", measure, as_text)
