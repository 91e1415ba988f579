"""Tiles that the busiest rank computes behind losses: without copies of experts, with them, and
with experts that are split.

    python -m experiments.experts.balance

Counted, not timed: rows choose experts at random by Zipf's law, in an order that differs from layer
to layer; owners, copies and the division of rows are the product's. Ranks wait for each other in
every layer, so a step is as long as the busiest rank of each layer. Moves take the time of their
bytes over links of a known rate. Exit status 1: with copies the fullest rank has more than 1.10
times the mean, or is busier than without them.
"""

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

import numpy as np
import numpy.typing as npt

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.elastic import on_demand
from kvrs.elastic.experts import TileHistory, assign, pieces_of, rebalance, skew
from kvrs.elastic.layouts import Layout, staged, uneven
from kvrs.elastic.moving import LinkRates, schedule
from kvrs.elastic.plans import plan
from kvrs.elastic.units import Units
from kvrs.engine.layers.tiles import TILE_ROWS

NAME = "balance"
RANKS, LEAST_RANKS, LAYERS = 8, 2, 8
EXPONENTS, BATCHES = (0.0, 0.5, 1.0), (16, 64, 256)
HISTORY_STEPS, STEPS = 200, 40
ROOM_SHARE = 1.0
MOST_SKEW = 1.10
PUBLISHED = 1.29  # AnchorTP: 562.32 tokens/s with its balancing over 436.61 without.
RATES = LinkRates(host_bytes_per_s=10e9, peer_bytes_per_s=100e9)
JOIN_S = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    """Experts of a layer: how many, how many a row takes, units of each, bytes of one."""

    experts: int
    chosen: int
    parts: int
    unit_bytes: int

    def units(self) -> Units:
        sizes = (self.unit_bytes,) * self.experts * self.parts
        return Units(LAYERS, (8,) * RANKS, sizes, (8,) * RANKS, 0, expert_parts=self.parts)


SHAPES = {
    "Mixtral-8x7B": Shape(8, 2, 8, 3 * 1792 * 4096 * 2),
    "Qwen3-30B-A3B": Shape(128, 8, 1, 3 * 768 * 2048 * 2),
}


@dataclass(frozen=True, slots=True)
class Row:
    """After one loss of 8 ranks."""

    model: str
    exponent: float
    batch: int
    skews: dict[str, float]  # Of the tiles counted over all steps, by variant.
    busiest: dict[str, float]  # Tiles of units on the busiest rank, of all layers, in a step.
    copies: int

    @property
    def gain(self) -> float:
        return self.busiest["off"] / self.busiest["on"]


@dataclass(frozen=True, slots=True)
class Loss:
    """One of the losses from 8 ranks to 2, at Zipf 1."""

    model: str
    ranks: int  # That are left.
    skew_off: float
    skew_on: float
    serves_s: float  # Until the ranks serve again, with copies that there were before.
    bare_serves_s: float  # Without any.
    balanced_s: float  # Until the copies are there that pay behind the loss.
    reload_s: float  # Of all weights.


def main() -> int:
    options = parser_of(__doc__, __file__, seed=0).parse_args()
    record = Record(options.seed, timed=False)
    rows, losses = [], []
    for name, shape in SHAPES.items():
        for exponent in EXPONENTS:
            for batch in BATCHES:
                routing = _Routing(shape, exponent, batch, options.seed)
                rows.append(measured(name, shape, routing))
        losses += lost(name, shape, _Routing(shape, 1.0, 64, options.seed))
    passed = all(row.skews["on"] <= MOST_SKEW and row.gain >= 0.99 for row in rows)
    figures = {
        "rows": [asdict(row) | {"gain": row.gain} for row in rows],
        "losses": [asdict(loss) for loss in losses],
        "passed": passed,
    }
    record.keep(options.out, NAME, figures, as_text(rows, losses, passed=passed))
    return not passed


