"""Sampling is a function of logits, parameters, seed and position."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs_engine.engine.sampler import SamplingParams, gumbel_noise, logprobs_of, sample

finite = st.floats(-50, 50, width=32)
rows = st.lists(finite, min_size=1, max_size=40)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    """Ties must fall the same way on every engine."""
    row = torch.tensor([0.0, 3.0, 1.0, 3.0])

    assert sample(row, SamplingParams(temperature=0.0), position=0) == 1


@pytest.mark.parametrize("temperature", [9e-6, 2.3e-308, 5e-324])
def test_a_temperature_next_to_zero_is_greedy(temperature: float) -> None:
    """Logits divided by it would be infinite, and their differences nothing."""
    row = torch.tensor([-30.0, 40.0, 39.9, 40.0])

    assert sample(row, SamplingParams(temperature=temperature, top_p=0.1), position=0) == 1


@settings(deadline=None)
@given(
    row=rows,
    temperature=st.floats(0.05, 2.0),
    top_p=st.floats(1e-6, 1.0),
    top_k=st.integers(-1, 50),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    position=st.integers(0, 1 << 20),
)
def test_a_draw_repeats_and_keeps_to_its_candidates(
    row: list[float], temperature: float, top_p: float, top_k: int, seed: int, position: int
) -> None:
    """Another engine draws the same token, and never one that top_k or top_p excluded."""
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    logits = torch.tensor(row)

    token = sample(logits, params, position)

    assert sample(logits.clone(), params, position) == token
    order = sorted(range(len(row)), key=lambda index: (-row[index], index))
    allowed = order[:top_k] if top_k > 0 else order
    assert token in allowed
    weights = [math.exp((row[index] - row[order[0]]) / temperature) for index in allowed]
    mass_before = sum(weights[: allowed.index(token)]) / sum(weights)
    assert mass_before < top_p + 1e-9


@pytest.mark.parametrize(
    ("cut", "shares"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.75}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"min_p": 0.7}, [0, 0, 3 / 7, 4 / 7]),
    ],
)
def test_draws_follow_the_distribution(cut: dict[str, Any], shares: list[float]) -> None:
    """Each token that is left comes as often as it is likely among those."""
    row = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    params = SamplingParams(temperature=1.0, seed=5, **cut)

    drawn = [sample(row, params, position) for position in range(8000)]

    for token, share in enumerate(shares):
        assert drawn.count(token) / len(drawn) == pytest.approx(share, abs=0.02)


def test_models_that_differ_a_little_draw_alike() -> None:
    """A draft is of use to a sampled stream."""
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(512, generator=generator)
    other = row + 0.05 * torch.randn(512, generator=generator)
    params = SamplingParams(temperature=1.0, seed=5)

    alike = sum(
        sample(row, params, position) == sample(other, params, position) for position in range(500)
    )

    assert alike > 450


def test_what_is_impossible_is_never_drawn() -> None:
    row = torch.tensor([-torch.inf, 0.0, -torch.inf])

    for cut in ({}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 2}):
        params = SamplingParams(temperature=1.0, **cut)
        assert {sample(row, params, position) for position in range(100)} == {1}


def test_seed_position_and_token_each_change_the_noise() -> None:
    """A resumed stream needs its position's noise, and two streams need different ones."""
    found = {
        number
        for seed in range(20)
        for position in range(20)
        for number in gumbel_noise(seed, position, 5)
    }

    assert len(found) == 2000
    assert all(-4 < number < 37 for number in found)
    known = [2.588687370021066, 0.477311213800684, 0.8736229761348205, -0.6638277160161761]
    assert list(gumbel_noise(7, 3, 4)) == pytest.approx(known, rel=1e-12), (
        "the noise is part of the protocol between engines: it never changes"
    )
    assert list(gumbel_noise(7, 3, 2)) == list(gumbel_noise(7, 3, 4)[:2])


def test_top_k_with_equal_logits_keeps_the_lowest_ids() -> None:
    """The cut among equals must not depend on how a library partitions."""
    row = torch.tensor([-1.0, 0.0] * 100)
    params = SamplingParams(temperature=1.0, top_k=3)

    assert {sample(row, params, position) for position in range(200)} == {1, 3, 5}


@settings(deadline=None)
@given(row=rows, top=st.integers(0, 20))
def test_log_probabilities_are_those_of_the_distribution(row: list[float], top: int) -> None:
    """The sampled token and the likeliest have theirs, the lowest id first among equals."""
    logits = torch.tensor(row)
    expected = torch.log_softmax(logits.double(), 0)

    found = logprobs_of(logits, len(row) - 1, top)

    assert found.logprob == pytest.approx(expected[-1].item(), abs=1e-4)
    order = sorted(range(len(row)), key=lambda index: (-row[index], index))[:top]
    assert all(
        logprob == pytest.approx(expected[token_id].item(), abs=1e-4)
        for token_id, logprob in found.top
    )
    assert [row[token_id] for token_id, _ in found.top] == [row[index] for index in order]


@pytest.mark.parametrize("vocab", [512, 32_003])
def test_log_probabilities_do_not_depend_on_the_place_in_a_batch(vocab: int) -> None:
    """A resumed stream stands elsewhere in the batch than the lost one did."""
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 4
    alone = logprobs_of(row, 5, 20)

    for place in range(17):
        batch = torch.empty(17 * vocab + place)[place:].view(17, vocab)
        batch[place] = row

        assert logprobs_of(batch[place], 5, 20) == alone


@settings(deadline=None)
@given(min_p=st.floats(0.01, 1), temperature=st.floats(0.1, 2), seed=st.integers(0, 99))
def test_min_p_keeps_what_transformers_keeps(min_p: float, temperature: float, seed: int) -> None:
    """Tokens with at least this share of the likeliest one's probability, after the temperature."""
    from transformers import MinPLogitsWarper

    row = torch.randn(40, generator=torch.Generator().manual_seed(seed)) * 5
    warped = MinPLogitsWarper(min_p)(torch.tensor([[0]]), row[None].double() / temperature)[0]
    kept = set(torch.isfinite(warped).nonzero().flatten().tolist())

    params = SamplingParams(temperature=temperature, min_p=min_p, seed=seed)
    drawn = {sample(row, params, position) for position in range(200)}

    assert drawn <= kept
    # The likeliest is drawn, unless forty others share its place.
    assert int(row.argmax()) in drawn or len(kept) > 10
