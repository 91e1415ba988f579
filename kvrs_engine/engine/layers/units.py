"""Products of units: the matrices of a block, cut by `kvrs_engine.elastic.grain`, with one order of
additions.

The canonical form computes unit by unit, in tiles of `TILE_ROWS` rows, so that the result of a unit
does not depend on the other units. A faster form, with more rows or several units in one product,
is used only if it was proven on this machine to give the same bytes (`proofs.py`).
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
    """The division of a computation into products."""

    heights: tuple[int, ...]  # Allowed rows of a product, in descending order to `TILE_ROWS`.
    together: bool  # All units of a block are computed in one product.


CANONICAL = Form((TILE_ROWS,), together=False)
TALL = (256, 128, 64, 32, TILE_ROWS)


def product(
    rows: Tensor, weight: Tensor, heights: tuple[int, ...], out: Tensor | None = None
) -> Tensor:
    """Compute `rows @ weight`, `[whole tiles, in] x [in, out]`, in products of these heights."""
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
    """Divide `count` rows into the fewest ranges of these heights."""
    cuts, first = [], 0
    for height in heights:
        while count - first >= height:
            cuts.append((first, first + height))
            first += height
    return tuple(cuts)


@dataclass(frozen=True, slots=True)
class ColumnUnits:
    """Units that each compute their own output columns from whole rows."""

    matrix: Tensor  # [in, all columns], unit after unit; no columns if units are separate.
    weights: tuple[Tensor, ...]  # [in, unit's columns] of each unit, views of the same memory.
    biases: tuple[Tensor, ...]  # [unit's columns] of each unit; empty without a bias.
    bias: Tensor | None  # [all columns]

    @classmethod
    def of(cls, matrix: Tensor, widths: Sequence[int], bias: Tensor | None = None) -> "ColumnUnits":
        """Create units as views of a matrix `[all columns, in]`, the orientation of checkpoints."""
        units = torch.split(matrix, list(widths))
        biases = () if bias is None else torch.split(bias, list(widths))
        return cls(matrix.t(), tuple(unit.t() for unit in units), biases, bias)

    @classmethod
    def apart(cls, units: Sequence[Tensor], biases: Sequence[Tensor]) -> "ColumnUnits":
        """Create units as views of separate matrices `[unit's columns, in]`, which are never
        computed in one product.
        """
        return cls(units[0][:0].t(), tuple(unit.t() for unit in units), tuple(biases), None)

    def together(self, rows: Tensor, form: Form) -> Tensor:
        """Compute all units in one product, `[rows, all columns]`."""
        out = product(rows, self.matrix, form.heights)
        return out if self.bias is None else out.add_(self.bias)

    def unit(self, rows: Tensor, unit: int, form: Form, out: Tensor | None = None) -> Tensor:
        """Compute one unit, `[rows, unit's columns]`."""
        result = product(rows, self.weights[unit], form.heights, out)
        return result.add_(self.biases[unit]) if self.biases else result

    def side_by_side(self, rows: Tensor, form: Form) -> Tensor:
        """Compute all units, which must be equally wide, `[rows, units, columns]`."""
        units = len(self.weights)
        if form.together:
            return self.together(rows, form).view(rows.shape[0], units, -1)
        out = rows.new_empty(units, rows.shape[0], self.weights[0].shape[1])
        for unit in range(units):
            self.unit(rows, unit, form, out[unit])
        return out.transpose(0, 1)

    def joined(self, rows: Tensor, form: Form) -> Tensor:
        """Compute all units, `[rows, all columns]`."""
        if form.together:
            return self.together(rows, form)
        return torch.cat([self.unit(rows, unit, form) for unit in range(len(self.weights))], 1)


@dataclass(frozen=True, slots=True)
class RowUnits:
    """Units that each take their own input columns and compute a summand of the result.

    The sums of a part of the units are those of the largest complete subtrees, in the order of
    `trees.cover`; all units have one sum.
    """

    weights: tuple[Tensor, ...]  # [unit's columns, out] of each unit.
    stacked: Tensor | None  # [units, columns, out], the same memory; None: not equally wide.
    bias: Tensor | None  # [out], added to the sum of all units.
    order: tuple[SumStep, ...]  # The order of additions.

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
        """Create units from matrices `[out, columns]`, the orientation of checkpoints.

        `places` has the units' numbers among `count` units in ascending order; None: all units.
        `apart`: the matrices are not copied.
        """
        count = len(units) if count is None else count
        nodes = cover(range(count) if places is None else places, count)
        order = tuple(step for node in nodes for step in steps(node, count))
        assert len(order) == len(units), "each unit has a place"
        if apart:
            return cls(tuple(unit.t() for unit in units), None, bias, order)
        if len({unit.shape for unit in units}) != 1:
            return cls(tuple(unit.contiguous().t() for unit in units), None, bias, order)
        # `torch.stack` would import torch's compiler for tensors without memory: 1 s and 100 MB.
        memory = units[0].new_empty(len(units), *units[0].shape)
        for place, unit in zip(memory.unbind(), units, strict=True):
            place.copy_(unit)
        stacked = memory.transpose(1, 2)
        return cls(stacked.unbind(), stacked, bias, order)

    def sums(self, rows: Tensor, form: Form) -> list[Tensor]:
        """Compute the sums `[rows, out]` for `[rows, all columns]`; units must be equally wide."""
        by_unit = rows.view(rows.shape[0], len(self.weights), -1)
        if form.together:
            return self.together(by_unit, form)
        return self.by_unit(lambda unit: by_unit[:, unit], form)

    def together(self, inner: Tensor, form: Form) -> list[Tensor]:
        """Compute the sums for `[rows, units, columns]` with one batched product of all units."""
        assert self.stacked is not None, "units of different widths are computed one by one"
        by_unit = inner.transpose(0, 1)
        parts = [
            added(self.order, torch.bmm(by_unit[:, first:last], self.stacked).unbind())
            for first, last in _cuts(inner.shape[0], form.heights)
        ]
        return parts[0] if len(parts) == 1 else [torch.cat(of) for of in zip(*parts, strict=True)]

    def unit(self, inner: Tensor, unit: int, form: Form) -> Tensor:
        """Compute the summand `[rows, out]` of one unit from its columns."""
        return product(inner, self.weights[unit], form.heights)

    def by_unit(self, inner: Callable[[int], Tensor], form: Form) -> list[Tensor]:
        """Compute the sums unit by unit; `inner(unit)` returns a unit's columns."""
        return added(
            self.order, (self.unit(inner(unit), unit, form) for unit in range(len(self.weights)))
        )

    def biased(self, total: Tensor) -> Tensor:
        """Add the bias to the sum of all units, in place."""
        return total if self.bias is None else total.add_(self.bias)


