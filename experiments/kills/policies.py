"""The series `decode` under each policy, seed by seed: pauses of all seeds together, and the
difference of each policy to `auto` with its interval.

The runs of a seed are a cell: the same requests once under each policy, in random order, then once
without kills, with which all of them are compared. A run goes on from the cells that are kept, if
the code has not changed since.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.console import Console

from experiments.cells import Cells
from experiments.kills.drill import (
    HIT_AT_LEAST,
    PAUSE_BARS_S,
    kills,
    longest,
    longest_words,
    summary,
)
from experiments.record import Record
from kvrs.cluster.launcher import Cluster
from kvrs.config.policy import PolicyName
from kvrs.demo import REQUESTS_PER_S, demo_config, run_load, scaled_requests
from kvrs.load.passes import Run
from kvrs.report.metrics import spread
from kvrs.report.report import build_report
from kvrs.report.student import Interval, interval
from kvrs.traces.generator import GeneratorSettings, generate

NAME = "policies"
AUTO = PolicyName.AUTO.value
POLICIES = (
    PolicyName.AUTO,
    PolicyName.ROM,
    PolicyName.ALWAYS_MIGRATE,
    PolicyName.ALWAYS_RECOMPUTE,
)
WRONG = ("errors", "tokens_lost", "tokens_repeated", "tokens_different", "text_different")
LONGEST_OF_A_SEED = 3
Row = dict[str, Any]
ByPolicy = dict[str, Row]


def measured(seed: int, streams: int, console: Console) -> ByPolicy:
    """One series of kills under each policy, each with a fresh cluster."""
    trace = generate(GeneratorSettings(requests=streams), seed)
    requests = scaled_requests(trace, seed)
    faults = kills(streams / REQUESTS_PER_S, seed)
    runs: dict[PolicyName, Run] = {}
    for policy in random.Random(seed).sample(POLICIES, len(POLICIES)):
        with Cluster(
            demo_config(policy, seed),
            lambda line: console.print(f"  {line}", style="dim", markup=False),
        ) as cluster:
            title = f"seed {seed}, {policy.value}"
            runs[policy] = run_load(cluster, requests, faults, seed, console, title)
            if len(runs) == len(POLICIES):
                cluster.wait_all_up()
                clean = run_load(cluster, requests, [], seed, console, "without kills")
    return {policy.value: row_of(runs[policy], clean) for policy in POLICIES}


def row_of(run: Run, clean: Run) -> Row:
    report = build_report(run.records, clean.records, run.recoveries, run.faults, {})
    pauses_s = {
        (each["stream"], each["pause_from_s"]): each["pause_s"]
        for each in report["recovery_rows"]
        if each["pause_s"] is not None
    }
    return summary(run, report) | {
        "pauses_s": [round(pause_s, 4) for pause_s in pauses_s.values()],
        "goodput_per_s": report["runs"]["fault"]["goodput_per_s"],
        "off": [
            abs(each["predicted_s"] / each["real_s"] - 1)
            for each in report["recovery_rows"]
            if each["predicted_s"] is not None and each["real_s"]
        ],
        "longest_pauses": longest(report, LONGEST_OF_A_SEED),
    }


def figures_of(rows: dict[str, Row], best: dict[str, Row]) -> Row:
    """Figures of all seeds together, and the differences to `auto`, seed by seed."""
    pauses_s = [pause_s for row in rows.values() for pause_s in row["pauses_s"]]
    return {
        "seeds": len(rows),
        "kills": sum(row["kills"] for row in rows.values()),
        "pauses": len(pauses_s),
        "pause_s": spread(pauses_s),
        "p99_of_seeds": over_seeds(row["client_visible_gap_s"]["p99"] for row in rows.values()),
        "mean_longer": over_seeds(
            row["client_visible_gap_s"]["mean"] - best[seed]["client_visible_gap_s"]["mean"]
            for seed, row in rows.items()
        ),
        "goodput_per_s": fmean(row["goodput_per_s"] for row in rows.values()),
        "prediction_off": fmean(off for row in rows.values() for off in row["off"]),
        "recoveries": dict(sum((Counter(row["recoveries"]) for row in rows.values()), Counter())),
        "fewest_streams_hit": min(row["fewest_streams_hit_by_a_kill"] for row in rows.values()),
        **{key: sum(row[key] for row in rows.values()) for key in ("streams", *WRONG)},
    }


def over_seeds(values: Iterable[float]) -> Row | None:
    found = interval([*values])
    return None if found is None else asdict(found)


def by_policy(cells: dict[str, ByPolicy]) -> dict[str, dict[str, Row]]:
    return {
        policy.value: {seed: cells[seed][policy.value] for seed in sorted(cells, key=int)}
        for policy in POLICIES
    }


def missed(figures: dict[str, Row]) -> list[str]:
    """The bars of the series that are missed."""
    found = [
        f"{name}: {row[key]} {key.replace('_', ' ')}"
        for name, row in figures.items()
        for key in WRONG
        if row[key]
    ]
    found += [
        f"{name}: a kill hit {row['fewest_streams_hit']} streams; bar {HIT_AT_LEAST}"
        for name, row in figures.items()
        if row["fewest_streams_hit"] < HIT_AT_LEAST
    ]
    return found + [
        f"{AUTO}: pause {share} {pause_s * 1e3:.0f} ms; bar {bar_s * 1e3:.0f}"
        for share, bar_s in PAUSE_BARS_S.items()
        if (pause_s := figures[AUTO]["pause_s"][share]) > bar_s
    ]


def in_ms(found: Row | None, sign: str = "") -> str:
    if found is None:
        return "-"
    known = Interval(**found)
    half = "" if known.half_width is None else f" ± {known.half_width * 1e3:.0f}"
    return f"{known.mean * 1e3:{sign}.0f}{half}"


def as_text(figures: dict[str, Row], longest_pauses: list[Row], streams: int) -> str:
    lines = [
        f"kills under {streams} streams, {figures[AUTO]['seeds']} seeds, each policy in turn on "
        "the same requests; paced; pauses of all seeds in ms",
        f"{'':17}{'kills':>6}{'pauses':>7}{'mean':>6}{'p50':>6}{'p99':>6}{'most':>6}"
        f"{'p99 of a seed':>16}{'mean to auto':>15}{'off':>6}{'goodput':>9}   recoveries",
    ]
    for name, row in figures.items():
        keys = ("mean", "p50", "p99", "max")
        times = "".join(f"{row['pause_s'][key] * 1e3:6.0f}" for key in keys)
        beside = "-" if name == AUTO else in_ms(row["mean_longer"], "+")
        taken = ", ".join(
            f"{count} {option}" for option, count in sorted(row["recoveries"].items())
        )
        lines.append(
            f"{name:17}{row['kills']:6}{row['pauses']:7}{times}"
            f"{in_ms(row['p99_of_seeds']):>16}{beside:>15}{row['prediction_off']:>6.0%}"
            f"{row['goodput_per_s']:>7.2f}/s   {taken}"
        )
    wrong = " / ".join(str(sum(row[key] for row in figures.values())) for key in WRONG)
    total = sum(row["streams"] for row in figures.values())
    lines += [
        "p99 of a seed: mean of the seeds; mean to auto: difference of mean pauses, seed by seed;",
        "off: prediction from real cost, mean share of the latter; goodput: streams within the SLO",
        "",
        f"{total} streams: {wrong} errors / tokens lost / repeated / different / texts different",
        f"{AUTO}, {longest_words(longest_pauses)}",
        *(f"MISSED: {each}" for each in missed(figures)),
    ]
    return "\n".join(lines if missed(figures) else [*lines, "PASSED"])


def run(options: argparse.Namespace) -> int:
    streams = options.streams or 500
    seeds = range(options.seed, options.seed + options.seeds)
    record, console = Record(*seeds), Console()
    cells = Cells(options.out, NAME, {"streams": streams})
    cells.measure(
        map(str, seeds),
        options.limit_s or 3000.0,  # No seed goes beyond.
        lambda seed: measured(int(seed), streams, console),
    )
    rows = by_policy(cells.found)
    figures = {name: figures_of(of_seeds, rows[AUTO]) for name, of_seeds in rows.items()}
    pauses = [each for row in rows[AUTO].values() for each in row["longest_pauses"]]
    pauses.sort(key=lambda each: float(each["pause_s"]), reverse=True)
    text = as_text(figures, pauses[: 2 * LONGEST_OF_A_SEED], streams)
    print(text)
    if cells.keep(record, {"policies": figures}, text):
        return 2
    return min(1, len(missed(figures)))
