"""Mooncake's real conversation trace, in the size of the tiny model, through a cluster whose decode instances are killed.

    python -m experiments.conversation_trace.run [--requests 300] [--policy auto] [--trace FILE]

Every stream is compared token by token with the same request in a run without kills. Without the trace nothing is run.
"""

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.conversation_trace.trace import DEFAULT_TRACE, sampled
from kvrs.cluster.drill import Run, run_load
from kvrs.cluster.launcher import Cluster
from kvrs.demo import FIRST_ORDINARY_TOKEN, VOCAB_SIZE, demo_config
from kvrs.policy.config import PolicyName
from kvrs.replay.faults import Fault, parse_faults
from kvrs.replay.report import Report, build_report
from kvrs.replay.table import terminal_table
from kvrs.replay.traces import prefix_hit_ratio, replay_requests

RESULTS = Path(__file__).parent / "results"
REQUESTS_PER_S = 6.0
HIT_AT_LEAST = 4
# A killed instance is back after about five seconds; then the load needs a moment to fill it again.
KILL_GAP_S = (8.0, 12.0)


def kills(span_s: float, seed: int) -> list[Fault]:
    """Random moments over the run; each waits until a decode instance has enough streams in flight."""
    rng = random.Random(seed)
    at_s, rows = rng.uniform(2.0, 4.0), []
    while at_s < span_s:
        when = {"at_s": at_s, "inflight_at_least": HIT_AT_LEAST}
        rows.append({"when": when, "what": "kill", "whom": {"role": "decode", "pick": "random"}})
        at_s += rng.uniform(*KILL_GAP_S)
    return parse_faults(rows)


def figures(run: Run, report: Report) -> dict[str, Any]:
    keys = (
        "exact",
        "streams",
        "completed",
        "errors",
        "tokens_lost",
        "tokens_repeated",
        "tokens_different",
        "text_different",
        "recoveries",
        "gap_s",
        "tfs_s",
        "ttp_s",
        "recovery_options",
    )
    phases: Counter[str] = Counter()
    for fault in run.faults:
        phases.update(fault["phases"])
    return {key: report[key] for key in keys} | {
        "kills": len(run.faults),
        "kills_left": run.faults_left,
        "fewest_streams_hit_by_a_kill": min((fault["inflight"] for fault in run.faults), default=0),
        "streams_hit_by_phase": dict(phases),
        "impact": None if report["impact"] is None else {k: v for k, v in report["impact"].items() if k != "buckets"},
        "groups": report["groups"],
        "runs": report["runs"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument("--policy", type=PolicyName, default=PolicyName.AUTO, choices=list(PolicyName))
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.trace.is_file():
        print(f"skipped: no trace at {arguments.trace}; it is Mooncake's FAST'25 conversation_trace.jsonl (--trace FILE)")
        return 0
    console = Console(record=True, width=110)
    trace = sampled(arguments.trace, arguments.requests, REQUESTS_PER_S, arguments.seed)
    requests = replay_requests(trace, VOCAB_SIZE, arguments.seed, FIRST_ORDINARY_TOKEN)
    faults = kills(arguments.requests / REQUESTS_PER_S, arguments.seed)
    with Cluster(
        demo_config(arguments.policy, arguments.seed), lambda line: console.print(f"  {line}", style="dim", markup=False)
    ) as cluster:
        faulted = run_load(cluster, requests, faults, arguments.seed, console, "with kills")
        cluster.wait_all_up()
        clean = run_load(cluster, requests, [], arguments.seed, console, "without")
    settings = {
        "trace": arguments.trace.name,
        "policy": arguments.policy.value,
        "requests": arguments.requests,
        "requests_per_s": REQUESTS_PER_S,
        "block_tokens": trace.block_tokens,
        "prefix_hit_ratio": round(prefix_hit_ratio(trace), 3),
        "seed": arguments.seed,
    }
    report = build_report(faulted.records, clean.records, faulted.recoveries, faulted.faults, settings)
    found = settings | figures(faulted, report)
    passed = bool(report["exact"]) and found["kills"] >= 2 and found["fewest_streams_hit_by_a_kill"] >= HIT_AT_LEAST
    console.print(terminal_table(report))
    console.print("PASSED" if passed else "FAILED")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{arguments.policy.value}.json").write_text(json.dumps(found, indent=1) + "\n")
    (arguments.out / f"{arguments.policy.value}.txt").write_text(console.export_text())
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
