"""The embedded engine computes what Hugging Face transformers compute."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk

pytestmark = pytest.mark.engine

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
FIRST = {"llama, tied, heads 6:3, head_dim 20", "opt, untied"}  # In `make test`.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, two layers, heads 4:2": (
        "llama",
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
        },
    ),
    "llama, tied, heads 6:3, head_dim 20": (
        "llama",
        {
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "intermediate_size": 90,
            "head_dim": 20,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "llama, biases, heads 8:1": (
        "llama",
        {
            "num_hidden_layers": 1,
            "hidden_size": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "intermediate_size": 200,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-5,
        },
    ),
    "llama, llama3 rope, heads 4:4": (
        "llama",
        {
            "num_hidden_layers": 2,
            "hidden_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 111,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "opt, two layers": (
        "opt",
        {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "ffn_dim": 256,
        },
    ),
    "opt, untied": (
        "opt",
        {
            "num_hidden_layers": 3,
            "hidden_size": 75,
            "num_attention_heads": 5,
            "ffn_dim": 99,
            "tie_word_embeddings": False,
        },
    ),
}


def write(random_model: Callable[..., Path], name: str, **more: Any) -> Path:
    family, fields = CONFIGURATIONS[name]
    spread = {"init_std" if family == "opt" else "initializer_range": 0.15}
    return random_model(
        family,
        seed=7,
        **{"vocab_size": 160, "max_position_embeddings": 512} | spread | fields | more,
    )


def ours(directory: Path, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Greedy tokens and the logits that chose them."""
    worker = Worker(directory, EngineSettings(pages=64))
    pages = range(64)
    logits = [worker.execute([Chunk(prompt, 0, pages, logits=1)])]
    token_ids: list[int] = []
    for position in range(len(prompt), len(prompt) + STEPS - 1):
        token_ids.append(int(logits[-1].argmax()))
        logits.append(worker.execute([Chunk(token_ids[-1:], position, pages, logits=1)]))
    return [*token_ids, int(logits[-1].argmax())], torch.cat(logits)


def theirs(directory: Path, prompt: list[int]) -> tuple[list[int], Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in FIRST else pytest.mark.nightly)
        for name in CONFIGURATIONS
    ],
)
def test_logits_and_greedy_tokens_equal_those_of_transformers(
    name: str, random_model: Callable[..., Path]
) -> None:
    """Exact recovery of a wrong model would be worthless."""
    directory = write(random_model, name)

    token_ids, logits = ours(directory, PROMPT)
    expected_ids, expected_logits = theirs(directory, PROMPT)

    assert token_ids == expected_ids
    assert torch.allclose(logits, expected_logits, rtol=0.0, atol=1e-4)
    assert len(set(token_ids)) >= 10, "a model that repeats itself proves little"


def test_tiny_model_equals_transformers(tiny_model: Path) -> None:
    """The generated directory can be read by transformers too."""
    token_ids, logits = ours(tiny_model, PROMPT)
    expected_ids, expected_logits = theirs(tiny_model, PROMPT)

    assert token_ids == expected_ids
    assert torch.allclose(logits, expected_logits, rtol=0.0, atol=1e-4)


def test_sharded_half_precision_weights_are_widened(random_model: Callable[..., Path]) -> None:
    """Large checkpoints come in several bfloat16 files; the CPU computes in float32."""
    directory = write(
        random_model, "llama, two layers, heads 4:2", max_shard_size="100KB", dtype="bfloat16"
    )
    to_bfloat16(directory)

    token_ids, logits = ours(directory, PROMPT)
    expected_ids, expected_logits = theirs(directory, PROMPT)

    assert len(list(directory.glob("*.safetensors"))) > 1
    assert token_ids == expected_ids
    assert torch.allclose(logits, expected_logits, rtol=0.0, atol=1e-4)


def test_a_checkpoint_of_opt_without_its_head_is_read_too(
    random_model: Callable[..., Path],
) -> None:
    """Some were saved as the bare decoder: other names, and the head is the embeddings anyway."""
    from safetensors.torch import load_file, save_file

    directory = write(random_model, "opt, two layers")
    _, expected = ours(directory, PROMPT)
    weights = load_file(directory / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in weights.items()},
        directory / "model.safetensors",
    )

    _, logits = ours(directory, PROMPT)

    assert torch.equal(logits, expected)


def to_bfloat16(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in directory.glob("*.safetensors"):
        save_file(
            {name: tensor.bfloat16() for name, tensor in load_file(path).items()},
            path,
            metadata={"format": "pt"},
        )
