"""Mooncake's real conversation trace, in the size of the tiny model, through a cluster whose decode
instances are killed.

    python -m experiments.conversation_trace.run [--requests 300] [--policy auto] [--trace FILE]

Every stream is compared token by token with the same request in a run without kills. Without the
trace nothing is run.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.conversation_trace.trace import DEFAULT_TRACE, is_there, sampled
from experiments.kills import as_text, hit_figures, hit_words, kills, with_and_without
from experiments.record import Record
from kvrs.config.policy import PolicyName
from kvrs.demo import FIRST_ORDINARY_TOKEN, VOCAB_SIZE, demo_config
from kvrs.load.passes import Run
from kvrs.report.report import Report, build_report
from kvrs.traces.mooncake import prefix_hit_ratio, replay_requests

RESULTS = Path(__file__).parent / "results"
REQUESTS_PER_S = 6.0
HIT_AT_LEAST = 4
# A killed instance is back after about five seconds; then the load needs a moment to fill it again.
KILL_GAP_S = (8.0, 12.0)


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
    return (
        {key: report[key] for key in keys}
        | hit_figures(run)
        | {
            "impact": None
            if report["impact"] is None
            else {k: v for k, v in report["impact"].items() if k != "buckets"},
            "groups": report["groups"],
            "runs": report["runs"],
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE)
    parser.add_argument(
        "--policy", type=PolicyName, default=PolicyName.AUTO, choices=list(PolicyName)
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not is_there(arguments.trace):
        return 0
    record, console = Record(arguments.seed), Console()
    trace = sampled(arguments.trace, arguments.requests, REQUESTS_PER_S, arguments.seed)
    requests = replay_requests(trace, VOCAB_SIZE, arguments.seed, FIRST_ORDINARY_TOKEN)
    faults = kills(arguments.requests / REQUESTS_PER_S, arguments.seed, HIT_AT_LEAST, KILL_GAP_S)
    config = demo_config(arguments.policy, arguments.seed)
    faulted, clean = with_and_without(config, requests, faults, arguments.seed, console)
    settings = {
        "trace": arguments.trace.name,
        "policy": arguments.policy.value,
        "requests": arguments.requests,
        "requests_per_s": REQUESTS_PER_S,
        "block_tokens": trace.block_tokens,
        "prefix_hit_ratio": round(prefix_hit_ratio(trace), 3),
    }
    report = build_report(
        faulted.records, clean.records, faulted.recoveries, faulted.faults, settings
    )
    found = settings | figures(faulted, report)
    passed = (
        bool(report["exact"])
        and found["kills"] >= 2
        and found["fewest_streams_hit_by_a_kill"] >= HIT_AT_LEAST
    )
    text = as_text(report, hit_words(found), "PASSED" if passed else "FAILED")
    print(text, end="")
    record.keep(arguments.out, arguments.policy.value, found, text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
