"""LUMEN's experiments in virtual time, without draft models: instances are gone for as long as it
takes to load their weights, and the others are nearly saturated without them.

    python -m experiments.lumen_simulated.run [--cases 4x1 8x1 8x2 8x4] [--seeds 5]

A case is instances x failures, with requests per second of an instance behind a colon where the
rate is another.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from experiments.record import Record
from kvrs.config.file import Config, parse_config
from kvrs.faults.language import parse_faults
from kvrs.ids import StreamId
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
CASES = ("4x1",)
Row = dict[str, Any]


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
        "tpot_s": fmean(metrics.tpot_s(record) or 0.0 for record in near),
        "replay_ttft_s": fmean(known.values()),
        "pause_s": fmean(pauses),
    }


def measure(cases: Sequence[str], seeds: range, tell: Callable[[str], None]) -> dict[str, Any]:
    found: dict[str, dict[str, list[Row]]] = {}
    for name in cases:
        case = Case.of(name)
        rows: dict[str, list[Row]] = {scheme.name: [] for scheme in SCHEMES}
        for seed in seeds:
            clean = simulate(case, STOP, seed, fails=False)
            for scheme in SCHEMES:
                run = simulate(case, scheme, seed, fails=True)
                rows[scheme.name].append(figures(run, clean))
            tell(f"{name}, seed {seed}: {rows[STOP.name][-1]}")
        found[name] = rows
    return found


def change(rows: dict[str, list[Row]], scheme: str, key: str) -> Interval:
    """Against stop-and-restart, seed by seed."""
    found = interval(
        [
            ours[key] / base[key] - 1
            for ours, base in zip(rows[scheme], rows[STOP.name], strict=True)
        ]
    )
    assert found is not None
    return found


def shown(found: Interval) -> str:
    half = "" if found.half_width is None else f" ± {found.half_width:.0%}"
    return f"{found.mean:+.0%}{half}"


SHOWN = (
    ("window s", "window_s", 1.0),
    ("TTFT s", "ttft_s", 1.0),
    ("replay TTFT s", "replay_ttft_s", 1.0),
    ("pause s", "pause_s", 1.0),
    ("TPOT ms", "tpot_s", 1e3),
)


def as_text(found: dict[str, Any], seeds: int) -> str:
    lines = [
        f"{PRESET} lengths, {REQUESTS_OF_AN_INSTANCE} requests an instance, {PER_S}/s unless "
        f"named, {PACE}, back after {RELOAD_S:g} s; means of {seeds} seeds",
        "in brackets against stop-and-restart, run by run",
        f"{'case':9}{'scheme':18}{'hit':>5}" + "".join(f"{name:>24}" for name, _, _ in SHOWN),
    ]
    for case, rows in found.items():
        for scheme, runs in rows.items():
            hit = fmean(run["interrupted"] for run in runs)
            text = f"{case:9}{scheme:18}{hit:>5.0f}"
            for _, key, scale in SHOWN:
                cell = f"{fmean(run[key] for run in runs) * scale:.2f}"
                if scheme != STOP.name:
                    cell += f" ({shown(change(rows, scheme, key))})"
                text += f"{cell:>24}"
            lines.append(text.rstrip())
        clean = fmean(run["clean_ttft_s"] for run in rows[STOP.name])
        lines.append(f"{case:9}{'no failure':23}{'':24}{clean:>24.2f}")
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
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    seeds = range(options.seeds)
    record = Record(*seeds, timed=False)
    found = measure(options.cases, seeds, lambda line: print(line, flush=True))
    text = as_text(found, len(seeds))
    print(text)
    record.keep(options.out, "lumen_simulated", {"reload_s": RELOAD_S, "cases": found}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
