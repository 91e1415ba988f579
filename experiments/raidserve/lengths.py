"""RaidServe's Table 2: lengths of Mooncake's conversation trace, counted in the file, of its first
requests, and of random samples of as many requests as the paper has.

    python -m experiments.raidserve.lengths

A published statistic lies within the samples where it is between the least and the most of theirs.
Table 1 has lengths of OpenThoughts-114k, of which no file is at hand.
"""

import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.command_line import parser_of
from experiments.kills.drill import TRACE
from experiments.record import Record
from kvrs_lab.traces.mooncake import TraceRequest, load_mooncake

NAME = "lengths"
SAMPLE = 3000
STATISTICS = ("mean", "median", "max")
PUBLISHED = {
    "input": {"mean": 13_516.0, "median": 8_001.0, "max": 123_192.0},
    "output": {"mean": 349.0, "median": 362.0, "max": 2_000.0},
}
Counts = dict[str, dict[str, float]]


def counts(requests: Sequence[TraceRequest]) -> Counts:
    sides = {
        "input": [each.input_tokens for each in requests],
        "output": [each.output_tokens for each in requests],
    }
    return {
        side: {
            "mean": statistics.fmean(lengths),
            "median": float(statistics.median(lengths)),
            "max": float(max(lengths)),
        }
        for side, lengths in sides.items()
    }


def spread(samples: Sequence[Counts]) -> dict[str, dict[str, dict[str, float]]]:
    """The least, the mean and the most of each statistic over the samples."""
    return {
        side: {
            what: {
                "least": min(found),
                "mean": statistics.fmean(found),
                "most": max(found),
            }
            for what in STATISTICS
            if (found := [each[side][what] for each in samples])
        }
        for side in PUBLISHED
    }


def as_text(figures: dict[str, Any]) -> str:
    lines = [
        f"Mooncake's conversation trace: {figures['requests']:,} requests; its first {SAMPLE:,}; "
        f"{figures['samples']:,} random samples of as many, without replacement; tokens",
        "",
        f"{'':15}{'published':>10}{'first':>10}{'over':>7}{'all':>10}{'over':>7}"
        f"   samples: {'least':>9}{'most':>10}",
    ]
    for side, published in PUBLISHED.items():
        for what in STATISTICS:
            own = figures["sampled"][side][what]
            is_within = own["least"] <= published[what] <= own["most"]
            cells = [f"{side:8}{what:7}{published[what]:>10,.0f}"]
            for those in ("first", "file"):
                found = figures[those][side][what]
                cells.append(f"{found:>10,.0f}{found / published[what]:>7.3f}")
            cells.append(f"{'':12}{own['least']:>9,.0f}{own['most']:>10,.0f}")
            lines.append("".join(cells) + ("" if is_within else "  published: outside"))
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--samples", type=int, default=1000)
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    requests = load_mooncake(options.trace).requests
    draw = random.Random(options.seed)
    figures = {
        "requests": len(requests),
        "file": counts(requests),
        "first": counts(requests[:SAMPLE]),
        "sample": SAMPLE,
        "samples": options.samples,
        "sampled": spread([counts(draw.sample(requests, SAMPLE)) for _ in range(options.samples)]),
        "published": PUBLISHED,
    }
    text = as_text(figures)
    print(text, end="")
    record.keep(options.out, NAME, figures, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
