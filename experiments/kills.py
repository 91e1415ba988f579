"""Common parts of experiments with a series of kills: the schedule, and the same requests with and
without kills.
"""

import io
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from kvrs.cluster.launcher import Cluster
from kvrs.config.file import Config
from kvrs.demo import run_load
from kvrs.faults.language import Fault, parse_faults
from kvrs.load.passes import Run
from kvrs.report.report import Report
from kvrs.report.table import terminal_table
from kvrs.traces.records import ReplayRequest


def kills(span_s: float, seed: int, hit_at_least: int, gap_s: tuple[float, float]) -> list[Fault]:
    """SIGKILLs at random moments over the run, `gap_s` (from, to) apart.

    Each waits until the decode instance that it hits has enough streams in flight.
    """
    rng = random.Random(seed)
    at_s, rows = rng.uniform(1.5, 4.0), []
    while at_s < span_s:
        when = {"at_s": at_s, "inflight_at_least": hit_at_least}
        rows.append({"when": when, "what": "kill", "whom": {"role": "decode", "pick": "random"}})
        at_s += rng.uniform(*gap_s)
    return parse_faults(rows)


def with_and_without(
    config: Config,
    requests: Sequence[ReplayRequest],
    faults: list[Fault],
    seed: int,
    console: Console,
) -> tuple[Run, Run]:
    """The requests through one cluster twice, first with the faults, then undisturbed."""
    with Cluster(
        config, lambda line: console.print(f"  {line}", style="dim", markup=False)
    ) as cluster:
        faulted = run_load(cluster, requests, faults, seed, console, "with kills")
        cluster.wait_all_up()
        return faulted, run_load(cluster, requests, [], seed, console, "without")


def as_text(report: Report, *lines: str) -> str:
    """The report's table and what follows it."""
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(terminal_table(report))
    for line in lines:
        console.print(line, markup=False)
    return console.export_text()


def hit_words(figures: dict[str, Any]) -> str:
    phases = ", ".join(f"{count} {name}" for name, count in figures["streams_hit_by_phase"].items())
    return (
        f"{figures['kills']} kills, {figures['kills_left']} left; at least "
        f"{figures['fewest_streams_hit_by_a_kill']} streams each: {phases}"
    )


def hit_figures(run: Run) -> dict[str, object]:
    """The number of kills, and of their victims by phase."""
    phases: Counter[str] = Counter()
    for fault in run.faults:
        phases.update(fault["phases"])
    return {
        "kills": len(run.faults),
        "kills_left": run.faults_left,
        "fewest_streams_hit_by_a_kill": min((fault["inflight"] for fault in run.faults), default=0),
        "streams_hit_by_phase": dict(phases),
    }
