"""Tokens per second, TFS and TTP of a mixture of experts that loses one rank after the other, from
eight to two (AnchorTP, Figure 5): without copies of experts, with them, and with experts that are
split.

    python -m experiments.experts.degrees

Simulated, in virtual time, as `experiments/experts/simulated.py`. Each rank is lost with its
memory, and the next one once the ranks that are left compute at their full speed. TFS is the time
from the loss to the next token of any stream, TTP that from there to the stable peak of the tokens
per second. Exit status 1: copies make some number of ranks slower.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from experiments.command_line import parser_of
from experiments.experts.simulated import (
    EXPONENTS,
    PROFILE,
    RANKS,
    REQUESTS,
    STREAMS,
    VARIANTS,
    model_of,
    running,
    tokens_per_s,
)
from experiments.record import Record
from experiments.virtual_time import run_until
from kvrs_lab.report.impact import time_to_peak_s

NAME = "degrees"
LEAST_RANKS = 2
# From a loss to the next one, by ranks that are left: what the streams have lost is computed again.
_RANK_SECONDS = 72.0
_BIN_S, _LONGEST_S = 0.5, 600.0


@dataclass(frozen=True, slots=True)
class Row:
    exponent: float
    variant: str
    ranks: int  # That are left.
    tokens_per_s: float  # At the end, before the next loss.
    tfs_s: float
    ttp_s: float | None
    copies: int


def main() -> int:
    options = parser_of(__doc__, __file__, seed=0).parse_args()
    record = Record(options.seed, timed=False)
    rows = [
        row
        for exponent in EXPONENTS
        for variant in VARIANTS
        for row in play(exponent, variant, options.seed)
    ]
    gains = gains_of(rows)
    figures = {"rows": [asdict(row) for row in rows], "gains": gains}
    record.keep(options.out, NAME, figures, as_text(rows))
    return min(gain for name, gain in gains.items() if " on " in name) < 1.0


def play(exponent: float, variant: str, seed: int) -> list[Row]:
    """A row for each number of ranks, from all of them on.

    Raises AssertionError where an invariant of the simulator is violated.
    """
    rows, lost_at_s, serves_at_s = list[Row](), list[float](), list[float]()
    with running(model_of(exponent, variant, seed), seed) as (cluster, ranks, tokens_s):
        clock = cluster.clock
        while True:
            rate, copies = tokens_per_s(cluster, tokens_s), sum(map(len, ranks.layout.copies))
            rows.append(Row(exponent, variant, ranks.degree, rate, 0.0, None, copies))
            if ranks.degree == LEAST_RANKS:
                break
            lost_at_s.append(clock.now_s)
            ranks.lose([ranks.degree - 1], memory_kept=False)
            run_until(clock, lambda: ranks.serves, 0.001, _LONGEST_S)
            serves_at_s.append(clock.now_s)
            clock.run(lost_at_s[-1] + _RANK_SECONDS / ranks.degree)
        ends_s = [*lost_at_s[1:], clock.now_s]
        assert max(map(len, tokens_s.values())) < STREAMS.output_tokens, "a stream has ended"
        times_s = sorted(at_s for own_s in tokens_s.values() for at_s in own_s)
    full, *left = rows
    return [
        full,
        *(
            # Tokens from before the loss may come until the ranks serve.
            timed(row, [at_s - lost_s for at_s in times_s if serves_s < at_s < end_s])
            for row, lost_s, serves_s, end_s in zip(
                left, lost_at_s, serves_at_s, ends_s, strict=True
            )
        ),
    ]


def timed(row: Row, since_s: Sequence[float]) -> Row:
    """With TFS and TTP, by the seconds from the loss to each token before the next one."""
    counts = [0] * (int(since_s[-1] / _BIN_S) + 1)
    for at_s in since_s:
        counts[int(at_s / _BIN_S)] += 1
    rates = [count / _BIN_S for count in counts]
    return replace(row, tfs_s=since_s[0], ttp_s=time_to_peak_s(rates, _BIN_S, since_s[0]))


def gains_of(rows: Sequence[Row]) -> dict[str, float]:
    """Tokens/s with copies over those without, and with split experts, by ranks."""
    found = {(row.exponent, row.variant, row.ranks): row.tokens_per_s for row in rows}
    return {
        f"{exponent:g} {variant} {ranks}": rate / found[exponent, "off", ranks]
        for (exponent, variant, ranks), rate in found.items()
        if variant != "off"
    }


def as_text(rows: Sequence[Row]) -> str:
    lines = [
        f"SIMULATED on the clock of {PROFILE}, no GPU: {REQUESTS} streams, one of {RANKS} ranks "
        f"after the other",
        "lost with its memory.",
        "",
        "Zipf  ranks   tokens/s: off      on   split   TFS s: off     on  split   "
        "TTP s: off     on  split   copies",
    ]
    found = {(row.exponent, row.ranks, row.variant): row for row in rows}
    for exponent in EXPONENTS:
        for ranks in range(RANKS, LEAST_RANKS - 1, -1):
            own = [found[exponent, ranks, variant] for variant in VARIANTS]
            rates = " ".join(f"{row.tokens_per_s:7.0f}" for row in own)
            tfs = " ".join("     -" if ranks == RANKS else f"{row.tfs_s:6.2f}" for row in own)
            ttp = " ".join("     -" if row.ttp_s is None else f"{row.ttp_s:6.2f}" for row in own)
            lines.append(
                f"{exponent:4} {ranks:6}       {rates}      {tfs}       {ttp} {own[1].copies:8}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
