"""RaidServe's protocol (its Table 3): the conversation trace, one decode instance killed 100 ms
after the 250th request.

    python -m experiments.raidserve_recovery.run [--requests 500] [--repeats 1] [--trace FILE]

Longest time between tokens of every request: recomputing, restoring from host memory, ours, and
without a failure.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console

from experiments.conversation_trace.trace import DEFAULT_TRACE, is_there, sampled
from experiments.record import Record
from experiments.schemes import PACE, Scheme, run_scheme
from kvrs.demo import FIRST_ORDINARY_TOKEN, LINK_BYTES_PER_S, VOCAB_SIZE
from kvrs.faults.language import parse_faults
from kvrs.load.passes import Run
from kvrs.report import oracle
from kvrs.report.metrics import max_gap_s, percentile
from kvrs.traces.mooncake import replay_requests

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

REQUESTS_PER_S = 6.0
# One node has the survivor that RaidServe restores to; the other one is there for the ways over the
# network.
NODES = [
    {
        "id": "n0",
        "instances": [
            {"id": "p0", "role": "prefill"},
            {"id": "d0", "role": "decode"},
            {"id": "d1", "role": "decode"},
        ],
    },
    {"id": "n1", "instances": [{"id": "p1", "role": "prefill"}, {"id": "d2", "role": "decode"}]},
]
SCHEMES = (
    Scheme("recompute", {"name": "always_recompute"}, {"mode": "off"}),
    Scheme("host", {"name": "always_restore"}, {"mode": "local"}),
    Scheme("ours", {"name": "auto"}, {"mode": "both"}),
    Scheme("oracle", {"name": "auto"}, {"mode": "off"}, fails=False),
)
SHARES = (50, 90, 99)


def row(run: Run, clean: Run) -> dict[str, Any]:
    """Figures of one run; the oracle's own run is its clean twin."""
    difference = oracle.total(oracle.judge(run.records, clean.records))
    hit = {recovery["stream"] for recovery in run.recoveries}
    gaps = [gap for record in run.records if (gap := max_gap_s(record)) is not None]
    hit_gaps = [
        gap
        for record in run.records
        if record.stream in hit and (gap := max_gap_s(record)) is not None
    ]
    return {
        "streams": len(run.records),
        "errors": sum(record.error is not None for record in run.records),
        "lost": difference.lost,
        "repeated": difference.repeated,
        "different": difference.different,
        "interrupted": len(hit),
        "options": sorted({recovery["option"] for recovery in run.recoveries}),
        "max_tbt_ms": {f"p{share}": 1e3 * (percentile(gaps, share) or 0.0) for share in SHARES},
        "max_tbt_of_interrupted_ms": {
            f"p{share}": 1e3 * (percentile(hit_gaps, share) or 0.0) for share in SHARES
        },
        "gaps_s": gaps,
        "interrupted_gaps_s": hit_gaps,
    }


def draw_cdf(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, key, title in zip(
        axes,
        ("gaps_s", "interrupted_gaps_s"),
        ("all requests", "interrupted requests"),
        strict=True,
    ):
        for name, runs in rows.items():
            gaps = sorted(1e3 * gap for run in runs for gap in run[key])
            if gaps:
                axis.step(
                    gaps,
                    [(index + 1) / len(gaps) for index in range(len(gaps))],
                    where="post",
                    label=name,
                )
        axis.set(xscale="log", xlabel="longest time between tokens, ms", title=title)
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_locator(NullLocator())
    axes[0].set_ylabel("share of requests")
    axes[0].legend()
    figure.savefig(path, dpi=110)


def as_text(rows: dict[str, list[dict[str, Any]]], result: dict[str, Any]) -> str:
    lines = [
        f"longest time between tokens, {result['requests']} requests of "
        f"{result['trace']}, {result['kill']}, pace {PACE}",
        f"{result['repeats']} runs each, in turns",
        "",
        f"{'':<11}{'all requests, ms':^27}{'interrupted, ms':^27}",
        f"{'':<11}"
        + f"{'p50':>9}{'p90':>9}{'p99':>9}" * 2
        + f"{'hit':>5}  {'lost/rep/diff/err':<18}ways",
    ]
    for name, runs in rows.items():
        for run in runs:
            figures = "".join(
                f"{run[key][f'p{share}']:>9.0f}"
                for key in ("max_tbt_ms", "max_tbt_of_interrupted_ms")
                for share in SHARES
            )
            wrong = f"{run['lost']}/{run['repeated']}/{run['different']}/{run['errors']}"
            lines.append(
                f"{name:<11}{figures}{run['interrupted']:>5}  "
                f"{wrong:<18}{', '.join(run['options'])}"
            )
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if not is_there(arguments.trace):
        return 0
    record, console = Record(arguments.seed), Console()
    trace = sampled(arguments.trace, arguments.requests, REQUESTS_PER_S, arguments.seed)
    requests = replay_requests(trace, VOCAB_SIZE, arguments.seed, FIRST_ORDINARY_TOKEN)
    kill_s = requests[arguments.requests // 2 - 1].arrival_s + 0.1
    faults = parse_faults([{"when": {"at_s": kill_s}, "what": "kill", "whom": {"id": "d0"}}])
    order = random.Random(arguments.seed)
    runs: dict[str, list[Run]] = {scheme.name: [] for scheme in SCHEMES}
    for _ in range(arguments.repeats):
        for scheme in order.sample(SCHEMES, len(SCHEMES)):
            config = scheme.config(NODES, arguments.seed, PACE, LINK_BYTES_PER_S)
            runs[scheme.name].append(
                run_scheme(scheme, config, requests, faults, arguments.seed, console)
            )
    clean = runs["oracle"][0]
    rows = {name: [row(run, clean) for run in found] for name, found in runs.items()}
    result = {
        "trace": arguments.trace.name,
        "requests": arguments.requests,
        "requests_per_s": REQUESTS_PER_S,
        "repeats": arguments.repeats,
        "kill": f"d0 killed 100 ms after request {arguments.requests // 2}",
    }
    text = as_text(rows, result)
    print(text, end="")
    record.keep(arguments.out, "raidserve_recovery", {**result, "rows": rows}, text)
    draw_cdf(rows, arguments.out / "max_tbt.png")
    wrong = sum(
        run[key]
        for found in rows.values()
        for run in found
        for key in ("errors", "lost", "repeated", "different")
    )
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
