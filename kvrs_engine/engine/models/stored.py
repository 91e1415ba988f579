"""Names of a model's tensors in checkpoints, and the part of each tensor that a unit has."""

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from kvrs_engine.elastic.units import Unit, UnitKind
from kvrs_engine.engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a family's tensors. All names but the LM head's begin with `trunk`."""

    trunk: str
    final_norm: str
    attention_norm: str
    output: str
    mlp_norm: str
    up: tuple[str, ...]  # The gate first, if the MLP has one.
    down: str
    # Layers with experts: the router, the prefix of an expert's number, and an expert's matrices.
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    expert_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"


_LLAMA = Names(
    trunk="model",
    final_norm="norm",
    attention_norm="input_layernorm",
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)
_MIXTRAL = replace(
    _LLAMA,
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert_up=("w1", "w3"),
    expert_down="w2",
)
_OPT = Names(
    trunk="model.decoder",
    final_norm="final_layer_norm",
    attention_norm="self_attn_layer_norm",
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
)


class NamedTensors(Protocol):
    """Tensors by name, of the shape that is asked for."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...


def names_of(config: ModelConfig, weights: NamedTensors) -> Names:
    names = {"opt": _OPT, "mixtral": _MIXTRAL}.get(config.family, _LLAMA)
    # Some OPT checkpoints were saved without the LM head, and their names lack the first prefix.
    short = replace(names, trunk=names.trunk.removeprefix("model."))
    return short if f"{short.trunk}.embed_tokens.weight" in weights else names


@dataclass(frozen=True, slots=True)
class StoredUnit:
    """The names of a unit's tensors in checkpoints, and the unit's parts of them."""

    first: list[tuple[str, int, range]]  # First matrices: name, number of rows, own rows.
    width: int  # Width of the first matrices.
    has_bias: bool
    second: tuple[str, int, range] | None  # Name, number of columns, own columns.


def stored_of(config: ModelConfig, names: Names, unit: Unit) -> StoredUnit:
    prefix, grain = f"{names.trunk}.layers.{unit.layer}", config.grain
    match unit.kind:
        case UnitKind.ATTENTION:
            width, heads = config.head_dim, grain.attention[unit.place]
            queries = range(heads.start * width, heads.stop * width)
            key = range(unit.place * width, (unit.place + 1) * width)
            all_keys, all_queries = config.kv_heads * width, config.heads * width
            attention = f"{prefix}.self_attn"
            first = [(f"{attention}.q_proj", all_queries, queries)]
            first += [(f"{attention}.{one}_proj", all_keys, key) for one in "kv"]
            output = (f"{prefix}.{names.output}", all_queries, queries)
            return StoredUnit(first, config.hidden, config.qkv_bias, output)
        case UnitKind.MLP:
            tiles, up, down = grain.mlp_of(unit.layer), names.up, names.down
            if config.has_experts(unit.layer):
                prefix = f"{prefix}.{names.experts}.{unit.place // grain.expert_parts}"
                up, down = names.expert_up, names.expert_down
            tile, size = tiles[unit.place], tiles[-1].stop
            first = [(f"{prefix}.{name}", size, tile) for name in up]
            second = (f"{prefix}.{down}", size, tile)
            return StoredUnit(first, config.hidden, config.mlp_bias, second)
        case UnitKind.VOCABULARY:
            name = f"{names.trunk}.embed_tokens" if config.tied_embeddings else "lm_head"
            tile = grain.vocabulary[unit.place]
            return StoredUnit([(name, config.vocab, tile)], config.hidden, False, None)
        case UnitKind.COMMON:
            raise AssertionError(f"{unit} has no block of weights")
