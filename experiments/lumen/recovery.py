"""LUMEN's experiments A.1 to A.4 in small: stop-and-restart, fixed checkpoints, and load-aware
checkpoints with scheduling.

    python -m experiments.lumen.recovery [--cases 4x1 8x2 8x1 8x4] [--repeats 5] [--limit-s 540]

A case is instances x failures: instances that prefill and decode, one a node, each with its agent;
the failures come together. A run goes on from the repeats that are kept.
"""

import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from experiments.cells import Cells
from experiments.command_line import parser_of
from experiments.record import Record
from experiments.two_pairs import LINK_BYTES_PER_S
from kvrs.config.file import Config, parse_config
from kvrs.profiles import catalog
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.demo import run_load, scaled_requests
from kvrs_lab.faults.language import Fault, parse_faults
from kvrs_lab.load.passes import Run
from kvrs_lab.report.report import Report, build_report
from kvrs_lab.report.student import interval
from kvrs_lab.traces.generator import GeneratorSettings, generate
from kvrs_lab.traces.records import ReplayRequest
from kvrs_testkit.processes import cpu_ticks, share_used

PACE = "opt-13b-a100-distserve-tp1"

# All engines share two cores: more of them keep a slower clock, so that their real work fits into
# their steps, and the cores have as much to do in each case.
STRETCH_PER_INSTANCE = 0.6
REQUESTS, REQUESTS_PER_S = 400, 10.0
# A cell of which the run without a failure takes more of the CPU does not count: engines that wait
# for a processor keep no clock.
MOST_CPU = 0.7
RELOAD_S = 10.0  # Of the weights; LUMEN: tens of seconds.
STOP, CLEAN = "stop-and-restart", "no failure"
Row = dict[str, Any]
ByScheme = dict[str, Row]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way of recovering: sections `policy` and `backup` of the configuration."""

    name: str
    policy: Mapping[str, Any]
    backup: Mapping[str, Any]
    fails: bool = True  # False: the same load without a fault.

    def config(
        self, nodes: Sequence[Mapping[str, Any]], seed: int, pace: str, link_bytes_per_s: float
    ) -> Config:
        return parse_config(
            {
                "proxy": {"port": 0, "admin_port": 0},
                "cluster": {
                    "engine": {"seed": seed, "pace": pace},
                    "allow_faults": True,
                    "nodes": list(nodes),
                },
                "policy": dict(self.policy),
                "backup": dict(self.backup),
                "transfer": {"link_bytes_per_s": link_bytes_per_s, "probe_interval_s": 1.0},
            }
        )


SCHEMES = (
    Scheme(CLEAN, {"name": "auto"}, {"mode": "off"}, fails=False),
    Scheme(
        STOP,
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


def stretched(profile: str, factor: float, directory: Path, reload_s: float | None = None) -> Path:
    """A profile file in which everything takes `factor` times as long: cells that last long enough
    to be measured. `reload_s`: how long an instance loads its weights.
    """
    source = json.loads((Path(catalog.__file__).parent / "data" / f"{profile}.json").read_text())
    source["label"] = f"{profile}, {factor:g} times slower"
    source["kind"] = "estimated"
    source["source"] = (
        f"{profile} with all times {factor:g} times as long, so that cells last at least 200 ms"
    )
    source["prefill"]["coefficients_ms"] = [
        factor * value for value in source["prefill"]["coefficients_ms"]
    ]
    source["prefill"]["max_tokens"] = max(8192, source["prefill"]["max_tokens"])
    for regime in ("small_ms", "large_ms"):
        source["decode"][regime] = [factor * value for value in source["decode"][regime]]
    if reload_s is not None:
        source["load"]["bytes_per_s"] = source["load"]["weight_bytes"] / reload_s
    path = directory / f"{profile}-x{factor:g}.json"
    path.write_text(json.dumps(source))
    return path


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


def run_with_share(
    config: Config,
    requests: list[ReplayRequest],
    faults: list[Fault],
    seed: int,
    console: Console,
    title: str,
) -> tuple[Run, float]:
    """With a fresh cluster; and the share of the CPU that was in use under the load."""
    with Cluster(
        config, lambda line: console.print(f"  {line}", style="dim", markup=False)
    ) as cluster:
        before = cpu_ticks()
        run = run_load(cluster, requests, faults, seed, console, title)
        return run, share_used(before, cpu_ticks())


def measured(name: str, seed: int, directory: Path, console: Console) -> ByScheme | None:
    """One run of each scheme, and one without a failure, of the same requests in random order.
    None where the machine could not keep the clock.
    """
    case, _, repeat = name.partition("#")
    instances, failed = map(int, case.split("x"))
    seed += int(repeat)
    stretch = STRETCH_PER_INSTANCE * instances
    pace = str(stretched(PACE, stretch, directory, RELOAD_S))
    trace = generate(GeneratorSettings(requests=REQUESTS), seed)
    requests = scaled_requests(trace, seed, REQUESTS_PER_S)
    runs: dict[str, Run] = {}
    cpu: dict[str, float] = {}
    for scheme in random.Random(name).sample(SCHEMES, len(SCHEMES)):
        console.print(f"{name} {scheme.name}")
        config = scheme.config(nodes(instances), seed, pace, LINK_BYTES_PER_S / stretch)
        faults = failures(failed, REQUESTS) if scheme.fails else []
        runs[scheme.name], cpu[scheme.name] = run_with_share(
            config, requests, faults, seed, console, scheme.name
        )
    clean = runs.pop(CLEAN)
    if cpu[CLEAN] > MOST_CPU:
        console.print(f"{name}: {cpu[CLEAN]:.0%} of the CPU without a failure: does not count")
        return None
    return {
        scheme: figures(
            run,
            clean,
            build_report(run.records, clean.records, run.recoveries, run.faults, {}),
        )
        | {"cpu": round(cpu[scheme], 3), "clean_cpu": round(cpu[CLEAN], 3)}
        for scheme, run in runs.items()
    }


def by_case(cells: dict[str, ByScheme]) -> dict[str, dict[str, list[Row]]]:
    """The runs of each scheme, in the order of the repeats."""
    found: dict[str, dict[str, list[Row]]] = {}
    for name in sorted(cells):
        for scheme, row in cells[name].items():
            found.setdefault(name.partition("#")[0], {}).setdefault(scheme, []).append(row)
    return found


MEASURES: tuple[tuple[str, Callable[[Row], float | None], float], ...] = (
    ("window s", lambda run: run["recovery_time_s"], 1.0),
    ("TTFT s", lambda run: run["ttft_s"]["uninterrupted"], 1.0),
    ("replay TTFT s", lambda run: run["replay_ttft_s"], 1.0),
    ("pause s", lambda run: run["max_gap_s"]["mean"], 1.0),
    ("TPOT ms", lambda run: run["tpot_s"]["uninterrupted"], 1e3),
)


def difference(one: list[Row], base: list[Row], value: Callable[[Row], float | None]) -> str:
    """Repeat by repeat; * where the interval excludes 0."""
    pairs = [(value(a), value(b)) for a, b in zip(one, base, strict=True)]
    found = interval([a / b - 1 for a, b in pairs if a is not None and b])
    if found is None:
        return "-"
    if found.half_width is None:
        return f"{found.mean:+.0%}"
    star = "*" if abs(found.mean) > found.half_width else ""
    return f"{found.mean:+.0%} ± {found.half_width:.0%}{star}"


def as_text(cases: dict[str, dict[str, list[Row]]]) -> str:
    lines = [
        f"{REQUESTS} requests, {REQUESTS_PER_S:g} a second; pace {PACE}, slower by "
        f"{STRETCH_PER_INSTANCE:g} x instances; back after {RELOAD_S:g} s; means of the runs",
        "in brackets against stop-and-restart, run by run; * where the interval excludes 0",
        f"{'case':<6}{'scheme':<19}{'runs':>5}{'hit':>5}{'CPU':>5}"
        + "".join(f"{name:>25}" for name, _, _ in MEASURES)
        + "  lost/rep/diff/err",
    ]
    for case, schemes in cases.items():
        base = schemes[STOP]
        for name, runs in schemes.items():
            hit = sum(run["interrupted"] for run in runs)
            text = f"{case:<6}{name:<19}{len(runs):>5}{hit:>5}"
            text += f"{fmean(run['cpu'] for run in runs):>5.0%}"
            for _, value, scale in MEASURES:
                known = [found for run in runs if (found := value(run)) is not None]
                cell = f"{fmean(known) * scale:.2f}" if known else "-"
                if name != STOP:
                    cell += f" ({difference(runs, base, value)})"
                text += f"{cell:>25}"
            wrong = "/".join(
                str(sum(run[key] for run in runs))
                for key in ("lost", "repeated", "different", "errors")
            )
            lines.append(f"{text}  {wrong}".rstrip())
        clean = fmean(run["clean_ttft_s"] for run in base)
        used = fmean(run["clean_cpu"] for run in base)
        lines.append(f"{case:<6}{CLEAN:<29}{used:>5.0%}{'':25}{clean:>25.2f}")
    lines += [
        "",
        "hit: interrupted streams of all runs; TTFT, TPOT: of the others. The window is LUMEN's "
        "(docs/replay.md); where it was open when a run ended, it counts up to there",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--cases", nargs="+", default=["4x1", "8x2", "8x1", "8x4"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=540.0, help="no cell goes beyond")
    arguments = parser.parse_args()
    record, console = Record(arguments.seed), Console()
    settings = {
        "pace": f"{PACE} x {STRETCH_PER_INSTANCE:g} x instances",
        "requests": REQUESTS,
        "requests_per_s": REQUESTS_PER_S,
        "reload_s": RELOAD_S,
        "seed": arguments.seed,
    }
    cells = Cells(arguments.out, "recovery", settings)
    names = [f"{case}#{repeat}" for case in arguments.cases for repeat in range(arguments.repeats)]
    with tempfile.TemporaryDirectory(prefix="kvrs-lumen-") as directory:
        cells.measure(
            names,
            arguments.limit_s,
            lambda name: measured(name, arguments.seed, Path(directory), console),
        )
    cases = by_case(cells.found)
    text = as_text(cases)
    print(text, end="")
    is_void = cells.keep(record, {"cases": cases}, text)
    wrong = sum(
        run[key]
        for schemes in cases.values()
        for found in schemes.values()
        for run in found
        for key in ("errors", "lost", "repeated", "different")
    )
    return 2 if is_void else min(1, wrong)


if __name__ == "__main__":
    sys.exit(main())
