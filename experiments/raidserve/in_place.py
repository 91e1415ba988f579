"""RaidServe's Table 3 in place, on the clock of its model: Llama-3.1-70B on eight GPUs, one lost,
56 requests of 16K tokens.

    python -m experiments.raidserve.in_place

Simulated: scheduler, re-forming, layouts and restores are the product's, in virtual time; batches
take the times of the profile, moves their bytes over the paper's links. Exit status 1: an order or
a ratio of the paper is missed.
"""

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.sentinels.lost_rank import (
    CONTEXT_TOKENS,
    PROFILE,
    RANKS,
    RATES,
    REQUESTS,
    Row,
    ladder_s,
    play,
)

NAME = "in_place"
PUBLISHED_S = {"recompute": 22.0, "host": 0.530, "full": 0.120, "oracle": 0.015}
MEANING = {
    "recompute": "whole shards from the host, all KV computed again",
    "host": "whole shards from the host, lost KV from the host",
    "full": "only lost weights and lost KV from the host",
    "oracle": "nothing to move",
}
# Of the paper's section 3.2: 280 GB of KV and 140 GB of weights on eight GPUs, of which seven are
# left, at 50 GB/s each. Its table has 120 ms for what takes 150 ms at that rate.
KV_BYTES, WEIGHT_BYTES, GPU_BYTES_PER_S = 280e9, 140e9, 50e9
LOST_BYTES = KV_BYTES / RANKS / (RANKS - 1)  # Of KV, for each rank that is left.
ARITHMETIC_BYTES = {
    "host": LOST_BYTES + WEIGHT_BYTES / (RANKS - 1),
    "full": LOST_BYTES + WEIGHT_BYTES / RANKS / (RANKS - 1),
}
NEAR = 0.2
# Recomputing over host memory as published; whole shards over what was lost by that arithmetic.
LEAST_RATIOS = {
    ("recompute", "host"): 41.0,
    ("host", "full"): (1 - NEAR) * ARITHMETIC_BYTES["host"] / ARITHMETIC_BYTES["full"],
}
MEASURED = Path(__file__).parents[1] / "anchortp" / "results" / "in_place.json"


def join_s() -> float:
    """The measured time of real ranks with next to nothing to move."""
    found = json.loads(MEASURED.read_text())
    return float(found["pause_s"]["p50"])


def figures_of(rows: Sequence[Row], computed_s: dict[str, float]) -> dict[str, Any]:
    last_s = {row.way: row.last_s for row in rows}
    return {
        "rows": [asdict(row) for row in rows],
        "computed_s": computed_s,
        "published_s": PUBLISHED_S,
        "published_arithmetic": {
            "bytes_per_rank": ARITHMETIC_BYTES,
            "bytes_per_s": GPU_BYTES_PER_S,
            "seconds": {way: count / GPU_BYTES_PER_S for way, count in ARITHMETIC_BYTES.items()},
            "host / full": ARITHMETIC_BYTES["host"] / ARITHMETIC_BYTES["full"],
            # More than the rate of the arithmetic.
            "bytes_per_s_of_full": ARITHMETIC_BYTES["full"] / PUBLISHED_S["full"],
        },
        "join_s": join_s(),
        "ratios": {f"{one} / {other}": last_s[one] / last_s[other] for one, other in LEAST_RATIOS},
        "computed_ratios": {
            f"{one} / {other}": computed_s[one] / computed_s[other] for one, other in LEAST_RATIOS
        },
    }


def missed(figures: dict[str, Any]) -> list[str]:
    last_s = [row["last_s"] for row in figures["rows"]]
    found = [] if last_s == sorted(last_s, reverse=True) else ["the order of the ways is another"]
    for (one, other), least in LEAST_RATIOS.items():
        ratio = figures["computed_ratios"][f"{one} / {other}"]
        if ratio < least:
            found.append(f"{one} takes {ratio:.1f} times as long as {other}; bar {least:.2g}")
    return found


def as_text(figures: dict[str, Any]) -> str:
    lines = [
        f"SIMULATED on the clock of {PROFILE}, no GPU: one of {RANKS} ranks lost with its memory, "
        f"{REQUESTS} streams of {CONTEXT_TOKENS:,} tokens go on in place",
        f"links of {RATES.host_bytes_per_s / 1e9:g} GB/s from the host to each rank, "
        f"{RATES.peer_bytes_per_s / 1e9:g} GB/s between ranks; ranks join in "
        f"{figures['join_s'] * 1e3:.0f} ms, as real ones with a small model (in_place)",
        "",
        f"{'seconds':11}{'RaidServe':>10}{'by bytes':>10}{'weights':>10}"
        f"{'next token: first':>19}{'p50':>9}{'last':>9}",
    ]
    for row in figures["rows"]:
        way = row["way"]
        computed_s = figures["computed_s"].get(way, 0.0)
        lines.append(
            f"{way:11}{PUBLISHED_S[way]:>10.3f}{computed_s:>10.3f}{row['weights_s']:>10.3f}"
            f"{row['first_s']:>19.3f}{row['p50_s']:>9.3f}{row['last_s']:>9.3f}  {MEANING[way]}"
        )
    lines.append("")
    for one, other in LEAST_RATIOS:
        key, published = f"{one} / {other}", PUBLISHED_S[one] / PUBLISHED_S[other]
        lines.append(
            f"{key}: RaidServe {published:.1f}, by bytes {figures['computed_ratios'][key]:.1f}, "
            f"until the last stream's next token {figures['ratios'][key]:.1f}"
        )
    own = figures["published_arithmetic"]
    lines.append(
        f"host / full by the paper's own {own['bytes_per_s'] / 1e9:g} GB/s: "
        f"{own['seconds']['host']:.3f} s over {own['seconds']['full']:.3f} s, "
        f"{own['host / full']:.1f}; its {PUBLISHED_S['full']:.3f} s are "
        f"{own['bytes_per_s_of_full'] / 1e9:.1f} GB/s"
    )
    wrong = missed(figures)
    return "\n".join([*lines, "", *(["MISSED", *wrong] if wrong else ["PASSED"])])


def main() -> int:
    parser = parser_of(__doc__, seed=1)
    parser.add_argument("--jobs", type=int, help="processes at a time")
    chosen = parser.parse_args()
    record = Record(chosen.seed, timed=False)
    with ProcessPoolExecutor(chosen.jobs, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(partial(play, seed=chosen.seed, join_s=join_s()), PUBLISHED_S))
    figures = figures_of(rows, ladder_s())
    text = as_text(figures)
    print(text)
    record.keep(chosen.out, NAME, figures, text)
    return int(bool(missed(figures)))


if __name__ == "__main__":
    sys.exit(main())
