"""Mixtures of experts (Shazeer et al. 2017, Jiang et al. 2024), exact for every row.

The rows of an expert are gathered into separate tiles, so that the result for a row depends neither
on the other rows nor on their number. The results of a row's experts are added in order of the
experts' numbers. The ranks with copies of an expert divide its rows in whole tiles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from kvrs_engine.elastic.trees import root, steps
from kvrs_engine.engine.layers.exchange import SumExchange
from kvrs_engine.engine.layers.tiles import TILE_ROWS, fold_sum, padded_rows, pair_sum
from kvrs_engine.engine.layers.units import Form, Mlp, added, product


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts of each row in ascending order and their weights, both `[rows, chosen]`."""

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Router:
    weight: Tensor  # [hidden, experts]
    chosen: int  # Number of experts per row.
    renormalise: bool  # Scale the weights of a row's experts to a sum of one.

    def __call__(self, rows: Tensor, form: Form) -> Routing:
        """Route rows, which must be whole tiles."""
        logits = product(rows, self.weight, form.heights)
        raised = torch.exp(logits - logits.amax(-1, keepdim=True))
        probabilities = raised / fold_sum(raised)
        # A stable sort chooses the same of equally probable experts on every machine.
        ordered = probabilities.sort(dim=-1, descending=True, stable=True)
        experts = ordered.indices[:, : self.chosen].sort(dim=-1).values
        weights = probabilities.gather(1, experts)
        if self.renormalise:
            weights = weights / fold_sum(weights)
        return Routing(experts, weights)


@dataclass(slots=True)
class TileCount:
    """Counts the tiles that units of experts have computed since the start, over all layers."""

    computed: int = 0


@dataclass(frozen=True, slots=True)
class Experts:
    """Routes rows to the experts of a layer, whose parts are the units of the layer's MLP."""

    router: Router
    parts: int  # Units per expert.
    tiles: TileCount = field(default_factory=TileCount)

    def total(
        self, mlp: Mlp, rows: Tensor, real_rows: int, layer: int, form: Form, exchange: SumExchange
    ) -> Tensor:
        """Return the layer's result `[rows, hidden]`; padding rows are zeros. `mlp` has this rank's
        units.
        """
        routing, chosen = self.router(rows, form), self.router.chosen
        of_expert = exchange.slots_of_expert(layer, self.parts)
        slots = exchange.slots(chosen * of_expert, rows)
        self._fill(slots, mlp, rows, routing.experts[:real_rows], layer, form, exchange)
        exchange.slots_filled()
        real = slots.view(chosen, of_expert, *rows.shape)[:, :, :real_rows]
        weighted = pair_sum(real) * routing.weights[:real_rows].t().unsqueeze(-1)
        total = torch.zeros_like(rows)
        total[:real_rows] = pair_sum(weighted.unsqueeze(0)).squeeze(0)
        return total

    def _fill(
        self,
        slots: Tensor,
        mlp: Mlp,
        rows: Tensor,
        experts: Tensor,
        layer: int,
        form: Form,
        exchange: SumExchange,
    ) -> None:
        """Write the results of this rank's units into the slots."""
        count, hidden = rows.shape
        chosen, flat = self.router.chosen, slots.view(-1, hidden)
        of_expert = slots.shape[0] // chosen
        # Sorted by expert, then by row.
        order = experts.flatten().argsort(stable=True)
        row, place = order // chosen, order % chosen
        numbers = torch.bincount(experts.flatten(), minlength=self.router.weight.shape[1]).tolist()
        ends = [0, *accumulate(numbers)]
        divided = exchange.own_runs(layer, self.parts, numbers)
        for piece, units in self._pieces(mlp, of_expert):
            expert = piece // of_expert
            first, last = ends[expert], ends[expert + 1]
            if first == last:
                continue
            own, first_slot = row[first:last], place[first:last] * of_expert
            if (runs := divided.get(piece)) is not None:
                if not runs:
                    continue
                taken = _rows_of(runs, last - first)
                own, first_slot = own[taken], first_slot[taken]
            tiles = rows.new_zeros(padded_rows(len(own)), hidden)
            torch.index_select(rows, 0, own, out=tiles[: len(own)])
            self.tiles.computed += len(units) * len(tiles) // TILE_ROWS
            summands = [
                mlp.down.unit(mlp.inner(tiles, at, form), at, form)[: len(own)] for at in units
            ]
            (values,) = added(steps(root(len(units)), len(units)), summands)
            flat.index_copy_(0, (first_slot + piece % of_expert) * count + own, values)

    def _pieces(self, mlp: Mlp, of_expert: int) -> Iterator[tuple[int, list[int]]]:
        """Yield this rank's experts (or parts with their own slots), with the indexes of their
        units in `mlp`.
        """
        each = self.parts // of_expert
        found: dict[int, list[int]] = {}
        for at, step in enumerate(mlp.down.order):
            found.setdefault(step.unit // each, []).append(at)
        return iter(found.items())


def _rows_of(runs: Sequence[int], count: int) -> Tensor:
    """Return the row numbers of these tiles, of `count` rows in total, in order."""
    firsts = torch.tensor(runs).unsqueeze(1) * TILE_ROWS
    found = (firsts + torch.arange(TILE_ROWS)).flatten()
    return found[found < count]
