"""RaidServe's Figures 11 and 12: peak throughput of prefill and of decode on 4 to 8 GPUs, and what
balanced memory and balanced computation each add to it on 7, by lengths of Mooncake's trace.

    python -m experiments.raidserve.peaks

Simulated: layouts, bases and batches are the product's; step times come from profiles.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.command_line import parser_of
from experiments.kills.drill import TRACE
from experiments.raidserve.stages import (
    Instance,
    Played,
    cyclic,
    decode,
    naive,
    ours,
    prefill,
    spread,
    standard,
)
from experiments.record import Record
from experiments.sentinels.rates import models
from experiments.traces import sample
from kvrs_lab.traces.formats import load_trace
from kvrs_lab.traces.mooncake import Trace

NAME = "peaks"
PROFILES = {
    "Llama-3.1-70B": "llama-3.1-70b-h100-vllm-tp8",
    "Mixtral-8x22B": "mixtral-8x22b-h100-vllm-tp8",
}
REQUESTS = 3000  # Of the trace, as in the paper.
STAGES: Mapping[str, Callable[[Instance, Sequence[Any]], Played]] = {
    "prefill": prefill,
    "decode": decode,
}
SYSTEMS = {"standard": standard, "naive": naive, "cyclic": cyclic, "spread": spread, "ours": ours}
# Of Figures 11 and 12, by model: systems and GPUs.
CELLS = {
    "Llama-3.1-70B": (
        ("standard", 4),
        *((system, gpus) for gpus in range(4, 9) for system in ("naive", "ours")),
        ("cyclic", 7),
        ("spread", 7),
    ),
    "Mixtral-8x22B": tuple(
        (system, gpus) for gpus in range(6, 9) for system in ("naive", "cyclic", "spread", "ours")
    ),
}
# RaidServe over non-uniform TP at 5, 6 and 7 GPUs; of the same at 7, in points of non-uniform TP,
# what balanced memory and then balanced computation add.
PUBLISHED = {"prefill": (0.0, 0.16, 0.25), "decode": (0.16, 0.51, 0.78)}
PUBLISHED_PARTS = {"prefill": (0.0, 0.25), "decode": (0.34, 0.43)}
NAMES = {
    "standard": "standard TP",
    "naive": "non-uniform TP",
    "cyclic": "+ balanced memory (cyclic placement)",
    "spread": "+ hybrid attention, bases in turns, batches in line",
    "ours": "RaidServe: hybrid attention, bases and batches by load",
}

PerS = dict[str, list[float]]  # By system and GPUs, tokens per second of each seed.


def drawn(whole: Trace, seed: int) -> Trace:
    return sample(whole, REQUESTS, seed)


def peak(name: str, system: str, gpus: int, stage: str, trace: Trace) -> float:
    """Tokens per second while the requests of a trace wait, all of which arrive at once."""
    model = next(each for each in models() if each.name == name)
    instance = SYSTEMS[system](model, PROFILES[name], gpus)
    requests = [replace(request, arrival_s=0.0) for request in trace.requests]
    return STAGES[stage](instance, requests).full_per_s


def measure(whole: Trace, seeds: int, jobs: int) -> dict[str, dict[str, PerS]]:
    """By model and stage."""
    traces = [drawn(whole, seed) for seed in range(seeds)]
    with ProcessPoolExecutor(jobs) as pool:
        running = {
            name: {
                stage: {
                    f"{system} {gpus}": [
                        pool.submit(peak, name, system, gpus, stage, trace) for trace in traces
                    ]
                    for system, gpus in cells
                }
                for stage in STAGES
            }
            for name, cells in CELLS.items()
        }
        return {
            name: {
                stage: {cell: [each.result() for each in those] for cell, those in cells.items()}
                for stage, cells in stages.items()
            }
            for name, stages in running.items()
        }


def gains(found: PerS, above: str, below: str) -> list[float]:
    """Gains of one cell over another, seed by seed."""
    return [a / b - 1 for a, b in zip(found[above], found[below], strict=True)]


def parts(found: PerS, gpus: int = 7) -> dict[str, list[float]]:
    """The steps of Figure 12, in points of the naive throughput."""
    memory = gains(found, f"cyclic {gpus}", f"naive {gpus}")
    both = gains(found, f"ours {gpus}", f"naive {gpus}")
    return {"memory": memory, "compute": [b - m for b, m in zip(both, memory, strict=True)]}


def _span(values: Sequence[float]) -> str:
    return f"{fmean(values):+.0%} ({min(values):+.1%} .. {max(values):+.1%})"


def as_text(found: Mapping[str, Mapping[str, PerS]]) -> str:
    lines = [
        "SIMULATED: step times from profiles, no GPU; published figures are of 8 real H100",
        f"peak tokens/s of one instance with {REQUESTS:,} requests of Mooncake's trace at once, "
        "input tokens of prefill, output tokens of decode; means of the seeds",
    ]
    for name, stages in found.items():
        for stage, cells in stages.items():
            lines += ["", f"{name}, {stage}"]
            base = fmean(cells["standard 4"]) if "standard 4" in cells else None
            for cell, values in cells.items():
                system, gpus = cell.split()
                over = "" if base is None else f"{fmean(values) / base:9.2f} of standard TP 4"
                lines.append(f"  {gpus} GPUs  {NAMES[system]:56}{fmean(values):10,.0f}{over}")
            lines += [f"  {line}" for line in _compared(name, stage, cells)]
    return "\n".join(lines)


def _compared(name: str, stage: str, cells: PerS) -> list[str]:
    is_published = name == "Llama-3.1-70B"
    lines = []
    for gpus, published in zip((5, 6, 7), PUBLISHED[stage], strict=True):
        if f"ours {gpus}" in cells:
            said = f"; published {published:+.0%}" if is_published else ""
            gain = _span(gains(cells, f"ours {gpus}", f"naive {gpus}"))
            lines.append(f"RaidServe over non-uniform TP at {gpus} GPUs: {gain}{said}")
    for (part, points), published in zip(parts(cells).items(), PUBLISHED_PARTS[stage], strict=True):
        said = f"; published {published:+.0%}" if is_published else ""
        lines.append(f"of that at 7 GPUs, balanced {part}: {_span(points)}{said}")
    return lines


def run(
    doc: str | None,
    name: str,
    key: str,
    measure: Callable[[Trace, int, int], dict[str, Any]],
    as_text: Callable[[dict[str, Any]], str],
) -> None:
    """An experiment of the folder by its command line; it keeps what it measures under `key`."""
    parser = parser_of(doc)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    record = Record(*range(options.seeds), timed=False)
    found = measure(load_trace(options.trace), options.seeds, options.jobs)
    text = as_text(found)
    print(text)
    record.keep(options.out, name, {key: found}, text)


if __name__ == "__main__":
    run(__doc__, NAME, "tokens_per_s", measure, as_text)