def added(order: Iterable[SumStep], summands: Iterable[Tensor]) -> list[Tensor]:
    """Add the summands in the order of a tree, in the memory of the first summand of each sum."""
    sums: dict[int, Tensor] = {}
    for (unit, additions), summand in zip(order, summands, strict=True):
        sums[unit] = summand
        for into, other in additions:
            sums[into].add_(sums.pop(other))
    return list(sums.values())


@dataclass(frozen=True, slots=True)
class Mlp:
    up: ColumnUnits  # A gated unit has its gate's columns first.
    activation: Callable[[Tensor], Tensor]
    down: RowUnits

    def sums(self, rows: Tensor, form: Form) -> list[Tensor]:
        if form.together:
            joined = self.up.together(rows, form)
            by_unit = joined.view(rows.shape[0], len(self.up.weights), -1)
            return self.down.together(self.activation(by_unit), form)
        return self.down.by_unit(lambda unit: self.inner(rows, unit, form), form)

    def inner(self, rows: Tensor, unit: int, form: Form) -> Tensor:
        """Compute the input of one unit of `down`."""
        return self.activation(self.up.unit(rows, unit, form))


def gated_silu(columns: Tensor) -> Tensor:
    """Apply silu to the first half of a unit's columns, and multiply by the second half.

    The gate is a slice of every row, so silu runs row by row, and the ends of its SIMD vectors
    depend only on the column.
    """
    gate, up = columns.chunk(2, -1)
    return silu(gate) * up
