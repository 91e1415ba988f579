"""The predicted step times of a layout, from tables of the same model at one or two even degrees.

A step has a constant part (launches, exchanges) and two parts that scale with the ranks: attention
over cached tokens, and the rest. Ranks wait for each other after the attention and after the MLP of
each layer, so each part takes the time of its most loaded rank. Two degrees determine the constant;
with one degree the constant is assumed to be 0. With tables of OPT-66B on A100 the step of degree 3
is predicted within 4 % from degrees 2 and 4, and within 8.1 % from degree 2 alone (2026-11-23).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrs.sums import sum_in_order
from kvrs_engine.elastic.experts import Tiles, divided, pieces_of
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.units import Units


class StepTable(Protocol):
    def seconds_for(self, batch: int, context_tokens: int) -> float: ...


class PromptTable(Protocol):
    def seconds_for(self, tokens: int) -> float: ...


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


@dataclass(frozen=True, slots=True)
class Degree:
    """The tables of an even tensor parallel degree."""

    ranks: int
    decode: StepTable
    prefill: PromptTable


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicts step times. `near` is the degree closest to the layouts in question; `far`, another
    degree, determines the constant part.
    """

    near: Degree
    far: Degree | None = None

    def decode_s(self, own: Shares, batch: int, context_tokens: int) -> float:
        """Return the time of a decode step of `batch` sequences with `context_tokens` in total."""

        def cached_s(degree: Degree) -> float:
            table = degree.decode
            return max(0.0, table.seconds_for(batch, context_tokens) - other_s(degree))

        def other_s(degree: Degree) -> float:
            # The time of a step with a context of one token per sequence.
            return degree.decode.seconds_for(batch, min(batch, context_tokens))

        near = self.near
        shrinking_s, constant_s = self._divided(other_s)
        # Reading cells scales fully with the ranks; its constant part is in `constant_s`.
        return constant_s + shrinking_s * own.weights + cached_s(near) * near.ranks * own.cells

    def prefill_s(self, own: Shares, tokens: int) -> float:
        shrinking_s, constant_s = self._divided(lambda degree: degree.prefill.seconds_for(tokens))
        return constant_s + shrinking_s * own.rows

    def _divided(self, step_s: Callable[[Degree], float]) -> tuple[float, float]:
        """Return the scaling part of a step, as time on one rank, and the constant part."""
        near, far = self.near, self.far
        near_s = step_s(near)
        if far is None:
            return near_s * near.ranks, 0.0
        shared_s = (near_s - step_s(far)) / (1 / near.ranks - 1 / far.ranks)
        shared_s = min(max(shared_s, 0.0), near_s * near.ranks)  # Neither part is negative.
        return shared_s, near_s - shared_s / near.ranks
