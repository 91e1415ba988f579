"""The loss of ranks that have experts: bytes with copies of popular experts and without, and with
experts that are split.

Experts are taken to be chosen by Zipf's law, in an order that differs from layer to layer. Owners,
copies and what a loss leaves are the engine's (`kvrs_engine.elastic`). Attention is left out.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvrs_engine.elastic import on_demand
from kvrs_engine.elastic.experts import Tiles, rebalance, skew
from kvrs_engine.elastic.layouts import Layout, staged, uneven
from kvrs_engine.elastic.moving import LinkRates, schedule
from kvrs_engine.elastic.plans import plan
from kvrs_engine.elastic.shapes import ModelShape
from kvrs_engine.elastic.units import UnitKind, Units

_TILES = 1e6  # Of the most popular expert of a layer: only ratios count.


def explain_experts(
    shape: ModelShape, tp: int, lost: int, rates: LinkRates, *, zipf: float, room_share: float
) -> dict[str, Any]:
    """Sizes of the experts, and a row for each way to have them. `zipf`: the exponent.
    `room_share`: memory of a rank for copies, as a part of that of its own weights.

    Raises:
        LayoutError: the model cannot be divided so.
    """
    units = shape.expert_units()
    tiles = [
        [
            _TILES * (1 + (expert + layer) % shape.experts) ** -zipf
            for expert in range(shape.experts)
        ]
        for layer in range(units.layers)
    ]
    whole = uneven(units, staged(units.layers, [range(tp)]))
    room = {rank: int(room_share * whole.weight_bytes(rank, units)) for rank in whole.ranks}
    copied = rebalance(whole, units, tiles, room).layout
    layouts = [("whole", whole), ("whole, with copies", copied)]
    if units.expert_parts > 1:
        layouts.append(("split", uneven(units, whole.stages, split=True)))
    dead = whole.ranks[tp - lost :]
    return {
        "count": shape.experts,
        "parts": units.expert_parts,
        "expert_bytes": sum(units.mlp_bytes) // shape.experts,  # Of one layer.
        "ways": [
            {"layout": name} | _cost(layout, dead, units, tiles, rates) for name, layout in layouts
        ],
    }


def _cost(
    before: Layout, dead: Sequence[int], units: Units, tiles: Tiles, rates: LinkRates
) -> dict[str, Any]:
    survivors = on_demand.survivors(before, dead)
    after = on_demand.reshaped(before, units, survivors, spread=False)
    found = plan(before, after, units, dead)
    moves = tuple(move for move in found.moves if move.unit.kind is UnitKind.MLP)
    found = replace(found, moves=moves)
    return {
        "copies": sum(map(len, before.copies)),  # Of parts, on all ranks.
        "copy_bytes": _copy_bytes(before, units),
        "host_bytes": found.host_bytes,
        "peer_bytes": found.peer_bytes,
        "moving_s": schedule(found, rates).makespan_s,
        "skew": skew(before, units, tiles),
        "skew_after": skew(after, units, tiles),
    }


def _copy_bytes(layout: Layout, units: Units) -> int:
    return sum(units.mlp_bytes[place] for own in layout.copies for place, _ in own)
