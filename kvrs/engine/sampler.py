"""Choosing the next token from logits: a function of (logits, parameters, seed, position) and
nothing else.

So an attempt that continues a stream elsewhere draws what the lost one would have drawn.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvrs.engine.layers.tiles import fold_sum

_GREEDY_BELOW = 1e-5  # As vLLM's: logits over less than that may overflow.


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    temperature: float = 1.0  # 0, or next to it: the likeliest token.
    top_p: float = 1.0  # The likeliest tokens that together reach this probability.
    top_k: int = 0  # That many of the likeliest tokens; 0 and -1: all.
    min_p: float = 0.0  # Those at least so likely, compared with the likeliest.
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """How likely the model itself found a token and, the likeliest first, the other candidates."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # Token ids and their log probabilities.


def sample(logits_row: Tensor, params: SamplingParams, position: int) -> int:
    """Draw the token at `position` of a sequence from float32 CPU logits `[vocab]`.

    Equal logits are ordered by id, the lowest first.
    """
    logits = logits_row.numpy()
    if params.temperature < _GREEDY_BELOW:
        return int(logits.argmax())
    ids = _candidates(logits, params.top_k)
    scaled = logits[ids].astype(np.float64) / params.temperature
    weights = np.exp(scaled - scaled[0])
    if params.min_p > 0 or not np.isfinite(scaled[-1]):
        # Those that are impossible have no weight.
        weights = weights[(weights >= params.min_p) & (weights > 0)]
    cumulative = np.cumsum(weights)
    kept = (
        int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        if params.top_p < 1
        else len(weights)
    )
    # The last kept token is the answer when rounding puts the target at the very end.
    chosen = np.searchsorted(
        cumulative[: kept - 1], uniform(params.seed, position) * cumulative[kept - 1], side="right"
    )
    return int(ids[chosen])


def logprobs_of(logits_row: Tensor, token_id: int, top: int) -> SampledLogprobs:
    """Log probabilities of a token and of the `top` likeliest, under the model's own distribution
    (temperature 1, no penalties).

    The sum over the vocabulary has one order of additions, so every engine finds the same bits.
    """
    # A copy: where a vector loop begins must not depend on the row's place in its batch.
    logits = logits_row.clone()
    shifted = logits - logits.max()
    logprobs = (shifted - torch.log(fold_sum(torch.exp(shifted)))).numpy()
    likeliest = _candidates(logits.numpy(), top) if top else ()
    return SampledLogprobs(
        float(logprobs[token_id]),
        tuple((int(other), float(logprobs[other])) for other in likeliest),
    )


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), evenly spread over seeds and positions."""
    digest = hashlib.blake2b(
        f"{seed}:{position}".encode(), digest_size=8, person=b"kvrs-sample"
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _candidates(logits: npt.NDArray[np.float32], top_k: int) -> npt.NDArray[np.intp]:
    """Ids from the likeliest on; a stable sort keeps the lowest id first among equals."""
    if not 0 < top_k < len(logits):
        return np.argsort(-logits, kind="stable")
    # Sorting a whole vocabulary costs milliseconds, so first everything below the k-th value is
    # dropped (its equals stay).
    threshold = np.partition(logits, -top_k)[-top_k]
    above = np.flatnonzero(logits >= threshold)
    return above[np.argsort(-logits[above], kind="stable")][:top_k]
