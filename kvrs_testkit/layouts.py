"""Layouts that no instance begins with."""

from collections.abc import Sequence
from dataclasses import replace

from kvrs.errors import LayoutError
from kvrs_engine.elastic.layouts import Layout, Stage, staged, uneven
from kvrs_engine.elastic.units import Units


def even(units: Units, tp: int, pp: int = 1) -> Layout:
    """Return a layout of equal contiguous shares.

    Raises:
        LayoutError: the units cannot be divided evenly.
    """
    stages = staged(units.layers, [range(at * tp, (at + 1) * tp) for at in range(pp)])
    counts = [("KV heads", len(units.attention_bytes))]
    counts += [("tiles", len(units.mlp_of(layer))) for layer in range(units.layers)]
    for what, count in counts:
        if count % tp:
            raise LayoutError(f"tp {tp} does not divide the model's {count} {what} evenly")
    return uneven(units, stages)


def rotated(units: Units, stages: Sequence[Stage]) -> Layout:
    """Return an uneven layout whose larger shares of heads go to other ranks from layer to layer
    (RaidServe's cyclic placement).
    """
    naive = uneven(units, stages)
    attention = []
    for layer, owners in enumerate(naive.attention):
        ranks = naive.stage_at(layer).ranks
        attention.append(
            tuple(ranks[(ranks.index(owner) + layer) % len(ranks)] for owner in owners)
        )
    return replace(naive, attention=tuple(attention))
