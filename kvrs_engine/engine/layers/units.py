"""Products of units: the matrices of a block cut as `kvrs_engine.elastic.grain` says, with one
order of additions.

The canonical form of a computation is unit by unit, in tiles of `TILE_ROWS` rows; what a unit
yields is then independent of which other units are computed beside it. A faster form, with more
rows or several units in one product, is used only where it was proven on this machine to give the
same bytes (`proofs.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import silu

from kvrs_engine.elastic.trees import SumStep, cover, steps
from kvrs_engine.engine.layers.tiles import TILE_ROWS


@dataclass(frozen=True, slots=True)
class Form:
    """How products are carried out."""

    heights: tuple[int, ...]  # Rows of one product, the most first; the last is `TILE_ROWS`.
    together: bool  # Whether all units of a block are computed in one product.


CANONICAL = Form((TILE_ROWS,), together=False)
TALL = (256, 128, 64, 32, TILE_ROWS)


def product(
    rows: Tensor, weight: Tensor, heights: tuple[int, ...], out: Tensor | None = None
) -> Tensor:
    """`rows @ weight` in products of those heights: `[whole tiles, in] x [in, out]`."""
    count = rows.shape[0]
    if count in heights:
        return torch.mm(rows, weight) if out is None else torch.mm(rows, weight, out=out)
    if out is None:
        out = rows.new_empty(count, weight.shape[1])
    for first, last in _cuts(count, heights):
        torch.mm(rows[first:last], weight, out=out[first:last])
    return out


@cache
def _cuts(count: int, heights: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """`count` rows as few ranges of those heights."""
    cuts, first = [], 0
    for height in heights:
        while count - first >= height:
            cuts.append((first, first + height))
            first += height
    return tuple(cuts)


@dataclass(frozen=True, slots=True)
class ColumnUnits:
    """Units that each yield columns of their own from whole rows."""

    # [in, all columns], unit after unit; without columns where units lie apart.
    matrix: Tensor
    weights: tuple[Tensor, ...]  # Of each unit [in, its columns], in the same memory.
    biases: tuple[Tensor, ...]  # Of each unit [its columns]; none without a bias.
    bias: Tensor | None  # [all columns]

    @classmethod
    def of(
        cls, matrix: Tensor, columns: Sequence[range], bias: Tensor | None = None
    ) -> "ColumnUnits":
        """From a matrix `[all columns, in]`, as checkpoints have it, that stays where it is."""
        return cls(
            matrix.t(),
            tuple(matrix[own.start : own.stop].t() for own in columns),
            () if bias is None else tuple(bias[own.start : own.stop] for own in columns),
            bias,
        )

    @classmethod
    def apart(cls, units: Sequence[Tensor], biases: Sequence[Tensor]) -> "ColumnUnits":
        """From matrices `[its columns, in]` that stay where they are: never in one product."""
        return cls(units[0][:0].t(), tuple(unit.t() for unit in units), tuple(biases), None)

    def together(self, rows: Tensor, form: Form) -> Tensor:
        """All units in one product, `[rows, all columns]`."""
        out = product(rows, self.matrix, form.heights)
        return out if self.bias is None else out.add_(self.bias)

    def unit(self, rows: Tensor, unit: int, form: Form, out: Tensor | None = None) -> Tensor:
        """One unit, `[rows, its columns]`."""
        result = product(rows, self.weights[unit], form.heights, out)
        return result.add_(self.biases[unit]) if self.biases else result

    def side_by_side(self, rows: Tensor, form: Form) -> Tensor:
        """All units in either form, `[rows, units, columns]`; they are equally wide."""
        units = len(self.weights)
        if form.together:
            return self.together(rows, form).view(rows.shape[0], units, -1)
        out = rows.new_empty(units, rows.shape[0], self.weights[0].shape[1])
        for unit in range(units):
            self.unit(rows, unit, form, out[unit])
        return out.transpose(0, 1)

    def joined(self, rows: Tensor, form: Form) -> Tensor:
        """All units in either form, `[rows, all columns]`."""
        if form.together:
            return self.together(rows, form)
        return torch.cat([self.unit(rows, unit, form) for unit in range(len(self.weights))], 1)


@dataclass(frozen=True, slots=True)
class RowUnits:
    """Units that each take columns of their own and yield a summand of the whole result.

    They may be a part of all units. What they yield are then the sums of the largest subtrees that
    they fill, in the order of `trees.cover`; all units yield one sum.
    """

    weights: tuple[Tensor, ...]  # Of each unit [its columns, out].
    stacked: Tensor | None  # [units, columns, out] in the same memory, where they are equally wide.
    bias: Tensor | None  # [out], added to the sum of all units.
    order: tuple[SumStep, ...]  # How the summands are added up.

    @classmethod
    def of(
        cls,
        units: Sequence[Tensor],
        bias: Tensor | None,
        *,
        places: Sequence[int] | None = None,
        count: int | None = None,
        apart: bool = False,
    ) -> "RowUnits":
        """From matrices `[out, columns]` as checkpoints have them. `places`: their numbers, in
        ascending order, among `count` units; without these they are all. `apart`: they stay where
        they are.
        """
        count = len(units) if count is None else count
        nodes = cover(range(count) if places is None else places, count)
        order = tuple(step for node in nodes for step in steps(node, count))
        assert len(order) == len(units), "each unit has a place"
        if apart:
            return cls(tuple(unit.t() for unit in units), None, bias, order)
        if len({unit.shape for unit in units}) != 1:
            return cls(tuple(unit.contiguous().t() for unit in units), None, bias, order)
        # Not `torch.stack`, which for tensors without memory imports torch's compiler: a second of
        # CPU time, and 100 MB.
        memory = units[0].new_empty(len(units), *units[0].shape)
        for place, unit in zip(memory.unbind(), units, strict=True):
            place.copy_(unit)
        stacked = memory.transpose(1, 2)
        return cls(stacked.unbind(), stacked, bias, order)

    def sums(self, rows: Tensor, form: Form) -> list[Tensor]:
        """Sums `[rows, out]` for `[rows, all columns]`; units are equally wide."""
        by_unit = rows.view(rows.shape[0], len(self.weights), -1)
        if form.together:
            return self.together(by_unit, form)
        return self.by_unit(lambda unit: by_unit[:, unit], form)

    def together(self, inner: Tensor, form: Form) -> list[Tensor]:
        """The sums for `[rows, units, columns]`, all units in one batched product."""
        assert self.stacked is not None, "units of different widths are computed one by one"
        by_unit = inner.transpose(0, 1)
        parts = [
            added(self.order, torch.bmm(by_unit[:, first:last], self.stacked).unbind())
            for first, last in _cuts(inner.shape[0], form.heights)
        ]
        return parts[0] if len(parts) == 1 else [torch.cat(of) for of in zip(*parts, strict=True)]

    def unit(self, inner: Tensor, unit: int, form: Form) -> Tensor:
        """The summand `[rows, out]` of one unit, for its columns."""
        return product(inner, self.weights[unit], form.heights)

    def by_unit(self, inner: Callable[[int], Tensor], form: Form) -> list[Tensor]:
        """The sums, unit by unit; `inner(unit)` are a unit's columns."""
        return added(
            self.order, (self.unit(inner(unit), unit, form) for unit in range(len(self.weights)))
        )

    def biased(self, total: Tensor) -> Tensor:
        """The whole result, in the memory of the sum of all units."""
        return total if self.bias is None else total.add_(self.bias)


