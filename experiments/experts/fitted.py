"""The gain by copies of experts at the router's skew by which seven ranks without copies have as
many tokens per second as AnchorTP publishes (Figures 4 to 6).

    python -m experiments.experts.fitted

One parameter is fitted, the exponent of Zipf's law, to one published figure, the tokens per second
without balance; all others are output. The clock is that of a profile for other GPUs: the published
figure is carried to it by the memory bandwidth of both, since decoding reads weights. Simulated, in
virtual time, as `experiments/experts/simulated.py`. Exit status 1: no skew fits.
"""

import sys
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from experiments.command_line import parser_of
from experiments.experts import degrees, simulated
from experiments.experts.simulated import PROFILE, PUBLISHED, RANKS, VARIANTS, Row
from experiments.record import Record

NAME = "fitted"
# The paper's MI210, and the profile's H100.
THEIR_BYTES_PER_S, OUR_BYTES_PER_S = 1.6e12, 3.35e12
TARGET = PUBLISHED["off"] * OUR_BYTES_PER_S / THEIR_BYTES_PER_S
LEAST, MOST, STEP = 0.0, 2.0, 0.02


def fitted(seed: int) -> float:
    """The least skew, in steps, at which tokens per second have come down to the published ones."""

    @cache
    def is_reached(step: int) -> bool:
        return simulated.play(step * STEP, "off", seed).behind <= TARGET

    low, high = round(LEAST / STEP), round(MOST / STEP)
    if is_reached(low) or not is_reached(high):
        raise ValueError(f"no skew from {LEAST:g} to {MOST:g} has {TARGET:.0f} tokens/s")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_reached(middle) else (middle, high)
    return high * STEP


def as_text(figures: dict[str, Any]) -> str:
    exponent, gains = figures["exponent"], figures["gains"]
    lines = [
        f"SIMULATED on the clock of {PROFILE}, no GPU: one of 8 ranks lost with its memory",
        f"fitted, one parameter: Zipf's exponent {exponent:.2f}, by which seven ranks without "
        f"copies have {TARGET:.0f} tokens/s: the published {PUBLISHED['off']:g} by "
        f"{OUR_BYTES_PER_S / 1e12:g} over {THEIR_BYTES_PER_S / 1e12:g} TB/s of memory",
        "",
        "experts   tokens/s: 8 ranks  7 ranks   pause s  copies  over off",
    ]
    lines += [
        f"{row['variant']:8} {row['before']:18.0f} {row['behind']:8.0f} {row['pause_s']:9.2f} "
        f"{row['copies']:7} {gains.get(row['variant'], 1.0):9.2f}"
        for row in figures["rows"]
    ]
    lines += [
        "",
        f"gain by copies: {gains['on']:.2f}; published {figures['published_gain']:.2f}",
        "",
        "ranks left   tokens/s: off      on   TFS s: off     on   TTP s: off     on",
    ]
    found = {(row["ranks"], row["variant"]): row for row in figures["degrees"]}
    for ranks in range(RANKS, degrees.LEAST_RANKS - 1, -1):
        own = [found[ranks, variant] for variant in ("off", "on")]
        rates = " ".join(f"{row['tokens_per_s']:7.0f}" for row in own)
        tfs = " ".join("     -" if ranks == RANKS else f"{row['tfs_s']:6.2f}" for row in own)
        ttp = " ".join("     -" if row["ttp_s"] is None else f"{row['ttp_s']:6.2f}" for row in own)
        lines.append(f"{ranks:10}        {rates}      {tfs}      {ttp}")
    return "\n".join(lines)


def main() -> int:
    options = parser_of(__doc__, __file__, seed=0).parse_args()
    record = Record(options.seed, timed=False)
    exponent = fitted(options.seed)
    rows = [
        replace(simulated.play(exponent, variant, options.seed), exponent=exponent)
        for variant in VARIANTS
    ]
    by_variant: dict[str, Row] = {row.variant: row for row in rows}
    without = by_variant["off"].behind
    figures = {
        "fitted": {"parameter": "exponent", "to": "published tokens/s without balance"},
        "exponent": exponent,
        "target_tokens_per_s": TARGET,
        "clock_scale": OUR_BYTES_PER_S / THEIR_BYTES_PER_S,
        "rows": [asdict(row) for row in rows],
        "gains": {name: row.behind / without for name, row in by_variant.items() if name != "off"},
        "published": PUBLISHED,
        "published_gain": PUBLISHED["on"] / PUBLISHED["off"],
        "degrees": [
            asdict(row)
            for variant in ("off", "on")
            for row in degrees.play(exponent, variant, options.seed)
        ],
    }
    text = as_text(figures)
    print(text)
    record.keep(options.out, NAME, figures, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
