"""Tokens per second of an instance by the layout of its ranks (RaidServe, figure 9): step times of
profiles, carried to the layouts by `experiments/step_times.py`.
"""

from dataclasses import dataclass, replace

from experiments.model_shapes import SHAPES, ModelShape
from experiments.step_times import Degree, Speed
from kvrs.profiles import catalog
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.speed import shares
from kvrs_engine.elastic.units import Units

GPU_BYTES = int(80e9 * 0.9)
# Means of the paper's table 1 (OpenThoughts).
INPUT_TOKENS, OUTPUT_TOKENS = 422, 7295


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    units: Units
    speed: Speed
    token_bytes: int


def _degree(name: str, tp: int) -> Degree:
    label = f"{name}-tp{tp}"
    return Degree(tp, catalog.decode_table(label), catalog.prefill_table(label))


def _paired(shape: ModelShape) -> Units:
    """Two layers as one, and two tiles: there are fewer to plan. Experts are not merged: with all
    their tiles of a place as one unit the fullest of seven ranks would have a tenth more than its
    share.
    """
    units = shape.units()
    tiles = units.mlp_bytes
    return replace(
        units,
        layers=units.layers // 2,
        attention_bytes=tuple(2 * size for size in units.attention_bytes),
        mlp_bytes=tuple(
            2 * (one + other) for one, other in zip(tiles[::2], tiles[1::2], strict=True)
        ),
    )


def models() -> list[Model]:
    llama, mixtral = "llama-3.1-70b-h100-vllm", "mixtral-8x22b-h100-vllm"
    return [
        Model(
            "Llama-3.1-70B",
            SHAPES["meta-llama/Llama-3.1-70B"].units(),
            Speed(_degree(llama, 8), _degree(llama, 4)),
            catalog.kv_geometry(f"{llama}-tp8").bytes_per_token,
        ),
        Model(
            "Mixtral-8x22B",
            _paired(SHAPES["mistralai/Mixtral-8x22B-v0.1"]),
            Speed(_degree(mixtral, 8)),
            catalog.kv_geometry(f"{mixtral}-tp8").bytes_per_token,
        ),
    ]


def room_tokens(model: Model, layout: Layout) -> float:
    """Tokens of context for which the fullest rank has memory."""
    token_cell = model.token_bytes / (model.units.layers * len(model.units.attention_bytes))
    return min(
        (GPU_BYTES - layout.weight_bytes(rank, model.units))
        / (layout.cells_per_page(rank) * token_cell)
        for rank in layout.ranks
    )


def tokens_per_s(model: Model, layout: Layout, most: int) -> float:
    """Output tokens per second with as many sequences as the fullest rank has memory for, and at
    most so many.
    """
    own = shares(layout, model.units)
    context = INPUT_TOKENS + OUTPUT_TOKENS / 2
    batch = min(int(room_tokens(model, layout) / context), most)
    if batch < 1:
        return 0.0
    step_s = model.speed.decode_s(own, batch, int(batch * context))
    a_request_s = OUTPUT_TOKENS * step_s / batch + model.speed.prefill_s(own, INPUT_TOKENS)
    return OUTPUT_TOKENS / a_request_s