def added(order: Iterable[SumStep], summands: Iterable[Tensor]) -> list[Tensor]:
    """The summands added in the order of a tree, in the memory of the first of each sum."""
    sums: dict[int, Tensor] = {}
    for (unit, additions), summand in zip(order, summands, strict=True):
        sums[unit] = summand
        for into, other in additions:
            sums[into].add_(sums.pop(other))
    return list(sums.values())


@dataclass(frozen=True, slots=True)
class Mlp:
    up: ColumnUnits  # Of a gated one, the columns of a unit's gate stand before its others.
    activation: Callable[[Tensor], Tensor]
    down: RowUnits

    def sums(self, rows: Tensor, form: Form) -> list[Tensor]:
        if form.together:
            joined = self.up.together(rows, form)
            by_unit = joined.view(rows.shape[0], len(self.up.weights), -1)
            return self.down.together(self.activation(by_unit), form)
        return self.down.by_unit(lambda unit: self.inner(rows, unit, form), form)

    def inner(self, rows: Tensor, unit: int, form: Form) -> Tensor:
        """Input of one unit of `down`."""
        return self.activation(self.up.unit(rows, unit, form))


def gated_silu(columns: Tensor) -> Tensor:
    """Apply silu to the first half of a unit's columns, and multiply it with the second.

    The gate is a slice of every row, so silu runs row by row: where its SIMD vectors end depends on
    the column alone.
    """
    gate, up = columns.chunk(2, -1)
    return silu(gate) * up
