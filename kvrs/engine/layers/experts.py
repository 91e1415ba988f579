"""Mixtures of experts (Shazeer et al. 2017, Jiang et al. 2024), exact for every row.

The rows of an expert are gathered into tiles of their own, so that what it yields for a row depends
on neither the other rows nor their number. A row's experts are added in order of their numbers,
whatever the order of their weights.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvrs.elastic.trees import root, steps
from kvrs.engine.layers.tiles import TILE_ROWS, fold_sum, padded_rows, pair_sum
from kvrs.engine.layers.units import Form, Mlp, added, product


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each row takes, in ascending order, and with which weights, `[rows, chosen]`
    both.
    """

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Router:
    weight: Tensor  # [hidden, experts]
    chosen: int  # By each row.
    renormalise: bool  # The weights of a row's experts add up to one.

    def __call__(self, rows: Tensor, form: Form) -> Routing:
        """For whole tiles."""
        logits = product(rows, self.weight, form.heights)
        raised = torch.exp(logits - logits.amax(-1, keepdim=True))
        probabilities = raised / fold_sum(raised)
        # Stable: of equally probable experts the first ones are taken, on every machine.
        ordered = probabilities.sort(dim=-1, descending=True, stable=True)
        experts = ordered.indices[:, : self.chosen].sort(dim=-1).values
        weights = probabilities.gather(1, experts)
        if self.renormalise:
            weights = weights / fold_sum(weights)
        return Routing(experts, weights)


class RoutedSums(Protocol):
    """How the ranks of a stage put together what their experts yield: in slots of rows, where each
    row of each slot is one rank's.
    """

    def slots_of_expert(self, layer: int, parts: int) -> int:
        """1 where each expert's parts are all on one rank, which adds them; else all parts."""
        ...

    def slots(self, count: int, rows: Tensor) -> Tensor:
        """Memory for `count` times as much as these rows, to be written before `slots_filled`."""
        ...

    def slots_filled(self) -> None:
        """Wait until all ranks have put their rows, as the caller has."""
        ...


@dataclass(slots=True)
class TileCount:
    """How many tiles of rows units of experts have computed since the start."""

    computed: int = 0


@dataclass(frozen=True, slots=True)
class Experts:
    """How rows are given to the units of a layer's MLP, which are the parts of its experts."""

    router: Router
    parts: int  # Units of an expert.
    tiles: TileCount = field(default_factory=TileCount)

    def total(
        self, mlp: Mlp, rows: Tensor, real_rows: int, layer: int, form: Form, sums: RoutedSums
    ) -> Tensor:
        """`[rows, hidden]`, in which rows of padding are zeros. `mlp`: the units that are here."""
        routing, chosen = self.router(rows, form), self.router.chosen
        of_expert = sums.slots_of_expert(layer, self.parts)
        slots = sums.slots(chosen * of_expert, rows)
        self._fill(slots, mlp, rows, routing.experts[:real_rows], form)
        sums.slots_filled()
        real = slots.view(chosen, of_expert, *rows.shape)[:, :, :real_rows]
        weighted = pair_sum(real) * routing.weights[:real_rows].t().unsqueeze(-1)
        total = torch.zeros_like(rows)
        total[:real_rows] = pair_sum(weighted.unsqueeze(0)).squeeze(0)
        return total

    def _fill(self, slots: Tensor, mlp: Mlp, rows: Tensor, experts: Tensor, form: Form) -> None:
        """Put what the units that are here yield for the rows of their experts."""
        count, hidden = rows.shape
        chosen, flat = self.router.chosen, slots.view(-1, hidden)
        of_expert = slots.shape[0] // chosen
        # By expert, and of each expert in order of rows.
        order = experts.flatten().argsort(stable=True)
        row, place = order // chosen, order % chosen
        numbers = torch.bincount(experts.flatten(), minlength=self.router.weight.shape[1])
        ends = [0, *numbers.cumsum(0).tolist()]
        for expert, units in self._units(mlp).items():
            first, last = ends[expert], ends[expert + 1]
            if first == last:
                continue
            tiles = rows.new_zeros(padded_rows(last - first), hidden)
            own = row[first:last]
            torch.index_select(rows, 0, own, out=tiles[: last - first])
            self.tiles.computed += len(units) * len(tiles) // TILE_ROWS
            summands = [
                mlp.down.unit(mlp.inner(tiles, at, form), at, form)[: last - first] for at in units
            ]
            first_slot = place[first:last] * of_expert
            by_part = dict(zip(units.values(), summands, strict=True))
            if of_expert == 1:
                (whole,) = added(steps(root(self.parts), self.parts), summands)
                by_part = {0: whole}
            for part, values in by_part.items():
                flat.index_copy_(0, (first_slot + part) * count + own, values)

    def _units(self, mlp: Mlp) -> dict[int, dict[int, int]]:
        """By expert, its units that are here: their places among these, and their parts of it."""
        found: dict[int, dict[int, int]] = {}
        for at, step in enumerate(mlp.down.order):
            expert, part = divmod(step.unit, self.parts)
            found.setdefault(expert, {})[at] = part
        return found
