"""The parts of a step that the most loaded rank of a layout has.

Ranks meet after the attention and after the MLP of each layer, so each of these takes as long as
its most loaded rank, layer by layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrs.sums import sum_in_order
from kvrs_engine.elastic.experts import Tiles, divided, pieces_of
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.units import Units


@dataclass(frozen=True, slots=True)
class Shares:
    """The most loaded rank's shares of a step, over all layers; 1 / n for an even layout."""

    cells: float  # Share of the cells that attention reads.
    weights: float  # Share of the weights that a step of few rows reads.
    rows: float  # Share of the products of many rows; spread heads are divided by rows.

    def factors(self, whole: "Shares") -> tuple[float, float]:
        """Return the step times of decode and prefill relative to a layout with shares `whole`."""
        return self.weights / whole.weights, self.rows / whole.rows


def shares(layout: Layout, units: Units, tiles: Tiles = ()) -> Shares:
    """Return the shares of the most loaded ranks.

    `tiles` is the load of the experts (empty: equal loads); experts with copies are divided among
    their holders.
    """
    cells = weights = rows = of_rows = 0.0
    attention = sum(units.attention_bytes)
    for stage in layout.stages:
        for layer in stage.layers:
            spread = len(layout.spread(layer))
            own = max(len(layout.heads(rank, layer)) for rank in stage.ranks)
            sizes = units.mlp_of(layer)
            chosen = tiles[layer] if tiles else ()
            mlp = max(_mlp_bytes(layout, layer, sizes, chosen).values())
            heads = len(units.attention_bytes)
            share = (own + spread / len(stage.ranks)) / heads
            cells += share
            weights += attention * (own + spread) / heads + mlp
            rows += attention * share + mlp * units.row_share(layer)
            of_rows += attention + sum(sizes) * units.row_share(layer)
    whole = units.layers * attention + units.all_mlp_bytes
    return Shares(cells / units.layers, weights / whole, rows / of_rows)


def _mlp_bytes(
    layout: Layout, layer: int, sizes: Sequence[int], chosen: Sequence[float]
) -> Mapping[int, float]:
    """Return the load of each rank of the stage in a layer's MLP, in bytes. `chosen` is the load of
    each expert; empty: equal loads.
    """
    ranks = layout.stage_at(layer).ranks
    if sum(chosen):
        mean, parts = sum_in_order(chosen) / len(chosen), len(sizes) // len(chosen)
        loads = [size * chosen[at // parts] / mean for at, size in enumerate(sizes)]
        return divided(loads, pieces_of(layout, layer, 1).holders, ranks)
    if layout.copies_of(layer):
        return divided(sizes, pieces_of(layout, layer, 1).holders, ranks)
    return {rank: sum(sizes[tile] for tile in layout.tiles(rank, layer)) for rank in ranks}
