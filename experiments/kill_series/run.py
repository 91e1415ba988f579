"""Streams under a series of kills at random moments, compared token by token with the same streams
undisturbed.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.kills import as_text, hit_figures, hit_words, kills, with_and_without
from experiments.record import Record
from kvrs.config.policy import PolicyName
from kvrs.demo import REQUESTS_PER_S, demo_config, scaled_requests
from kvrs.load.passes import Run
from kvrs.report.report import Report, build_report
from kvrs.traces.generator import GeneratorSettings, generate

RESULTS = Path(__file__).parent / "results"
HIT_AT_LEAST = 8
# A killed instance is back after about five seconds; then the load needs a moment to fill it again.
KILL_GAP_S = (6.0, 10.0)
PAUSE_BARS_S = {"p50": 0.2, "p99": 0.35}  # Of `auto`, as its clients see it.
LONGEST = 8  # So many pauses are shown with what they consist of.


def summary(run: Run, report: Report) -> dict[str, Any]:
    """The figures that the claim is about."""
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
    rest = {
        "exact": report["exact"],
        "client_visible_gap_s": report["gap_s"],
        "tfs_s": [fault["tfs_s"] for fault in report["faults"]],
    }
    return {key: report[key] for key in keys} | hit_figures(run) | rest


def longest(report: Report, count: int = LONGEST) -> list[dict[str, Any]]:
    """The longest pauses and their parts: from the last token to the decision, the prediction with
    its own parts, and how much later than predicted the next token came.
    """
    rows = [
        row
        for row in report["recovery_rows"]
        if row["pause_s"] is not None and row["real_s"] is not None
    ]
    rows.sort(key=lambda row: float(row["pause_s"]), reverse=True)
    found = []
    for row in rows[:count]:
        chosen = next(each for each in row["estimates"] if each["option"] == row["option"])
        found.append(
            {
                "at_s": row["at_s"],
                "option": row["option"],
                "pause_s": row["pause_s"],
                "undecided_s": row["pause_s"] - row["real_s"],
                "predicted_s": row["predicted_s"],
                "later_s": row["real_s"] - row["predicted_s"],
                **{part: chosen[part] for part in ("queue_s", "transfer_s", "compute_s")},
            }
        )
    return found


def longest_words(rows: list[dict[str, Any]]) -> str:
    lines = [
        "the longest pauses, ms: until the decision, as predicted (queue + transfer + compute), "
        "later than that"
    ]
    for row in rows:
        parts = " + ".join(
            f"{row[part] * 1e3:.0f}" for part in ("queue_s", "transfer_s", "compute_s")
        )
        lines.append(
            f"  {row['pause_s'] * 1e3:4.0f} at {row['at_s']:5.2f} s, {row['option']}: "
            f"{row['undecided_s'] * 1e3:.0f}, {row['predicted_s'] * 1e3:.0f} ({parts}), "
            f"{row['later_s'] * 1e3:+.0f}"
        )
    return "\n".join(lines)


def missed(figures: dict[str, Any]) -> list[str]:
    """The bars that are missed."""
    found = [] if figures["exact"] else ["tokens differ, or a stream has failed"]
    if (hit := figures["fewest_streams_hit_by_a_kill"]) < HIT_AT_LEAST:
        found.append(f"a kill hit {hit} streams; bar {HIT_AT_LEAST}")
    bars = PAUSE_BARS_S if figures["policy"] == PolicyName.AUTO.value else {}
    return found + [
        f"pause {share} {pause_s * 1000:.1f} ms; bar {bar_s * 1000:.0f}"
        for share, bar_s in bars.items()
        if (pause_s := figures["client_visible_gap_s"][share]) > bar_s
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--policy", type=PolicyName, default=PolicyName.AUTO, choices=list(PolicyName)
    )
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    record, console = Record(arguments.seed), Console()
    requests = scaled_requests(
        generate(GeneratorSettings(requests=arguments.streams), arguments.seed), arguments.seed
    )
    faults = kills(arguments.streams / REQUESTS_PER_S, arguments.seed, HIT_AT_LEAST, KILL_GAP_S)
    config = demo_config(arguments.policy, arguments.seed)
    faulted, clean = with_and_without(config, requests, faults, arguments.seed, console)
    settings = {
        "policy": arguments.policy.value,
        "streams": arguments.streams,
    }
    report = build_report(
        faulted.records, clean.records, faulted.recoveries, faulted.faults, settings
    )
    figures = settings | summary(faulted, report) | {"longest_pauses": longest(report)}
    lines = [f"MISSED: {each}" for each in missed(figures)] or ["PASSED"]
    parts = longest_words(figures["longest_pauses"])
    text = as_text(report, hit_words(figures), parts, "\n".join(lines))
    print(text, end="")
    record.keep(arguments.out, arguments.policy.value, figures, text)
    return 0 if lines == ["PASSED"] else 1


if __name__ == "__main__":
    sys.exit(main())
