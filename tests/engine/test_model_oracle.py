"""The embedded engine computes what Hugging Face transformers compute."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrs.engine.config import EngineSettings
from kvrs.engine.worker import Worker
from kvrs.scheduling.chunks import Chunk

STEPS = 200
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "two layers, heads 4:2": {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
    },
    "tied, heads 6:3, head_dim 20": {
        "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 90,
        "head_dim": 20, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "biases, heads 8:1": {
        "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 200,
        "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-5,
    },
    "llama3 rope, heads 4:4": {
        "num_hidden_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 111,
        "rope_parameters": LLAMA3_ROPE,
    },
    "linear rope, heads 9:3, head_dim 12": {
        "num_hidden_layers": 4, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 160,
        "head_dim": 12, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
}  # fmt: skip


def ours(directory: Path, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Greedy tokens and the logits that chose them."""
    worker = Worker(directory, EngineSettings(pages=64))
    pages = range(64)
    logits = [worker.execute([Chunk(prompt, 0, pages, wants_logits=True)])]
    token_ids: list[int] = []
    for position in range(len(prompt), len(prompt) + STEPS - 1):
        token_ids.append(int(logits[-1].argmax()))
        logits.append(worker.execute([Chunk(token_ids[-1:], position, pages, wants_logits=True)]))
    return [*token_ids, int(logits[-1].argmax())], torch.cat(logits)


def theirs(directory: Path, prompt: list[int]) -> tuple[list[int], Tensor]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    logits: list[Tensor] = []
    token_ids: list[int] = []
    step, cache = torch.tensor([prompt]), None
    with torch.inference_mode():
        for _ in range(STEPS):
            answer = model(step, past_key_values=cache, use_cache=True)
            cache = answer.past_key_values
            logits.append(answer.logits[:, -1])
            token_ids.append(int(logits[-1].argmax()))
            step = torch.tensor([token_ids[-1:]])
    return token_ids, torch.cat(logits)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name: str, random_llama: Callable[..., Path]) -> None:
    """Exact recovery of a wrong model would be worthless."""
    common = {"vocab_size": 160, "max_position_embeddings": 512, "initializer_range": 0.15}
    directory = random_llama(seed=7, **common, **CONFIGURATIONS[name])

    token_ids, logits = ours(directory, PROMPT)
    expected_ids, expected_logits = theirs(directory, PROMPT)

    assert token_ids == expected_ids
    assert torch.allclose(logits, expected_logits, rtol=0.0, atol=1e-4)
    assert len(set(token_ids)) >= 10, "a model that repeats itself proves little"


def test_tiny_model_equals_transformers(tiny_model: Path) -> None:
    """The generated directory is one that everybody else can read too."""
    token_ids, logits = ours(tiny_model, PROMPT)
    expected_ids, expected_logits = theirs(tiny_model, PROMPT)

    assert token_ids == expected_ids
    assert torch.allclose(logits, expected_logits, rtol=0.0, atol=1e-4)


def test_sharded_half_precision_weights_are_widened(random_llama: Callable[..., Path]) -> None:
    """Large checkpoints come in several bfloat16 files; the CPU computes in float32."""
    fields = CONFIGURATIONS["two layers, heads 4:2"] | {"vocab_size": 160, "initializer_range": 0.15}
    directory = random_llama(seed=7, max_shard_size="100KB", dtype="bfloat16", **fields)
    to_bfloat16(directory)

    token_ids, logits = ours(directory, PROMPT)
    expected_ids, expected_logits = theirs(directory, PROMPT)

    assert len(list(directory.glob("*.safetensors"))) > 1
    assert token_ids == expected_ids
    assert torch.allclose(logits, expected_logits, rtol=0.0, atol=1e-4)


def to_bfloat16(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in directory.glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
