"""Biases are those of vLLM and transformers, and depend on the history alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvrs_engine.engine.biases import Biases, tokenised_words
from kvrs_engine.engine.sampler import SamplingParams, sample

VOCAB = 40
token_ids = st.integers(0, VOCAB - 1)
words = st.lists(st.lists(token_ids, min_size=1, max_size=3), min_size=1, max_size=8)


def row_of(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 5


def biases(
    bias: dict[int, float] | None = None,
    allowed: list[int] | None = None,
    bad_words: list[list[int]] | None = None,
) -> Biases:
    return Biases(VOCAB, logit_bias=bias or {}, allowed_ids=allowed, bad_words=bad_words or [])


@settings(deadline=None)
@given(
    bias=st.dictionaries(token_ids, st.floats(-100, 100, width=32), min_size=1),
    seed=st.integers(0, 99),
)
def test_a_bias_is_that_of_transformers(bias: dict[int, float], seed: int) -> None:
    """It is added to the logit of its token, wherever that stands."""
    from transformers import SequenceBiasLogitsProcessor

    row = row_of(seed)
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])

    expected = processor(torch.tensor([[0]]), row[None])[0]

    assert torch.equal(biases(bias).apply(row, []), expected)


@settings(deadline=None)
@given(bad=words, output=st.lists(token_ids, max_size=12), seed=st.integers(0, 99))
def test_bad_words_are_those_of_transformers(
    bad: list[list[int]], output: list[int], seed: int
) -> None:
    """The last token of a word is impossible after the ones before it."""
    from transformers import NoBadWordsLogitsProcessor

    row, made = row_of(seed), biases(bad_words=bad)
    reach = output[max(0, len(output) - made.reach) :]
    # transformers takes no empty output: a token that is in no word changes nothing.
    given_ids = torch.tensor([[VOCAB, *output]])

    expected = NoBadWordsLogitsProcessor(bad)(given_ids, row[None])[0]

    assert torch.equal(made.apply(row, reach), expected)


@settings(deadline=None)
@given(allowed=st.sets(token_ids, min_size=1), seed=st.integers(0, 99))
def test_what_is_not_allowed_is_suppressed_as_by_transformers(allowed: set[int], seed: int) -> None:
    from transformers import SuppressTokensLogitsProcessor

    row = row_of(seed)
    others = sorted({*range(VOCAB)} - allowed)

    expected = SuppressTokensLogitsProcessor(others)(torch.tensor([[0]]), row[None])[0]

    assert torch.equal(biases(allowed=sorted(allowed)).apply(row, []), expected)


@settings(deadline=None)
@given(min_p=st.floats(0.01, 1), temperature=st.floats(0.1, 2), seed=st.integers(0, 99))
def test_min_p_keeps_what_transformers_keeps(min_p: float, temperature: float, seed: int) -> None:
    """Tokens with at least this share of the likeliest one's probability, after the temperature."""
    from transformers import MinPLogitsWarper

    row = row_of(seed)
    warped = MinPLogitsWarper(min_p)(torch.tensor([[0]]), row[None].double() / temperature)[0]
    kept = set(torch.isfinite(warped).nonzero().flatten().tolist())

    params = SamplingParams(temperature=temperature, min_p=min_p, seed=seed)
    drawn = {sample(row, params, position) for position in range(200)}

    assert drawn <= kept
    # The likeliest is drawn, unless forty others share its place.
    assert int(row.argmax()) in drawn or len(kept) > 10


def test_a_forbidden_token_is_not_drawn() -> None:
    """Not even where it is among the likeliest by number."""
    made = biases(allowed=[5, 9], bad_words=[[9]])
    row = made.apply(row_of(1), [])

    for top_k in (0, 3):
        params = SamplingParams(temperature=2.0, top_k=top_k, seed=1)
        assert {sample(row, params, position) for position in range(50)} == {5}


def test_words_yield_where_no_token_would_be_left() -> None:
    """A stream must go on with some token."""
    row = biases(allowed=[5], bad_words=[[5]]).apply(row_of(1), [])

    assert sample(row, SamplingParams(temperature=0.0), 0) == 5
    assert math.isfinite(float(row[5]))


def test_what_is_forbidden_stays_so_with_a_bias() -> None:
    row = biases({7: 100.0, 5: 1.0}, allowed=[5]).apply(row_of(1), [])

    assert float(row[7]) == -math.inf
    assert int(row.argmax()) == 5


def test_the_given_logits_stay_as_they_are() -> None:
    """Log probabilities are taken from them afterwards."""
    row = row_of(1)
    before = row.clone()

    biases({1: 5.0}, [1, 2], [[2]]).apply(row, [])

    assert torch.equal(row, before)


@pytest.mark.engine
def test_a_word_is_forbidden_with_a_space_before_it_too(tiny_model: object) -> None:
    """vLLM does the same: most words stand after a space, which is another token."""
    tokenizer = Tokenizer.from_file(f"{tiny_model}/tokenizer.json")

    found = tokenised_words(["ka", " ka"], tokenizer)

    texts = {tokenizer.decode(ids) for ids in found}
    assert texts == {"ka", " ka"}
    assert len(found) == 2
