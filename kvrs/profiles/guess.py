"""Estimated prefill times of an unmeasured model, from its size, on mid-range GPUs.

A prefill of `n` tokens takes `STEP_S + (2 * a * n + 2 * d * n * n) / (g * FLOPS)`: two operations
for each token and each of the `a` parameters that compute it (Kaplan et al. 2020, section 2.1), and
causal attention with `d = layers * heads * head_dim`, on the `g` GPUs that hold the weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import MeasuredPrefill

# Operations per second of one GPU: half of an A100's peak in 16 bits. An L40S reaches as much, an
# H100 three times as much.
FLOPS = 1.5e14
STEP_S = 0.01
# Bytes of weights per GPU, which determine the number of GPUs: they fit on 80 GB beside the KV.
_WEIGHT_BYTES_OF_GPU = 5e10
_STEP_TOKENS, _STEPS = 1024, 16
_LABEL = "guess"


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The parts of a model's size that determine its prefill time."""

    parameters: float  # Number of all parameters, which determines the number of GPUs.
    # Number of parameters that each token passes: no embeddings, and only chosen experts.
    active: float
    attention: int  # Number of layers times the width of the attention heads together.


# Llama-3.1-8B, for a model of unknown size.
USUAL = ModelSize(8.0e9, 7.0e9, 32 * 4096)


def size_of(config: Mapping[str, Any]) -> ModelSize | None:
    """Return the size of a model by the fields of its `config.json`; None: the fields do not tell
    it.
    """
    fields = {**config, **_section(config.get("text_config"))}
    width, layers = _number(fields, "hidden_size"), _number(fields, "num_hidden_layers")
    heads = _number(fields, "num_attention_heads")
    if not (width and layers and heads):
        return None
    head_dim = _number(fields, "head_dim") or width // heads
    kv_heads = _number(fields, "num_key_value_heads") or heads
    # Parameters of a layer's projections of queries, keys, values and output.
    attention = 2 * width * head_dim * (heads + kv_heads)
    inner = _number(fields, "intermediate_size", "ffn_dim") or 4 * width
    # Gated layers have three matrices; older models have `ffn_dim` or no field, and two matrices.
    matrices = 3 if fields.get("intermediate_size") else 2
    experts = _number(fields, "num_local_experts", "num_experts", "n_routed_experts")
    stored = active = matrices * width * inner
    if experts:
        expert = matrices * width * (_number(fields, "moe_intermediate_size") or inner)
        shared = _number(fields, "n_shared_experts")
        chosen = min(experts, _number(fields, "num_experts_per_tok") or experts)
        stored, active = (experts + shared) * expert, (chosen + shared) * expert
    embeddings = _number(fields, "vocab_size") * width
    embeddings *= 1 if fields.get("tie_word_embeddings") else 2
    return ModelSize(
        float(layers * (attention + stored) + embeddings),
        float(layers * (attention + active)),
        layers * heads * head_dim,
    )


def guessed_prefill(size: ModelSize | None) -> MeasuredPrefill:
    """Return the estimated prefill times in the form of an instance's own measurement. `size` None:
    unknown, so that of `USUAL`.
    """
    size = size or USUAL
    gpus = 1
    while 2 * size.parameters > gpus * _WEIGHT_BYTES_OF_GPU:
        gpus *= 2
    lengths = range(0, (_STEPS + 1) * _STEP_TOKENS, _STEP_TOKENS)
    seconds = [
        STEP_S + (2 * size.active * n + 2 * size.attention * n * n) / (gpus * FLOPS)
        for n in lengths
    ]
    return MeasuredPrefill(_LABEL, _STEP_TOKENS, seconds, covered_tokens=0, is_guess=True)


def guessed_table(size: ModelSize | None) -> PrefillTable:
    return PrefillTable.from_measured(guessed_prefill(size))


def _section(found: object) -> Mapping[str, Any]:
    """Return `found` if it is a section of the config; otherwise an empty section."""
    return found if isinstance(found, Mapping) else {}


def _number(fields: Mapping[str, Any], *names: str) -> int:
    """Return the first of these fields that is a positive whole number; 0: none is."""
    for name in names:
        value = fields.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return 0
