"""Streams of a real cluster under a random schedule of all fault scenarios, compared token by token
with the same streams undisturbed.

python -m experiments.all_deaths.run [--streams 2000] [--seed 1] [--only SCENARIO ...]
"""

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from experiments.all_deaths.rest import wait_for_no_leaks, wait_for_rest
from experiments.all_deaths.schedule import FAULT_SCENARIOS, HIT_AT_LEAST, Act, schedule
from experiments.kills import as_text
from experiments.record import Record
from kvrs.cluster.fault_injection import rows_of
from kvrs.cluster.launcher import Cluster
from kvrs.config.file import Config, load_config
from kvrs.demo import REQUESTS_PER_S, run_load, scaled_requests
from kvrs.load.passes import Run
from kvrs.protocol.instance import Role
from kvrs.report.report import Report, build_report
from kvrs.traces.generator import GeneratorSettings, generate
from kvrs.traces.records import ReplayRequest, StreamRecord

HERE = Path(__file__).parent
RESULTS = HERE / "results"
WARM_UP = 48
REST_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 0.5
# Uncertainty between the times of a sample and of a stream's end.
SLACK_S = 3.0


@dataclass
class HealthSamples:
    """Roles with an instance up, sampled twice a second: an error event is legitimate only after a
    long absence of all instances of a role.
    """

    cluster: Cluster
    rows: list[tuple[float, set[str]]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._start_s = time.monotonic()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(LOOK_INTERVAL_S):
            up = {
                row["role"]
                for row in rows_of(self.cluster.state()).values()
                if row["health"] == "up"
            }
            self.rows.append((time.monotonic() - self._start_s, up))

    def longest_absence_s(self, role: Role, until_s: float) -> float:
        """How long no instance of the role had been up, at most, in an absence that ended not long
        before `until_s`.
        """
        longest, since_s = 0.0, None
        for at_s, up in self.rows:
            if at_s > until_s + SLACK_S:
                break
            if {role.value, Role.BOTH.value} & up:
                since_s = None
            else:
                since_s = at_s if since_s is None else since_s
                longest = max(longest, at_s - since_s)
        return longest


def streams(count: int, seed: int) -> list[ReplayRequest]:
    """Half of them greedy, half sampled: exactness of both covers the sampler's position."""
    requests = scaled_requests(generate(GeneratorSettings(requests=count), seed), seed)
    return [
        replace(r, temperature=0.8, seed=seed + i) if i % 2 else r for i, r in enumerate(requests)
    ]


def unexcused(records: Sequence[StreamRecord], samples: HealthSamples, wait_s: float) -> list[str]:
    """Streams that ended with an error although an instance was left."""
    found = []
    for record in records:
        if record.error is not None:
            absent_s = max(
                samples.longest_absence_s(role, record.ended_s)
                for role in (Role.PREFILL, Role.DECODE)
            )
            if record.error.kind.value not in ("event", "http") or absent_s < wait_s - SLACK_S:
                found.append(
                    f"stream {record.index}: {record.error.kind.value}: {record.error.message}"
                )
    return found


def outcomes(acts: Sequence[Act], run: Run) -> list[dict[str, Any]]:
    """Each scenario with its real effect, in the order of the schedule."""
    rows = []
    for act in acts:
        labels = {fault.label for fault in act.faults}
        hits = [note for note in run.faults if note["fault"] in labels]
        rows.append(
            {
                "scenario": act.scenario,
                "at_s": round(act.at_s, 1),
                "hits": [
                    {
                        key: note[key]
                        for key in ("what", "instances", "inflight", "streams", "phases")
                    }
                    | {"at_s": round(note["at_s"], 2)}
                    for note in hits
                ],
            }
        )
    return rows


def summary(report: Report, run: Run, scenarios: list[dict[str, Any]]) -> dict[str, Any]:
    keys = (
        "streams",
        "completed",
        "errors",
        "tokens_lost",
        "tokens_repeated",
        "tokens_different",
        "text_different",
        "recoveries",
    )
    kills = [hit["streams"] for row in scenarios for hit in row["hits"] if hit["what"] == "kill"]
    return {key: report[key] for key in keys} | {
        "exact": report["exact"],
        "count_of_scenarios": len(scenarios),
        "kinds_of_scenarios": len({row["scenario"] for row in scenarios}),
        "kills": len(kills),
        "fewest_streams_hit_by_a_kill": min(kills, default=0),
        "faults_never_due": [fault.label for fault in run.never_due],
        "recoveries_by_option": dict(
            sorted(Counter(row["option"] for row in run.recoveries).items())
        ),
        "client_visible_gap_s": report["gap_s"],
    }


def reasons(figures: dict[str, Any]) -> list[str]:
    """Why the claim does not hold; none: it does."""
    found = [
        f"{figures[key]} {key}"
        for key in ("tokens_lost", "tokens_repeated", "tokens_different", "text_different")
        if figures[key]
    ]
    if figures["kills"] and figures["fewest_streams_hit_by_a_kill"] < HIT_AT_LEAST:
        found.append(f"a kill hit only {figures['fewest_streams_hit_by_a_kill']} streams")
    found += [f"never came due: {label}" for label in figures["faults_never_due"]]
    return [*found, *figures["errors_without_excuse"], *figures["leaks"]]


def run_scenarios(
    cluster: Cluster, arguments: argparse.Namespace, console: Console
) -> tuple[Report, dict[str, Any]]:
    config: Config = cluster.config
    nodes = [node.id for node in config.cluster.nodes]
    requests = streams(arguments.streams, arguments.seed)
    acts = schedule(arguments.streams / REQUESTS_PER_S, arguments.seed, nodes, arguments.only)
    faults = [fault for act in acts for fault in act.faults]
    run_load(cluster, streams(WARM_UP, arguments.seed + 1), [], arguments.seed, console, "warm-up")
    before = wait_for_rest(cluster, REST_TIMEOUT_S)
    with HealthSamples(cluster) as samples:
        faulted = run_load(cluster, requests, faults, arguments.seed, console, "with all deaths")
    after, leaks = wait_for_no_leaks(cluster, before, REST_TIMEOUT_S)
    clean = run_load(cluster, requests, [], arguments.seed, console, "without")
    settings = {
        "streams": arguments.streams,
        "seed": arguments.seed,
        "policy": config.policy.name.value,
    }
    report = build_report(
        faulted.records, clean.records, faulted.recoveries, faulted.faults, settings
    )
    scenarios = outcomes(acts, faulted)
    figures = settings | summary(report, faulted, scenarios)
    figures["errors_without_excuse"] = unexcused(
        faulted.records, samples, config.policy.recovery.wait_s
    )
    figures["leaks"] = leaks
    return report, figures | {"scenarios": scenarios, "before": before, "after": after}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        choices=list(FAULT_SCENARIOS),
        metavar="STORY",
        help="; ".join(FAULT_SCENARIOS),
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--logs", type=Path, help="where the logs of all processes go")
    arguments = parser.parse_args()
    record, console = Record(arguments.seed), Console()
    with Cluster(load_config(HERE / "config.yaml"), lambda line: print(f"  {line}")) as cluster:
        try:
            report, figures = run_scenarios(cluster, arguments, console)
        finally:
            if arguments.logs is not None:
                cluster.keep_logs(arguments.logs)
    left = [
        path
        for path in (cluster.run_directory, Path(cluster.config.backup.directory))
        if path.exists()
    ]
    figures["leaks"] += [f"left behind after the run: {path.name}" for path in left]
    why = reasons(figures)
    text = as_text(report, "PASSED" if not why else "FAILED: " + "; ".join(why))
    print(text, end="")
    record.keep(arguments.out, "all_deaths", figures | {"reasons": why}, text)
    return 0 if not why else 1


if __name__ == "__main__":
    sys.exit(main())
