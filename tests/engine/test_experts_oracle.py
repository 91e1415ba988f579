"""Mixtures of experts are computed as Hugging Face transformers compute them, whatever their
sizes.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.random_experts import ExpertsModel, write_experts_model

pytestmark = pytest.mark.engine

PROMPT_TOKENS, STEPS = 24, 60
VOCAB = 160
NARROW = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, 8 experts": (
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 90},
    ),
    "mixtral, experts of 2 parts, heads of their own size": (
        "mixtral",
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "intermediate_size": 2090,
            "head_dim": 14,
        },
    ),
    "mixtral, all experts of each row, tied": (
        "mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "intermediate_size": 64,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe, weights as they are": (
        "qwen3_moe",
        {
            "num_experts": 16,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "head_dim": 16,
        },
    ),
    "qwen3_moe, renormalised, biases, dense layers among the others": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "intermediate_size": 130,
            "norm_topk_prob": True,
            "attention_bias": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_hidden_layers": 6,
        },
    ),
}


def drawn(choose: random.Random) -> tuple[str, dict[str, Any]]:
    """A small configuration."""
    family = choose.choice(["mixtral", "qwen3_moe"])
    kv_heads, shared = choose.randint(1, 3), choose.randint(1, 3)
    count = choose.randint(1, 24)
    layers = choose.randint(1, 4)
    fields: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": choose.randint(3, 12) * kv_heads * shared * 2,
        "num_attention_heads": kv_heads * shared,
        "num_key_value_heads": kv_heads,
        "intermediate_size": choose.randint(20, 300),
        "num_local_experts": count,
        "num_experts_per_tok": choose.randint(1, min(8, count)),
        "head_dim": choose.choice([12, 14, 16, 20, 24]),
        "tie_word_embeddings": choose.random() < 0.3,
    }
    if family == "qwen3_moe":
        fields |= {
            "moe_intermediate_size": choose.randint(8, 120),
            "norm_topk_prob": choose.random() < 0.5,
            "decoder_sparse_step": choose.choice([1, 1, 2]),
            "mlp_only_layers": [at for at in range(layers) if choose.random() < 0.2],
        }
    return family, fields


def compared(directory: Path, prompt: list[int]) -> tuple[list[int], Tensor, Tensor]:
    """Our greedy tokens, our logits of each step, and those of transformers behind the same
    tokens.
    """
    from transformers import AutoModelForCausalLM

    worker, pages = Worker(directory, EngineSettings(pages=64)), range(64)
    logits = [worker.execute([Chunk(prompt, 0, pages, logits=1)])]
    token_ids = [*prompt, int(logits[0].argmax())]
    for position in range(len(prompt), len(prompt) + STEPS - 1):
        logits.append(worker.execute([Chunk(token_ids[-1:], position, pages, logits=1)]))
        token_ids.append(int(logits[-1].argmax()))
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    return token_ids[len(prompt) :], torch.cat(logits), expected


def check(directory: Path, prompt: list[int], *, varied: bool = True) -> None:
    token_ids, logits, expected = compared(directory, prompt)

    assert torch.allclose(logits, expected, rtol=0.0, atol=2e-4)
    chosen = expected.gather(1, torch.tensor(token_ids).unsqueeze(1)).squeeze(1)
    assert float((expected.amax(1) - chosen).max()) <= 1e-3
    assert not varied or len(set(token_ids)) >= 10, "a model that repeats itself proves little"


def written(random_model: Callable[..., Path], family: str, seed: int, fields: Any) -> Path:
    common = {"vocab_size": VOCAB, "max_position_embeddings": 512, "initializer_range": 0.15}
    return random_model(family, seed=seed, **{"num_hidden_layers": 2} | common | fields)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    name: str, random_model: Callable[..., Path]
) -> None:
    """Routers, renormalised or not, dense layers among the others, wide experts in parts."""
    family, fields = CONFIGURATIONS[name]
    prompt = random.Random(name).choices(range(VOCAB), k=PROMPT_TOKENS)

    check(written(random_model, family, 5, NARROW | fields), prompt)


@pytest.mark.parametrize("seed", range(12))
def test_configurations_drawn_at_random_are_computed_so_too(
    seed: int, random_model: Callable[..., Path]
) -> None:
    """Odd sizes, one expert, a single head: what somebody else's checkpoint may have."""
    choose = random.Random(seed)
    family, fields = drawn(choose)
    prompt = choose.choices(range(VOCAB), k=PROMPT_TOKENS)

    check(written(random_model, family, seed, fields), prompt, varied=False)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_generated_models_can_be_read_by_transformers(family: str, tmp_path: Path) -> None:
    """Names and fields are those of the family."""
    model = ExpertsModel.tiny(family, skew=1.0)
    write_experts_model(tmp_path / "model", model, seed=0)

    check(tmp_path / "model", random.Random(0).choices(range(VOCAB), k=PROMPT_TOKENS))
