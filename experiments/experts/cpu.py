"""CPU time per token of the busiest rank, from 8 ranks to 7: without copies of experts, with them,
and with experts that are split.

    python -m experiments.experts.cpu [--seeds 3] [--rows 128] [--skews 0 0.5 1] [--tiny]

Real: processes of ranks of a generated Mixtral with 1 GB of weights, at three skews of its router,
and the CPU time that the kernel counts for each of them. The ranks share the processors of this
machine, so no time of a step is shown. Each seed gives another model and other tokens. Exit status
1: the copies of a skewed model leave the busiest rank more to do, by the median of the seeds.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from statistics import median

from experiments.command_line import parser_of
from experiments.experts.stepping import group_of, step_of
from experiments.record import Record
from kvrs.config.cluster import ExpertSettings
from kvrs.errors import RanksLostError
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.routed import APART_S
from kvrs_testkit.random_experts import ExpertsModel, write_experts_model

NAME = "cpu"
RANKS, SKEWS, VARIANTS = 8, (0.0, 0.5, 1.0), ("off", "on", "split")
PUBLISHED = 562.32 / 436.61  # AnchorTP: tokens/s behind a loss, with balance over without.
_SETTLED_S, _SETTLED_STEPS, _LONGEST_S = 4 * APART_S, 20, 300.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Row:
    seed: int
    skew: float  # Of the router's rows.
    variant: str
    ranks: int
    copies: int
    tiles_skew: float  # Fullest rank over the mean one, by tiles counted.
    busiest_ms: float  # CPU time per token of the rank with most of it,
    mean_ms: float  # and of all of them.


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--steps", type=int, default=40, help="that are measured")
    parser.add_argument("--rows", type=int, default=64, help="of a step")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: does it run")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from 0 on")
    parser.add_argument("--skews", type=float, nargs="+", default=SKEWS, help="of the router")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds: got {options.seeds}; allowed: 1 and more")
    record = Record(*range(options.seeds))
    rows: list[Row] = []
    for seed, skew in product(range(options.seeds), options.skews):
        with tempfile.TemporaryDirectory() as directory:
            write_experts_model(Path(directory), model_of(skew, tiny=options.tiny), seed)
            for variant in VARIANTS:
                rows += measured(Path(directory), seed, skew, variant, options)
                print(as_line(rows[-2]), as_line(rows[-1]), sep="\n", flush=True)
    by_seed = gains_of(rows)
    gains = {skew: median(own) for skew, own in by_seed.items()}
    figures = {
        "rows": [asdict(row) for row in rows],
        "gains": gains,
        "gains_by_seed": by_seed,
        "published": PUBLISHED,
    }
    text = as_text(rows, by_seed)
    print(text)
    record.keep(options.out, NAME, figures, text)
    return any(gain < 1.0 for skew, gain in gains.items() if float(skew))


def model_of(skew: float, *, tiny: bool) -> ExpertsModel:
    if tiny:  # Of two parts, so that experts can be split.
        return ExpertsModel("mixtral", 2, 128, 8, 4, 16, 8, 2, 2048, skew)
    return ExpertsModel.large("mixtral", skew=skew)


def measured(
    directory: Path, seed: int, skew: float, variant: str, options: argparse.Namespace
) -> list[Row]:
    """Rows of all ranks, and of those that are left once one has gone."""
    experts = ExpertSettings(
        layout="split" if variant == "split" else "whole",
        room_share=1.0 if variant == "on" else 0.0,
    )
    group = group_of(directory, RANKS, options.rows, experts)
    try:
        bench = _Bench(group, options.rows, seed)
        before = bench.row(skew, variant, options.steps)
        order = group.reformer.order
        # Not while copies move.
        bench.compute_until(lambda: order(RANKS - 1, leaves=True).result() is None)
        bench.compute_until(lambda: len(group.layout.ranks) == RANKS - 1)
        return [before, bench.row(skew, variant, options.steps)]
    finally:
        group.close()


class _Bench:
    def __init__(self, group: RankGroup, rows: int, seed: int) -> None:
        self._group, self._rows, self._seed = group, rows, seed
        self._choose, self._steps = Random(seed), 0

    def row(self, skew: float, variant: str, steps: int) -> Row:
        self._settle()
        group = self._group
        loads = group.reformer.loads
        assert loads is not None, "the model has experts"
        before, from_s = self._cpu_s(), loads.facts(group.layout)
        for _ in range(steps):
            self.step()
        report, tokens = loads.facts(group.layout), steps * self._rows
        used = [
            after - self_before for after, self_before in zip(self._cpu_s(), before, strict=True)
        ]
        tiles = [report.tiles[rank] - from_s.tiles[rank] for rank in group.layout.ranks]
        return Row(
            self._seed,
            skew,
            variant,
            len(group.layout.ranks),
            report.copies,
            max(tiles) / (sum(tiles) / len(tiles)),
            1e3 * max(used) / tokens,
            1e3 * sum(used) / len(used) / tokens,
        )

    def _settle(self) -> None:
        """The loads have been looked at for a while, and no other copies pay."""
        group, quiet = self._group, 0
        since_s = time.monotonic()
        until_s = since_s + _LONGEST_S
        while quiet < _SETTLED_STEPS or time.monotonic() < since_s + _SETTLED_S:
            number = group.layout.number
            self.step()
            quiet += 1
            if group.reforming is not None or group.layout.number != number:
                quiet, since_s = 0, time.monotonic()
            assert time.monotonic() < until_s, "copies of experts do not come to rest"

    def compute_until(self, holds: Callable[[], bool]) -> None:
        until_s = time.monotonic() + _LONGEST_S
        while not holds():
            self.step()
            assert time.monotonic() < until_s, "the ranks do not get there"

    def step(self) -> None:
        """One token of each sequence."""
        self._steps += 1
        chunks = step_of(self._rows, self._steps, lambda: self._choose.randrange(4, 500))
        while True:
            try:
                self._group.execute(chunks)
            except RanksLostError:
                self._group.on_lost()
            else:
                return

    def _cpu_s(self) -> list[float]:
        """CPU time of each rank of the layout since its process began."""
        pids = self._group.pids
        return [_cpu_s(pids[rank]) for rank in self._group.layout.ranks]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def gains_of(rows: Sequence[Row]) -> dict[str, list[float]]:
    """CPU time per token of the busiest of seven ranks, without copies over with them: by skew, of
    each seed.
    """
    found = {
        (row.seed, row.skew, row.variant): row.busiest_ms for row in rows if row.ranks == RANKS - 1
    }
    seeds = sorted({row.seed for row in rows})
    skews = dict.fromkeys(row.skew for row in rows)
    return {
        f"{skew:g}": [found[seed, skew, "off"] / found[seed, skew, "on"] for seed in seeds]
        for skew in skews
    }


def as_text(rows: Sequence[Row], gains: dict[str, list[float]]) -> str:
    lines = [
        "CPU time per token, of the rank with most and of the mean one, ms",
        "",
        "seed  skew  experts  ranks  copies  tiles: max/mean  busiest   mean",
    ]
    lines += map(as_line, rows)
    shown = ", ".join(f"{_shown(own)} at {skew}" for skew, own in gains.items())
    lines += ["", f"off over on with 7 ranks: {shown}; AnchorTP's tokens/s: {PUBLISHED:.2f}"]
    return "\n".join(lines)


def as_line(row: Row) -> str:
    return (
        f"{row.seed:4}  {row.skew:4} {row.variant:8} {row.ranks:5} {row.copies:7} "
        f"{row.tiles_skew:16.2f} {row.busiest_ms:8.2f} {row.mean_ms:6.2f}"
    )


def _shown(gains: Sequence[float]) -> str:
    """The median of the seeds, and their range."""
    middle = f"{median(gains):.2f}"
    return middle if len(gains) == 1 else f"{middle} ({min(gains):.2f} to {max(gains):.2f})"


if __name__ == "__main__":
    sys.exit(main())
