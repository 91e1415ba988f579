"""Weights in an arena have the bits of those that were loaded."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.arena import Arena
from kvrs_engine.engine.models.digests import units_root
from kvrs_engine.engine.models.loading import read_decoder, skeleton, with_rotary
from kvrs_engine.engine.models.weights import Weights

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 211},
    "tied": {"hidden_size": 128, "intermediate_size": 101, "num_attention_heads": 4}
    | {"num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 211}
    | {"tie_word_embeddings": True},
    "opt": {"hidden_size": 96, "ffn_dim": 200, "num_attention_heads": 3, "num_hidden_layers": 2}
    | {"vocab_size": 97, "max_position_embeddings": 64},
    "mixtral": {"hidden_size": 64, "intermediate_size": 2070, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 211}
    | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {"hidden_size": 64, "intermediate_size": 140, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 211, "head_dim": 16}
    | {"num_experts": 5, "moe_intermediate_size": 40, "mlp_only_layers": [0]}
    | {"num_experts_per_tok": 2},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_decoder_from_an_arena_has_the_weights_that_were_written(
    random_model: Callable[..., Path], name: str
) -> None:
    """All units and what is outside of them, for every family that is put together differently."""
    family = "llama" if name == "tied" else name
    directory = random_model(family, **FAMILIES[name])
    config, weights = ModelConfig.from_directory(directory), Weights(directory)
    loaded = read_decoder(config, weights, 32, torch.device("cpu"))
    root = units_root(loaded)
    arena = Arena(skeleton(config))
    memory = torch.zeros(arena.size_bytes, dtype=torch.uint8)

    arena.write(memory, loaded, root)
    attached = with_rotary(arena.decoder(memory), config, 32)

    assert arena.root(memory) == root == units_root(attached)
    assert arena.is_whole(memory)
    assert attached.embedding is not None
    assert attached.head is not None
    inside = range(memory.data_ptr(), memory.data_ptr() + arena.size_bytes)
    assert attached.embedding.tokens.data_ptr() in inside
    assert all(weight.data_ptr() in inside for weight in attached.head.weights)
    assert (attached.rotary is None) == (loaded.rotary is None)
    if loaded.rotary is not None and attached.rotary is not None:
        positions = torch.arange(32)
        ours, theirs = attached.rotary.at(positions), loaded.rotary.at(positions)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_tied_embeddings_lie_in_an_arena_once(random_model: Callable[..., Path]) -> None:
    directory = random_model("llama", **FAMILIES["tied"])
    config = ModelConfig.from_directory(directory)
    loaded = read_decoder(config, Weights(directory), 32, torch.device("cpu"))
    arena = Arena(skeleton(config))
    memory = torch.zeros(arena.size_bytes, dtype=torch.uint8)
    arena.write(memory, loaded, bytes(32))

    attached = arena.decoder(memory)

    assert attached.embedding is not None
    assert attached.head is not None
    assert attached.head.matrix.data_ptr() == attached.embedding.tokens.data_ptr()


def test_a_changed_byte_is_found(random_model: Callable[..., Path]) -> None:
    """In a tensor by its digest, in the header by its seal."""
    directory = random_model("llama", **FAMILIES["llama"])
    config = ModelConfig.from_directory(directory)
    loaded = read_decoder(config, Weights(directory), 32, torch.device("cpu"))
    arena = Arena(skeleton(config))
    memory = torch.zeros(arena.size_bytes, dtype=torch.uint8)
    arena.write(memory, loaded, bytes(32))

    memory[-4096] ^= 1
    assert not arena.is_whole(memory)
    assert arena.root(memory) == bytes(32)
    memory[20] ^= 1
    assert arena.root(memory) is None


@pytest.mark.process
def test_shapes_need_no_compiler(random_model: Callable[..., Path]) -> None:
    """Torch's compiler would take a second of a process that attaches weights, and 100 MB."""
    directory = random_model("qwen3_moe", **FAMILIES["qwen3_moe"])
    program = (
        "import sys, pathlib\n"
        "from kvrs_engine.engine.model_config import ModelConfig\n"
        "from kvrs_engine.engine.models.loading import skeleton\n"
        "skeleton(ModelConfig.from_directory(pathlib.Path(sys.argv[1])))\n"
        "print('torch._dynamo' in sys.modules, 'sympy' in sys.modules)"
    )

    run = [sys.executable, "-c", program, str(directory)]
    shown = subprocess.run(run, capture_output=True, text=True, check=True).stdout

    assert shown.split() == ["False", "False"]
