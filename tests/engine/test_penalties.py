"""Penalties are those of vLLM and transformers, and the same bits after a recovery."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs_engine.engine.sampler import Penalties

VOCAB = 40
ids = st.lists(st.integers(0, VOCAB - 1), max_size=30)


def row_of(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 5


@settings(deadline=None)
@given(prompt=ids, output=ids, repetition=st.floats(0.05, 2.0), seed=st.integers(0, 100))
def test_repetition_is_that_of_transformers(
    prompt: list[int], output: list[int], repetition: float, seed: int
) -> None:
    """Each token of prompt and output counts once: positive logits are divided, negative ones
    multiplied.
    """
    from transformers import RepetitionPenaltyLogitsProcessor

    row = row_of(seed)
    processor = RepetitionPenaltyLogitsProcessor(repetition)
    penalties = Penalties(VOCAB, prompt, output, presence=0.0, frequency=0.0, repetition=repetition)

    expected = processor(torch.tensor([prompt + output], dtype=torch.long), row[None])[0]

    assert torch.equal(penalties.apply(row), expected)


def test_presence_and_frequency_count_the_output_alone() -> None:
    """OpenAI: logit - count * frequency - (count > 0) * presence; what the client wrote is not held
    against the model.
    """
    penalties = Penalties(
        VOCAB, [1, 2, 2], [2, 3, 3, 3], presence=0.5, frequency=0.25, repetition=1.0
    )

    lowered = penalties.apply(torch.zeros(VOCAB))

    assert lowered[[0, 1, 2, 3]].tolist() == [0.0, 0.0, -0.75, -1.25]


def test_repetition_comes_before_the_others() -> None:
    """The order of the three changes the result; it is vLLM's."""
    penalties = Penalties(VOCAB, [], [0], presence=1.0, frequency=0.5, repetition=2.0)

    assert penalties.apply(torch.full((VOCAB,), 4.0))[0] == 4.0 / 2 - 0.5 - 1.0


@settings(deadline=None)
@given(
    prompt=ids,
    output=ids,
    seam=st.integers(0, 30),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.05, 2),
)
def test_counting_on_equals_counting_anew(
    prompt: list[int],
    output: list[int],
    seam: int,
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    """An attempt that takes over counts the whole history at once, the lost one token by token."""
    row = row_of(0)
    weights = {"presence": presence, "frequency": frequency, "repetition": repetition}
    counted = Penalties(VOCAB, prompt, output[:seam], **weights)

    for token_id in output[seam:]:
        counted.count(token_id)

    assert torch.equal(counted.apply(row), Penalties(VOCAB, prompt, output, **weights).apply(row))


@pytest.mark.parametrize("weights", [(0.0, 0.0, 1.5), (1.0, 1.0, 1.0)])
def test_the_given_logits_stay_as_they_are(weights: tuple[float, float, float]) -> None:
    """Log probabilities are taken from them afterwards."""
    row = row_of(1)
    before = row.clone()
    presence, frequency, repetition = weights

    Penalties(VOCAB, [1], [2], presence=presence, frequency=frequency, repetition=repetition).apply(
        row
    )

    assert torch.equal(row, before)
