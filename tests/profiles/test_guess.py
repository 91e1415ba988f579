"""Prefill times that are guessed from the size of a model."""

import statistics
from typing import Any

import pytest

from experiments.decisions.guesses import LENGTHS, NAME, UNKNOWN, factors_off
from kvrs.profiles.guess import (
    FLOPS,
    STEP_S,
    USUAL,
    flops_of,
    guessed_prefill,
    guessed_table,
    on_gpu,
    size_of,
)

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
    ("gpu", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA B200", 2250),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_a_guess_is_scaled_by_the_peak_of_the_gpu(gpu: str, peak: float) -> None:
    """By the names that NVML and engines give; the overhead of a step is the same."""
    table, of_a100 = guessed_table(None, gpu), guessed_table(None)

    assert flops_of(gpu) == pytest.approx(FLOPS * peak / 312)
    assert table.step_overhead_s == STEP_S
    assert of_a100.seconds_for(4096) - STEP_S == pytest.approx(
        (table.seconds_for(4096) - STEP_S) * peak / 312
    )


@pytest.mark.parametrize("gpu", ["", "a GPU of tomorrow", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"])
def test_a_gpu_that_is_not_known_changes_nothing(gpu: str) -> None:
    """Nor does a part of one, whose size the name does not tell."""
    assert flops_of(gpu) is None
    assert guessed_prefill(None, gpu) == guessed_prefill(None)


def test_a_guess_is_scaled_by_a_name_once() -> None:
    """The engine may have told it, and the node's agent tells it again."""
    once = guessed_prefill(None, "NVIDIA H200")

    assert on_gpu(once, "NVIDIA H200") is once


def test_the_number_of_gpus_is_that_which_the_engine_tells() -> None:
    """Otherwise as few as hold the weights."""
    one, four = guessed_table(None), guessed_table(None, gpus=4)

    assert one.seconds_for(4096) - STEP_S == pytest.approx(4 * (four.seconds_for(4096) - STEP_S))


@pytest.mark.parametrize(("known", "median", "worst"), [(UNKNOWN, 2.7, 8), (NAME, 1.7, 3.5)])
def test_a_guess_is_as_far_off_as_the_page_says(known: str, median: float, worst: float) -> None:
    """The page has 31 profiles of vLLM and 200 to 8,000 tokens (`docs/research/profiles.md`)."""
    factors = factors_off(known)

    assert len(factors) == 31 * len(LENGTHS)
    assert median - 0.2 < statistics.median(factors) < median
    assert worst - 0.5 < max(factors) < worst
