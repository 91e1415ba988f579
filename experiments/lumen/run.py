"""LUMEN's experiments in virtual time, without draft models: instances are gone for as long as it
takes to load their weights, and the others are nearly saturated without them.

    python -m experiments.lumen.run [--cases 4x1 8x1 8x2 8x4] [--seeds 5]

A case is instances x failures, with requests per second of an instance behind a colon where the
rate is another. A run goes on from the cells that are kept, if the code has not changed since.
"""

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from experiments.cells import Cells
from experiments.record import Record
from kvrs.config.file import Config, parse_config
from kvrs.faults.language import parse_faults
from kvrs.ids import StreamId
from kvrs.profiles.catalog import prefill_table
from kvrs.report import metrics
from kvrs.report.impact import impact_window
from kvrs.report.student import Interval, interval
from kvrs.sim.fault_scenarios import named_deaths
from kvrs.sim.streams import Arrival, SimJournal
from kvrs.sim.world import World
from kvrs.traces.generator import generate
from kvrs.traces.presets import PRESETS
from kvrs.traces.records import StreamRecord

PACE = "opt-13b-a100-distserve-tp1"
PRESET = "sharegpt"
MOST_PROMPT, MOST_OUTPUT = 1024, 256
PER_S = 6.5  # Requests of an instance.
RELOAD_S = 20.0
LINK_BYTES_PER_S = 100e9 / 8
REQUESTS_OF_AN_INSTANCE = 640
CASES = ("4x1", "8x1", "8x2", "8x4", "4x1:5.5", "4x1:7.5")
NAME = "lumen"
PREFILL = prefill_table(PACE)
Row = dict[str, Any]
# By case, scheme and seed.
ByCase = dict[str, dict[str, dict[str, Row]]]


@dataclass(frozen=True, slots=True)
class Case:
    instances: int
    failures: int
    per_s: float

    @classmethod
    def of(cls, text: str) -> "Case":
        size, _, rate = text.partition(":")
        instances, failures = map(int, size.split("x"))
        return cls(instances, failures, float(rate) if rate else PER_S)


@dataclass(frozen=True, slots=True)
class Scheme:
    name: str
    policy: str
    dispatch: str
    backup: dict[str, Any]


STOP = Scheme("stop-and-restart", "always_recompute", "least_loaded", {"mode": "off"})
SCHEMES = (
    STOP,
    Scheme("fixed", "always_restore", "holders", {"mode": "remote", "placement": "fixed"}),
    Scheme("+ scheduling", "always_restore", "rebalance", {"mode": "remote", "placement": "load"}),
    Scheme("auto", "auto", "rebalance", {"mode": "remote", "placement": "load"}),
)


def config_of(case: Case, scheme: Scheme) -> Config:
    nodes = [
        {"id": f"n{n:02}", "instances": [{"id": f"w{n:02}", "role": "both"}]}
        for n in range(case.instances)
    ]
    return parse_config(
        {
            "cluster": {
                "engine": {
                    "pace": PACE,
                    "pages": 4000,
                    "max_running": 64,
                    "max_batch_tokens": 512,
                    "max_model_len": MOST_PROMPT + MOST_OUTPUT,
                },
                "nodes": nodes,
            },
            "policy": {"name": scheme.policy, "dispatch": scheme.dispatch},
            "backup": {"capacity_bytes": 160 << 30, **scheme.backup},
            "transfer": {"link_bytes_per_s": LINK_BYTES_PER_S},
        }
    )


def arrivals(case: Case, seed: int) -> list[Arrival]:
    """Poisson, with lengths of the preset, cut to what an instance takes."""
    count = REQUESTS_OF_AN_INSTANCE * case.instances
    per_s = case.per_s * case.instances
    settings = replace(PRESETS[PRESET].settings, requests=count, requests_per_s=per_s)
    found = []
    for number, asked in enumerate(generate(settings, seed).requests):
        tokens = min(asked.input_tokens, MOST_PROMPT)
        prompt = tuple((number * 7919 + position) % 50_000 for position in range(tokens))
        output = min(asked.output_tokens, MOST_OUTPUT)
        found.append(Arrival(asked.arrival_s, prompt, output))
    return found


