"""LUMEN's experiments A.1 to A.4 in small: stop-and-restart, fixed checkpoints, and load-aware
checkpoints with scheduling.

    python -m experiments.lumen_recovery.run [--cases 4x1 8x1 8x2 8x4] [--requests 240] [--repeats
    1]

A case is instances x failures: instances that prefill and decode, one a node, each with its agent;
the failures come together.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console

from experiments.record import Record
from experiments.rig import stretched
from experiments.schemes import PACE, Scheme, run_scheme
from kvrs.cluster.drill import Run
from kvrs.demo import LINK_BYTES_PER_S, scaled_requests
from kvrs.faults.language import Fault, parse_faults
from kvrs.report.report import Report, build_report
from kvrs.traces.generator import GeneratorSettings, generate

matplotlib.use("Agg")
from matplotlib import pyplot

# Eight engines share two cores: on a slower clock their real work still fits into their steps.
STRETCH = 2.0
REQUESTS_PER_S_OF_AN_INSTANCE = 0.85
SCHEMES = (
    Scheme("no failure", {"name": "auto"}, {"mode": "off"}, fails=False),
    Scheme(
        "stop-and-restart",
        {"name": "always_recompute", "dispatch": "least_loaded"},
        {"mode": "off"},
    ),
    Scheme(
        "fixed checkpoints",
        {"name": "always_restore", "dispatch": "holders"},
        {"mode": "remote", "placement": "fixed"},
    ),
    Scheme(
        "+ scheduling",
        {"name": "auto", "dispatch": "rebalance"},
        {"mode": "remote", "placement": "load"},
    ),
)


def nodes(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"n{index}", "instances": [{"id": f"w{index}", "role": "both"}]}
        for index in range(count)
    ]


def failures(count: int, requests: int) -> list[Fault]:
    """Adjacent nodes fail together: the hardest case with one checkpoint on the next node."""
    at = {"after_requests": requests // 3}
    return parse_faults(
        [{"when": at, "what": "kill", "whom": {"id": f"w{index}"}} for index in range(count)]
    )


def figures(run: Run, clean: Run, report: Report) -> dict[str, Any]:
    impact = report["impact"]
    groups = report["groups"]
    return {
        "exact": report["exact"],
        "errors": report["errors"],
        "lost": report["tokens_lost"],
        "repeated": report["tokens_repeated"],
        "different": report["tokens_different"],
        "interrupted": groups["interrupted"]["streams"],
        "recovery_time_s": None if impact is None else impact["recovery_time_s"],
        "closed": None if impact is None else impact["closed"],
        "ttft_s": {name: group["arrival_ttft_s"]["mean"] for name, group in groups.items()},
        "replay_ttft_s": groups["interrupted"]["replay_ttft_s"]["mean"],
        "tpot_s": {name: group["tpot_s"]["mean"] for name, group in groups.items()},
        "max_gap_s": groups["interrupted"]["max_gap_s"],
        "options": report["recoveries"],
        "buckets": None if impact is None else impact["buckets"],
        "clean_ttft_s": report["runs"]["clean"]["arrival_ttft_s"]["mean"],
        "goodput_per_s": report["runs"]["fault"]["goodput_per_s"],
    }


def as_text(cases: dict[str, dict[str, list[dict[str, Any]]]], result: dict[str, Any]) -> str:
    lines = [
        f"{result['requests']} requests a run, {REQUESTS_PER_S_OF_AN_INSTANCE} a second "
        f"and instance, pace {PACE} x {STRETCH:g}; "
        f"{result['repeats']} runs each",
        "",
        f"{'case':<6}{'scheme':<19}{'impact':>9}{'TTFT int':>9}{'replay':>8}{'unint':>8}"
        f"{'TPOT int':>9}{'unint':>8}{'gap p50':>8}"
        f"{'p99':>8}{'hit':>5}  lost/rep/diff/err",
    ]

    def shown(value: float | None, scale: float = 1.0) -> str:
        return (
            "-"
            if value is None
            else f"{value * scale:.2f}"
            if scale == 1.0
            else f"{value * scale:.0f}"
        )

    for case, schemes in cases.items():
        for name, runs in schemes.items():
            for run in runs:
                gap = run["max_gap_s"]
                window = shown(run["recovery_time_s"]) + (
                    "" if run["closed"] in (True, None) else "+"
                )
                lines.append(
                    f"{case:<6}{name:<19}{window:>9}{shown(run['ttft_s']['interrupted']):>9}{shown(run['replay_ttft_s']):>8}"
                    f"{shown(run['ttft_s']['uninterrupted']):>8}"
                    f"{shown(run['tpot_s']['interrupted'], 1e3):>9}"
                    f"{shown(run['tpot_s']['uninterrupted'], 1e3):>8}{shown(gap['p50']):>8}"
                    f"{shown(gap['p99']):>8}"
                    f"{run['interrupted']:>5}  "
                    f"{run['lost']}/{run['repeated']}/{run['different']}/{run['errors']}"
                )
    lines += [
        "",
        "impact: LUMEN's failure-impact window (docs/replay.md), + still open at the end "
        "of the run; times in s, TPOT in ms",
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def draw_plot(cases: dict[str, dict[str, list[dict[str, Any]]]], path: Path) -> None:
    names = [scheme.name for scheme in SCHEMES if scheme.fails]
    panels: tuple[tuple[str, Callable[[dict[str, Any]], float | None]], ...] = (
        ("longest pause of interrupted streams, mean s", lambda run: run["max_gap_s"]["mean"]),
        ("failure-impact window, s", lambda run: run["recovery_time_s"]),
    )
    figure, axes = pyplot.subplots(1, len(panels), figsize=(10, 3.8), layout="constrained")
    for axis, (title, value) in zip(axes, panels, strict=True):
        for offset, name in enumerate(names):
            means = []
            for schemes in cases.values():
                known = [found for run in schemes[name] if (found := value(run)) is not None]
                means.append(sum(known) / len(known) if known else 0.0)
            axis.bar(
                [index + 0.27 * (offset - 1) for index in range(len(cases))],
                means,
                width=0.25,
                label=name,
            )
        axis.set_xticks(range(len(cases)), list(cases))
        axis.set(title=title, xlabel="instances x failures")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=["4x1", "8x1", "8x2", "8x4"])
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    record, console = Record(arguments.seed), Console()
    order = random.Random(arguments.seed)
    cases: dict[str, dict[str, list[dict[str, Any]]]] = {}
    clean: dict[int, Run] = {}
    with tempfile.TemporaryDirectory(prefix="kvrs-lumen-") as directory:
        pace = str(stretched(PACE, STRETCH, Path(directory)))
        for case in arguments.cases:
            instances, failed = map(int, case.split("x"))
            trace = generate(GeneratorSettings(requests=arguments.requests), arguments.seed)
            requests = scaled_requests(
                trace, arguments.seed, REQUESTS_PER_S_OF_AN_INSTANCE * instances
            )
            faults = failures(failed, arguments.requests)
            found = cases[case] = {scheme.name: [] for scheme in SCHEMES}
            for repeat in range(arguments.repeats):
                runs: dict[str, Run] = {}
                for scheme in order.sample(SCHEMES, len(SCHEMES)):
                    if not scheme.fails and repeat == 0 and instances in clean:
                        continue
                    config = scheme.config(nodes(instances), arguments.seed, pace, LINK_BYTES_PER_S)
                    console.print(f"{case} {scheme.name}")
                    runs[scheme.name] = run_scheme(
                        scheme, config, requests, faults, arguments.seed, console
                    )
                if "no failure" in runs:
                    clean[instances] = runs["no failure"]
                for name, run in runs.items():
                    report = build_report(
                        run.records, clean[instances].records, run.recoveries, run.faults, {}
                    )
                    found[name].append(figures(run, clean[instances], report))
    result = {
        "pace": f"{PACE} x {STRETCH:g}",
        "requests": arguments.requests,
        "repeats": arguments.repeats,
    }
    text = as_text(cases, result)
    print(text, end="")
    record.keep(arguments.out, "lumen_recovery", {**result, "cases": cases}, text)
    draw_plot(cases, arguments.out / "lumen_recovery.png")
    wrong = sum(
        run[key]
        for schemes in cases.values()
        for found in schemes.values()
        for run in found
        for key in ("errors", "lost", "repeated", "different")
    )
    return 0 if wrong == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
