"""The sampler, a function of (logits, parameters, seed, position) to the next token.

So an attempt that continues a stream elsewhere draws the tokens that the lost attempt would have
drawn.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvrs_engine.engine.layers.tiles import fold_sum

_GREEDY_BELOW = 1e-5  # Division by a lower temperature may overflow; vLLM has the same bound.


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    temperature: float = 1.0  # Below `_GREEDY_BELOW`: the likeliest token.
    top_p: float = 1.0  # Keep the likeliest tokens up to this total probability.
    top_k: int = 0  # Keep this number of the likeliest tokens; 0 and -1: all.
    min_p: float = 0.0  # Keep tokens of at least this probability relative to the likeliest.
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """The model's log probabilities of a token and of the likeliest tokens, in descending order."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # Token ids and their log probabilities.


def sample(logits_row: Tensor, params: SamplingParams, position: int) -> int:
    """Draw the token at `position` of a sequence from float32 CPU logits `[vocab]`.

    The token with the largest sum of logit and Gumbel noise is drawn, so that models that differ a
    little mostly draw the same token. Ties go to the lowest id. A NaN is drawn before all others.
    """
    logits = logits_row.numpy()
    likeliest = int(logits.argmax())
    if params.temperature < _GREEDY_BELOW or math.isnan(logits[likeliest]):
        return likeliest
    scaled = logits.astype(np.float64) / params.temperature
    scaled -= scaled[likeliest]
    noise = gumbel_noise(params.seed, position, len(scaled))
    if params.top_p >= 1 and params.min_p <= 0 and not 0 < params.top_k < len(scaled):
        return int((scaled + noise).argmax())
    ids = _kept(scaled, params)
    return int(ids[(scaled[ids] + noise[ids]).argmax()])


def _kept(scaled: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.intp]:
    """Return the ids of the tokens that `top_k`, `min_p` and `top_p` keep, the likeliest first."""
    ids = _candidates(scaled, params.top_k)
    weights = np.exp(scaled[ids])
    weights = weights[: max(1, np.count_nonzero((weights >= params.min_p) & (weights > 0)))]
    if params.top_p < 1:
        cumulative = np.cumsum(weights)
        last = np.searchsorted(cumulative, params.top_p * cumulative[-1])
        weights = weights[: last + 1]
    return ids[: len(weights)]


def logprobs_of(logits_row: Tensor, token_id: int, top: int) -> SampledLogprobs:
    """Return the log probabilities of a token and of the `top` likeliest tokens by the model's own
    distribution (temperature 1, no penalties).

    The sum over the vocabulary has a fixed order, so every engine computes the same bits.
    """
    # The copy gives every row the same alignment: sums must not depend on its place in a batch.
    logits = logits_row.clone()
    shifted = logits - logits.max()
    logprobs = (shifted - torch.log(fold_sum(torch.exp(shifted)))).numpy()
    likeliest = _candidates(logits.numpy(), top) if top else ()
    return SampledLogprobs(
        float(logprobs[token_id]),
        tuple((int(other), float(logprobs[other])) for other in likeliest),
    )


def gumbel_noise(seed: int, position: int, count: int) -> npt.NDArray[np.float64]:
    """Return the noise of tokens 0 to `count` - 1, a function of seed, position and token id."""
    digest = hashlib.blake2b(
        f"{seed}:{position}".encode(), digest_size=16, person=b"kvrs-sample"
    ).digest()
    # Philox fixes the raw bits; numpy may change its distributions between versions.
    bits = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)
    # The middle of each step, so that no value is 0 or 1.
    even = ((bits >> np.uint64(12)) + 0.5) / (1 << 52)
    return np.asarray(-np.log(-np.log(even)), np.float64)


def _candidates(logits: npt.NDArray[np.floating[Any]], top_k: int) -> npt.NDArray[np.intp]:
    """Return ids in descending order of likelihood; ties in ascending order of id."""
    if not 0 < top_k < len(logits):
        return np.argsort(-logits, kind="stable")
    # Sorting a whole vocabulary costs milliseconds: the values below the k-th are dropped first.
    threshold = np.partition(logits, -top_k)[-top_k]
    above = np.flatnonzero(logits >= threshold)
    return above[np.argsort(-logits[above], kind="stable")][:top_k]


class Penalties:
    """Presence, frequency and repetition penalties, as defined by vLLM and OpenAI, from the token
    counts of one stream. Prompt and output are counted separately, so a resumed stream has the same
    counts. All operations are elementwise, so the results have the same bits everywhere.
    """

    def __init__(
        self,
        vocab_size: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        presence: float,
        frequency: float,
        repetition: float,
    ) -> None:
        self._presence = presence
        self._frequency = frequency
        self._repetition = repetition
        self._counts = torch.bincount(
            torch.tensor(output_ids, dtype=torch.long), minlength=vocab_size
        ).float()
        self._seen = self._counts > 0  # Tokens in the prompt or the output.
        self._seen[list(prompt_ids)] = True

    def count(self, token_id: int) -> None:
        """Note an output token."""
        self._counts[token_id] += 1
        self._seen[token_id] = True

    def apply(self, row: Tensor) -> Tensor:
        """Return a copy of the logits `[vocab]` with the penalties applied."""
        if self._repetition != 1:
            # Keskar et al. 2019 (CTRL), section 4.1, with the sign that makes it a penalty for
            # negative logits too.
            shrunk = torch.where(row > 0, row / self._repetition, row * self._repetition)
            row = torch.where(self._seen, shrunk, row)
        row = row - self._counts * self._frequency
        return row - (self._counts > 0) * self._presence