@dataclass(frozen=True, slots=True)
class Run:
    records: list[StreamRecord]
    interrupted: set[int]
    fault_s: float


def simulate(case: Case, scheme: Scheme, seed: int, *, fails: bool) -> Run:
    """One run. Raises AssertionError where an invariant is violated."""
    asked = arrivals(case, seed)
    fault_s = asked[len(asked) // 3].at_s
    rows = [
        {"when": {"at_s": fault_s}, "what": "kill", "whom": {"id": f"w{n:02}"}}
        for n in range(case.failures if fails else 0)
    ]
    times_s: defaultdict[StreamId, list[float]] = defaultdict(list)
    append = SimJournal.append

    def noted(self: SimJournal, token: int, now_s: float) -> None:
        times_s[self.stream].append(now_s)
        append(self, token, now_s)

    world = World(
        config_of(case, scheme),
        asked,
        named_deaths(parse_faults(rows)) if rows else [],
        seed=seed,
        reload_s=RELOAD_S,
    )
    with patch.object(SimJournal, "append", noted):
        outcome = world.run()
    assert set(outcome.ended) == {"complete"}, outcome.ended
    (proxy,) = world.cluster.proxies
    records, interrupted = [], set()
    for number, each in enumerate(asked):
        stream = StreamId(f"s{number}")
        found = times_s[stream]
        records.append(
            StreamRecord(
                number,
                each.at_s,
                len(each.prompt_ids),
                each.max_tokens,
                sent_s=each.at_s,
                ended_s=found[-1],
                token_times_s=found,
            )
        )
        if proxy.streams[stream].recoveries:
            interrupted.add(number)
    return Run(records, interrupted, fault_s)


def alone_s(record: StreamRecord) -> float:
    """Seconds to compute its prompt, and nothing else."""
    return PREFILL.seconds_for(record.prompt_tokens)


def figures(run: Run, clean: Run) -> Row:
    replayed = {
        record.index: metrics.replay_ttft_s(record, run.fault_s)
        for record in run.records
        if record.index in run.interrupted
    }
    known = {index: at_s for index, at_s in replayed.items() if at_s is not None}
    impact = impact_window(run.records, clean.records, known, run.fault_s)
    # Those that the failure can have touched: they had not ended, or came while an instance loaded.
    near = [
        record
        for record in run.records
        if record.index not in run.interrupted
        and run.fault_s <= record.due_s <= run.fault_s + RELOAD_S
    ]
    twins = {record.index: record for record in clean.records}
    pauses = [metrics.max_gap_s(run.records[index]) or 0.0 for index in run.interrupted]
    return {
        "interrupted": len(run.interrupted),
        "window_s": impact.recovery_time_s,
        "is_closed": impact.end_bucket is not None or impact.first_bucket is None,
        "ttft_s": fmean(metrics.arrival_ttft_s(record) or 0.0 for record in near),
        "clean_ttft_s": fmean(
            metrics.arrival_ttft_s(twins[record.index]) or 0.0 for record in near
        ),
        "queue_share": 1
        - fmean(alone_s(record) for record in near)
        / fmean(metrics.arrival_ttft_s(record) or 0.0 for record in near),
        "tpot_s": fmean(metrics.tpot_s(record) or 0.0 for record in near),
        "clean_tpot_s": fmean(metrics.tpot_s(twins[record.index]) or 0.0 for record in near),
        "replay_ttft_s": fmean(known.values()),
        "pause_s": fmean(pauses),
    }


def cell(name: str, clean: dict[tuple[int, float, int], Run]) -> dict[str, Row]:
    """By scheme. `clean` has the runs without a failure, which several cells share."""
    text, _, seed_text = name.partition("#")
    case, seed = Case.of(text), int(seed_text)
    same = case.instances, case.per_s, seed
    if same not in clean:
        clean[same] = simulate(case, STOP, seed, fails=False)
    return {
        scheme.name: figures(simulate(case, scheme, seed, fails=True), clean[same])
        for scheme in SCHEMES
    }


def by_case(cells: dict[str, dict[str, Row]]) -> ByCase:
    found: ByCase = {}
    for name, rows in cells.items():
        case, _, seed = name.partition("#")
        for scheme, row in rows.items():
            found.setdefault(case, {}).setdefault(scheme, {})[seed] = row
    return found


def change(rows: dict[str, dict[str, Row]], scheme: str, key: str) -> Interval:
    """Against stop-and-restart, seed by seed."""
    found = interval(
        [row[key] / rows[STOP.name][seed][key] - 1 for seed, row in rows[scheme].items()]
    )
    assert found is not None
    return found


def shown(found: Interval) -> str:
    half = "" if found.half_width is None else f" ± {found.half_width:.0%}"
    return f"{found.mean:+.0%}{half}"


def is_shown(found: Interval) -> bool:
    """True if the interval excludes 0."""
    return found.half_width is not None and abs(found.mean) > found.half_width


def mean(rows: dict[str, Row], key: str) -> float:
    return fmean(row[key] for row in rows.values())


SHOWN = (
    ("window s", "window_s", 1.0),
    ("TTFT s", "ttft_s", 1.0),
    ("replay TTFT s", "replay_ttft_s", 1.0),
    ("pause s", "pause_s", 1.0),
    ("TPOT ms", "tpot_s", 1e3),
)


def as_text(found: ByCase) -> str:
    lines = [
        f"{PRESET} lengths, {REQUESTS_OF_AN_INSTANCE} requests an instance, {PER_S}/s unless "
        f"named, {PACE}, back after {RELOAD_S:g} s; means of the seeds",
        "in brackets against stop-and-restart, seed by seed; * where the interval excludes 0",
        f"{'case':9}{'scheme':18}{'seeds':>6}{'hit':>5}"
        + "".join(f"{name:>24}" for name, _, _ in SHOWN),
    ]
    for case, rows in found.items():
        for scheme, by_seed in rows.items():
            hit = mean(by_seed, "interrupted")
            text = f"{case:9}{scheme:18}{len(by_seed):>6}{hit:>5.0f}"
            for _, key, scale in SHOWN:
                cell = f"{mean(by_seed, key) * scale:.2f}"
                if scheme != STOP.name:
                    by = change(rows, scheme, key)
                    cell += f" ({shown(by)}{'*' if is_shown(by) else ''})"
                text += f"{cell:>24}"
            lines.append(text.rstrip())
        clean, tpot = (mean(rows[STOP.name], f"clean_{key}") for key in ("ttft_s", "tpot_s"))
        lines.append(f"{case:9}{'no failure':29}{'':24}{clean:>24.2f}{'':48}{tpot * 1e3:>24.2f}")
        share = mean(rows[STOP.name], "queue_share")
        lines.append(f"{case:9}{'':29}of the TTFT of stop-and-restart {share:.0%} is queueing")
    lines += [
        "",
        "hit: interrupted streams of a run; TTFT and TPOT: of the others that came while an "
        "instance loaded",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no cell goes beyond")
    parser.add_argument("--keep", default=NAME, metavar="RESULT", help="whose cells these are")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    seeds = range(options.seeds)
    record = Record(*seeds, timed=False)
    cells = Cells(options.out, options.keep, {"reload_s": RELOAD_S})
    clean: dict[tuple[int, float, int], Run] = {}
    names = [f"{case}#{seed}" for seed in seeds for case in options.cases]
    cells.measure(names, options.limit_s, lambda name: cell(name, clean))
    found = by_case(cells.found)
    text = as_text(found)
    print(text)
    cells.keep(record, {"cases": found}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
