"""Random Llamas for experiments in which the size of weights matters."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvrs_engine.engine.random_model import write_tiny_model

HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 1024, 16, 64, 4096, 512


def write_large(directory: Path, seed: int) -> None:
    """1.01 GB in float32."""
    write_random_llama(directory, seed, layers=16, kv_heads=4)


def write_random_llama(directory: Path, seed: int, *, layers: int, kv_heads: int) -> None:
    """With the tokenizer of the tiny model; bfloat16 in its file."""
    write_tiny_model(directory, seed)
    shape = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "torch_dtype": "bfloat16",
        "intermediate_size": INTERMEDIATE,
    }
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | shape))
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 0.05) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale).bfloat16()

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    weights = {"model.norm.weight": ones.clone(), "lm_head.weight": matrix(VOCAB, HIDDEN)}
    weights["model.embed_tokens.weight"] = matrix(VOCAB, HIDDEN, 1.0)
    wide, narrow = HEADS * HEAD_DIM, kv_heads * HEAD_DIM
    shapes = {
        "self_attn.q_proj": (wide, HIDDEN),
        "self_attn.k_proj": (narrow, HIDDEN),
        "self_attn.v_proj": (narrow, HIDDEN),
        "self_attn.o_proj": (HIDDEN, wide),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for layer in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = ones.clone()
        for name, (rows, columns) in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(rows, columns)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
