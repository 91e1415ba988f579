"""Random models, of every family and with every kind of part, of several units each."""

from pathlib import Path
from typing import Any

import pytest
import torch

# Of each model its family, its tokens per page and its configuration.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama, 8 query heads of 4 KV heads, 4 tiles": (
        "llama",
        16,
        {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "intermediate_size": 256,
            "vocab_size": 512,
        },
    ),
    "llama, odd sizes, biases, 2 ragged tiles": (
        "llama",
        4,
        {
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 20,
            "intermediate_size": 131,
            "attention_bias": True,
            "mlp_bias": True,
            "vocab_size": 300,
        },
    ),
    "llama, 1 KV head, 1 tile": (
        "llama",
        32,
        {
            "hidden_size": 70,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "intermediate_size": 101,
            "vocab_size": 97,
        },
    ),
    "llama, 5 KV heads, 8 tiles": (
        "llama",
        8,
        {
            "hidden_size": 60,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "head_dim": 14,
            "intermediate_size": 560,
            "vocab_size": 600,
        },
    ),
    "opt, 5 KV heads, 4 tiles": (
        "opt",
        16,
        {"hidden_size": 65, "num_attention_heads": 5, "ffn_dim": 260, "vocab_size": 270},
    ),
    "opt, 16 tiles": (
        "opt",
        16,
        {
            "hidden_size": 72,
            "num_attention_heads": 6,
            "ffn_dim": 1040,
            "vocab_size": 512,
        },
    ),
}
LAYERS = 4
# Of these some layers are computed by experts, to which each row goes on its own.
EXPERTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mixtral, 5 experts of 2 parts": (
        "mixtral",
        16,
        {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "intermediate_size": 2100,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "vocab_size": 512,
        },
    ),
    "qwen3_moe, 12 experts, a dense layer of 4 tiles": (
        "qwen3_moe",
        8,
        {
            "hidden_size": 60,
            "num_attention_heads": 10,
            "num_key_value_heads": 5,
            "head_dim": 14,
            "intermediate_size": 270,
            "moe_intermediate_size": 48,
            "num_experts": 12,
            "num_experts_per_tok": 5,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "vocab_size": 600,
        },
    ),
}


def write_model(name: str, directory: Path, seed: int) -> int:
    """Write a Hugging Face directory; return its tokens per page."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, page_size_tokens, fields = {**MODELS, **EXPERTS}[name]
    spread = {"init_std": 0.2} if family == "opt" else {"initializer_range": 0.2}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, num_hidden_layers=LAYERS, **spread, **fields)
    model = AutoModelForCausalLM.from_config(config)
    for parameter, weight in model.named_parameters():
        # Freshly made biases and norms are zeros and ones, which would hide them.
        if parameter.endswith("bias") or "norm" in parameter:
            mean = 0.0 if parameter.endswith("bias") else 1.0
            torch.nn.init.normal_(weight, mean=mean, std=0.2)
    model.save_pretrained(directory)
    return page_size_tokens


def first_or_nightly(*first: str) -> list[Any]:
    """All models as parameters of a test; `make test` has those named."""
    names = [*MODELS, *EXPERTS]
    assert set(first) <= set(names)
    return [
        pytest.param(name, marks=[] if name in first else pytest.mark.nightly) for name in names
    ]