class _Routing:
    """Rows that choose experts."""

    def __init__(self, shape: Shape, exponent: float, batch: int, seed: int) -> None:
        self.shape, self.exponent, self.batch = shape, exponent, batch
        self._random = np.random.default_rng(seed)
        weights = np.arange(1, shape.experts + 1) ** -exponent
        order = random.Random(seed)
        self._logits = np.array(
            [
                np.log(weights)[order.sample(range(shape.experts), shape.experts)]
                for _ in range(LAYERS)
            ]
        )

    def step(self) -> npt.NDArray[np.int64]:
        """Tiles of rows by layer and expert."""
        shape = LAYERS, self.batch, self.shape.experts
        scores = self._logits[:, None, :] + self._random.gumbel(size=shape)
        chosen = np.argpartition(-scores, self.shape.chosen - 1, axis=2)[..., : self.shape.chosen]
        counts = np.stack(
            [np.bincount(layer.ravel(), minlength=self.shape.experts) for layer in chosen]
        )
        return -(-counts // TILE_ROWS)

    def history(self) -> list[list[float]]:
        history = TileHistory(half_life_s=1e6)
        for _ in range(HISTORY_STEPS):
            history.note([[*map(int, own)] for own in self.step()], 0.0)
        return history.tiles


def measured(name: str, shape: Shape, routing: _Routing) -> Row:
    units, tiles = shape.units(), routing.history()
    off = _without(laid_out(units), units, [RANKS - 1])
    on = rebalance(off, units, tiles, room(off, units)).layout
    variants = {"whole": laid_out(units), "off": off, "on": on}
    if shape.parts > 1:
        variants["split"] = _without(laid_out(units, split=True), units, [RANKS - 1])
    steps = [routing.step() for _ in range(STEPS)]
    return Row(
        name,
        routing.exponent,
        routing.batch,
        {which: skew(layout, units, tiles) for which, layout in variants.items()},
        {
            which: fmean(busiest(layout, units, step) for step in steps)
            for which, layout in variants.items()
        },
        sum(map(len, on.copies)),
    )


def lost(name: str, shape: Shape, routing: _Routing) -> list[Loss]:
    units, tiles = shape.units(), routing.history()
    balanced = bare = laid_out(units)
    balanced = rebalance(balanced, units, tiles, room(balanced, units)).layout
    found = []
    for last in range(RANKS - 1, LEAST_RANKS - 1, -1):
        after, bare_after = (_without(each, units, [last]) for each in (balanced, bare))
        serves_s, bare_serves_s = (
            schedule(plan(before, now, units, [last], in_pieces=False), RATES).makespan_s + JOIN_S
            for before, now in ((balanced, after), (bare, bare_after))
        )
        again = rebalance(after, units, tiles, room(after, units)).layout
        moves = plan(after, again, units, in_pieces=False)
        reload = plan(bare_after, bare_after, units, bare_after.ranks, in_pieces=False)
        found.append(
            Loss(
                name,
                last,
                skew(bare_after, units, tiles),
                skew(again, units, tiles),
                serves_s,
                bare_serves_s,
                serves_s + schedule(moves, RATES).makespan_s + JOIN_S,
                schedule(reload, RATES).makespan_s + JOIN_S,
            )
        )
        balanced, bare = again, bare_after
    return found


def laid_out(units: Units, *, split: bool = False) -> Layout:
    return uneven(units, staged(LAYERS, [range(RANKS)]), split=split)


def _without(layout: Layout, units: Units, ranks: Sequence[int]) -> Layout:
    return on_demand.reshaped(layout, units, on_demand.survivors(layout, ranks), spread=False)


def room(layout: Layout, units: Units) -> dict[int, int]:
    own = replace(layout, copies=())
    return {rank: int(ROOM_SHARE * own.weight_bytes(rank, units)) for rank in layout.ranks}


def busiest(layout: Layout, units: Units, step: npt.NDArray[np.int64]) -> float:
    """Tiles of units on the busiest rank of each layer, added up."""
    total = 0
    for layer, tiles in enumerate(step.tolist()):
        pieces = pieces_of(layout, layer, units.expert_parts)
        runs = [count for count in tiles for _ in range(units.expert_parts // pieces.units)]
        loads = dict.fromkeys(layout.ranks, 0)
        for count, holders in zip(runs, pieces.holders, strict=True):
            if len(holders) == 1:
                loads[holders[0]] += count
        for given in assign(runs, pieces.holders).values():
            for rank in given:
                loads[rank] += 1
        total += pieces.units * max(loads.values())
    return total


def as_text(rows: Sequence[Row], losses: Sequence[Loss], *, passed: bool) -> str:
    lines = [
        f"Of {RANKS} ranks one is lost. Fullest rank over the mean one, by tiles counted; tiles of",
        f"units on the busiest rank in a step, over {LAYERS} layers.",
        "",
        "model          Zipf  rows   skew off    on  split  copies   tiles: 8 ranks     off      on"
        "   split  off/on",
    ]
    for row in rows:
        own = [row.busiest.get(which) for which in ("whole", "off", "on", "split")]
        shown = " ".join("       -" if each is None else f"{each:7.0f}" for each in own)
        split = f"{row.skews['split']:5.2f}" if "split" in row.skews else "    -"
        lines.append(
            f"{row.model:14} {row.exponent:4} {row.batch:5} {row.skews['off']:10.2f} "
            f"{row.skews['on']:5.2f}  {split} {row.copies:7}          {shown} {row.gain:7.2f}"
        )
    lines += [
        "",
        f"AnchorTP has {PUBLISHED} for its tokens/s with balancing over without, of a skew that it",
        "does not say; here it is the experts' part of a step alone.",
        "",
        "From 8 ranks to 2 at Zipf 1.0: seconds until they serve, with copies there before and",
        "without, until they are balanced, and to load all weights.",
        "",
        "model          left   skew off    on   serve  without  balanced  reload",
    ]
    lines += [
        f"{loss.model:14} {loss.ranks:4} {loss.skew_off:10.2f} {loss.skew_on:5.2f} "
        f"{loss.serves_s:7.2f} {loss.bare_serves_s:8.2f} {loss.balanced_s:9.2f} "
        f"{loss.reload_s:7.2f}"
        for loss in losses
    ]
    return "\n".join([*lines, "", f"passed: {passed}"])


if __name__ == "__main__":
    sys.exit(main())
