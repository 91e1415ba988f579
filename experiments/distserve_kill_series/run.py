"""Streams through real DistServe servers under deaths of every kind, compared token by token with
undisturbed ones.
"""

import argparse
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.kill_series.run import summary
from experiments.kills import as_text, hit_words, with_and_without
from experiments.record import Record
from kvrs.cluster.processes import HOME_ENV
from kvrs.config.backup import BackupMode
from kvrs.config.file import Config, parse_config
from kvrs.config.policy import PolicyName
from kvrs.demo import scaled_requests
from kvrs.faults.language import Fault, parse_faults
from kvrs.load.passes import Run
from kvrs.report.report import build_report
from kvrs.traces.generator import GeneratorSettings, generate

RESULTS = Path(__file__).parent / "results"
NODES = ("n0", "n1")
HIT_AT_LEAST = 2
# A stage is back after a few seconds; a whole node needs a new server, too.
STAGE_GAP_S = (8.0, 12.0)
NODE_GAP_S = (25.0, 30.0)

KINDS: dict[str, dict[str, Any]] = {
    "one decode worker": {"whom": {"role": "decode", "pick": "random"}, "workers": 1},
    "whole decode stage": {"whom": {"role": "decode", "pick": "random"}},
    "prefill worker": {"whom": {"role": "prefill", "pick": "random"}},
    "whole node": {},  # Of one node after the other.
}


def deaths(span_s: float, seed: int) -> tuple[list[Fault], dict[str, str]]:
    """Kinds of death in turn, as long as streams come, at random moments; and which label has which
    kind.
    """
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    kinds: list[str] = []
    at_s, nodes = rng.uniform(3.0, 5.0), 0
    while at_s < span_s:
        kind = list(KINDS)[len(rows) % len(KINDS)]
        row: dict[str, Any] = {"what": "kill"} | KINDS[kind]
        if kind == "whole node":
            row["whom"] = {"node": NODES[nodes % len(NODES)]}
            nodes += 1
        # A prefill instance is done with a prompt in a moment; many streams count on what it keeps.
        counted = "streams_at_least" if kind == "prefill worker" else "inflight_at_least"
        rows.append(row | {"when": {"at_s": at_s, counted: HIT_AT_LEAST}})
        kinds.append(kind)
        at_s += rng.uniform(*(NODE_GAP_S if kind == "whole node" else STAGE_GAP_S))
    faults = parse_faults(rows)
    return faults, {fault.label: kind for fault, kind in zip(faults, kinds, strict=True)}


def config_for(policy: PolicyName, backup: BackupMode, seed: int) -> Config:
    """Two servers with one prefill and two decode workers each."""
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {
                "backend": "distserve",
                "distserve": {"flags": ["--decoding-tensor-parallel-size", "2"]},
                "engine": {"seed": seed},
                "nodes": [
                    {
                        "id": node,
                        "instances": [
                            {"id": f"p{n}", "role": "prefill"},
                            {"id": f"d{n}", "role": "decode"},
                        ],
                    }
                    for n, node in enumerate(NODES)
                ],
            },
            "policy": {"name": policy.value},
            "transfer": {"probe_interval_s": 1.0},
            "backup": {"mode": backup.value, "capacity_bytes": 64 << 20},
        }
    )


def by_kind(run: Run, kinds: dict[str, str]) -> dict[str, dict[str, int]]:
    """How many deaths of each kind there were, and how many streams used the dead processes."""
    counts: dict[str, Counter[str]] = {kind: Counter(deaths=0, streams=0) for kind in KINDS}
    for fault in run.faults:
        counts[kinds[fault["fault"]]].update(deaths=1, streams=fault["streams"])
    return {kind: dict(count) for kind, count in counts.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--policy", type=PolicyName, default=PolicyName.AUTO, choices=list(PolicyName)
    )
    parser.add_argument(
        "--backup", type=BackupMode, default=BackupMode.OFF, choices=list(BackupMode)
    )
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2.5, help="streams per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if HOME_ENV not in os.environ:
        parser.error(f"{HOME_ENV} is not set; it names a checkout of DistServe")
    record, console = Record(arguments.seed), Console()
    trace = generate(GeneratorSettings(requests=arguments.streams), arguments.seed)
    requests = scaled_requests(trace, arguments.seed, arguments.rate)
    faults, kinds = deaths(arguments.streams / arguments.rate, arguments.seed)
    config = config_for(arguments.policy, arguments.backup, arguments.seed)
    faulted, clean = with_and_without(config, requests, faults, arguments.seed, console)
    settings = {
        name: getattr(value, "value", value)
        for name, value in vars(arguments).items()
        if name not in ("seed", "out")
    }
    report = build_report(
        faulted.records, clean.records, faulted.recoveries, faulted.faults, settings
    )
    figures = settings | summary(faulted, report) | {"by_kind": by_kind(faulted, kinds)}
    passed = bool(report["exact"]) and all(count["deaths"] for count in figures["by_kind"].values())
    name = f"{arguments.policy.value}-backup-{arguments.backup.value}"
    kinds_hit = [f"{kind}: {counts}" for kind, counts in figures["by_kind"].items()]
    text = as_text(report, hit_words(figures), *kinds_hit, "PASSED" if passed else "FAILED")
    print(text, end="")
    record.keep(arguments.out, name, figures, text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
