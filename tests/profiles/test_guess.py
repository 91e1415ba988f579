"""Prefill times that are guessed from the size of a model."""

from typing import Any

import pytest

from kvrs.profiles.catalog import prefill_table
from kvrs.profiles.guess import FLOPS, STEP_S, USUAL, guessed_table, size_of

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "intermediate_size": 28672,
}
MIXTRAL_8X22B = {
    "hidden_size": 6144,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "intermediate_size": 16384,
    "vocab_size": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
OPT_13B = {
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "ffn_dim": 20480,
    "vocab_size": 50272,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        (LLAMA_8B, 8.03e9, 6.98e9),
        (LLAMA_70B, 70.6e9, 68.5e9),
        (MIXTRAL_8X22B, 140.6e9, 38.8e9),
        (OPT_13B, 12.8e9, 12.6e9),
        ({"text_config": LLAMA_8B, "hidden_size": 1}, 8.03e9, 6.98e9),
    ],
)
def test_the_size_of_a_model_is_that_which_it_is_published_with(
    config: dict[str, Any], parameters: float, active: float
) -> None:
    """Parameters by the fields of `config.json`; of a mixture only the chosen experts compute."""
    size = size_of(config)

    assert size is not None
    assert size.parameters == pytest.approx(parameters, rel=0.01)
    assert size.active == pytest.approx(active, rel=0.01)


def test_a_file_without_the_shape_of_the_layers_tells_no_size() -> None:
    assert size_of({"model_type": "mamba", "d_model": 4096}) is None
    assert size_of(LLAMA_8B | {"hidden_size": "4096"}) is None


def test_a_guess_takes_two_operations_for_each_token_and_parameter() -> None:
    """By hand, for 1,024 tokens of the usual model, which fits one GPU."""
    table = guessed_table(None)

    operations = 2 * USUAL.active * 1024 + 2 * USUAL.attention * 1024**2
    assert table.seconds_for(1024) == pytest.approx(STEP_S + operations / FLOPS)


def test_a_guess_is_marked_and_covers_nothing() -> None:
    table = guessed_table(size_of(LLAMA_8B))

    assert table.is_guess
    assert not any(table.covers(tokens) for tokens in (1, 1024, 100_000))


@pytest.mark.parametrize(
    ("config", "profile"),
    [
        (LLAMA_8B, "llama-3.1-8b-a100-vllm-tp1"),
        (LLAMA_8B, "llama-3.1-8b-h100-vllm-tp1"),
        (LLAMA_70B, "llama-3.1-70b-a100-vllm-tp4"),
        (LLAMA_70B, "llama-3.1-70b-h100-vllm-tp4"),
        (MIXTRAL_8X22B, "mixtral-8x22b-a100-vllm-tp8"),
        (OPT_13B, "opt-13b-a100-vllm-tp1"),
    ],
)
def test_a_guess_is_within_a_factor_of_five_of_tables_at_hand(
    config: dict[str, Any], profile: str
) -> None:
    """Which covers an H100 and an A100, long prompts and short ones; learning does the rest."""
    guess, known = guessed_table(size_of(config)), prefill_table(profile)

    for tokens in (512, 2048, 8192, 32768):
        ratio = guess.seconds_for(tokens) / known.seconds_for(tokens)
        assert 1 / 5 < ratio < 5, (tokens, ratio)
