"""Estimated prefill times of an unmeasured model, from its size and the name of its GPUs.

A prefill of `n` tokens takes `STEP_S + (2 * a * n + 2 * d * n * n) / (g * f)`: two operations for
each token and each of the `a` parameters that compute it (Kaplan et al. 2020, section 2.1), and
causal attention with `d = layers * heads * head_dim`, on `g` GPUs of `f` operations per second. `g`
is that of the engine, or else as few GPUs as hold the weights; `f` is about half of the GPU's peak,
or `FLOPS` for an unknown one. How far off it is: `experiments/decisions/guesses.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import MeasuredPrefill

# Operations per second of a GPU of unknown name: half of an A100's peak in 16 bits.
FLOPS = 1.5e14
# Peaks of dense BF16 on tensor cores in 1e12 operations per second, by the vendors' data sheets
# (half of the figure, where that is with sparsity), by words of the name in NVML; special variants
# come first. SXM where the name does not tell.
_PEAKS = (
    ("H100 PCIe", 756),
    ("H100 NVL", 835),
    ("H200 NVL", 835),
    ("A10", 125),
    ("A30", 165),
    ("A40", 150),
    ("A100", 312),
    ("A800", 312),
    ("L4", 121),
    ("L40", 181),
    ("L40S", 362),
    ("H20", 148),
    ("H100", 989),
    ("H800", 989),
    ("H200", 989),
    ("GH200", 989),
    ("B100", 1750),
    ("B200", 2250),
    ("GB200", 2500),
    ("MI300X", 1307),
    ("MI325X", 1307),
)
_SHARE_OF_PEAK = FLOPS / 312e12  # The same for all GPUs as for an A100.
_PARTITION = "mig"  # Word in the name of a part of a GPU, whose size the name does not tell.
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


def flops_of(gpu: str) -> float | None:
    """Return the operations per second that prefills reach on a GPU of this name; None: unknown."""
    words = set(re.findall("[a-z0-9]+", gpu.lower()))
    if _PARTITION in words:
        return None
    found = (peak for name, peak in _PEAKS if words.issuperset(name.lower().split()))
    peak = next(found, None)
    return None if peak is None else 1e12 * peak * _SHARE_OF_PEAK


def guessed_prefill(size: ModelSize | None, gpu: str = "", gpus: int = 0) -> MeasuredPrefill:
    """Return the estimated prefill times in the form of an instance's own measurement. `size` None:
    unknown, so that of `USUAL`; `gpu`: the name of the GPUs, of which it has `gpus` (0: unknown).
    """
    size = size or USUAL
    if not gpus:
        gpus = 1
        while 2 * size.parameters > gpus * _WEIGHT_BYTES_OF_GPU:
            gpus *= 2
    lengths = range(0, (_STEPS + 1) * _STEP_TOKENS, _STEP_TOKENS)
    seconds = [
        STEP_S + (2 * size.active * n + 2 * size.attention * n * n) / (gpus * FLOPS)
        for n in lengths
    ]
    guess = MeasuredPrefill(_LABEL, _STEP_TOKENS, seconds, covered_tokens=0, is_guess=True)
    return on_gpu(guess, gpu)


def on_gpu(guess: MeasuredPrefill, gpu: str) -> MeasuredPrefill:
    """Return the guess for GPUs of this name. One that has a name already, and one for an unknown
    name, stay as they are.
    """
    flops = flops_of(gpu)
    if flops is None or guess.label != _LABEL:
        return guess
    seconds = [STEP_S + (each - STEP_S) * FLOPS / flops for each in guess.seconds]
    return msgspec.structs.replace(guess, label=f"{_LABEL}, {gpu}", seconds=seconds)


def guessed_table(size: ModelSize | None, gpu: str = "", gpus: int = 0) -> PrefillTable:
    return PrefillTable.from_measured(guessed_prefill(size, gpu, gpus))


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
