"""The predicted step times of a layout, from tables of the same model at one or two even degrees.

A step has a constant part (launches, exchanges) and two parts that scale with the ranks: attention
over cached tokens, and the rest, each with the time of its most loaded rank
(`kvrs_engine/elastic/speed.py`). Two degrees determine the constant; with one degree the constant
is assumed to be 0. With tables of OPT-66B on A100 the step of degree 3 is predicted within 4 % from
degrees 2 and 4, and within 8.1 % from degree 2 alone (2026-11-23).
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvrs.profiles.tables import DecodeGrid, DecodeTable, PrefillTable
from kvrs_engine.elastic.speed import Shares


@dataclass(frozen=True, slots=True)
class Degree:
    """The tables of an even tensor parallel degree."""

    ranks: int
    decode: DecodeTable | DecodeGrid
    prefill: PrefillTable


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicts step times. `near` is the degree closest to the layouts in question; `far`, another
    degree, determines the constant part.
    """

    near: Degree
    far: Degree | None = None

    def decode_s(self, own: Shares, batch: int, context_tokens: int) -> float:
        """Return the time of a decode step of `batch` sequences with `context_tokens` in total."""

        def cached_s(degree: Degree) -> float:
            table = degree.decode
            return max(0.0, table.seconds_for(batch, context_tokens) - other_s(degree))

        def other_s(degree: Degree) -> float:
            # The time of a step with a context of one token per sequence.
            return degree.decode.seconds_for(batch, min(batch, context_tokens))

        near = self.near
        shrinking_s, constant_s = self._divided(other_s)
        # Reading cells scales fully with the ranks; its constant part is in `constant_s`.
        return constant_s + shrinking_s * own.weights + cached_s(near) * near.ranks * own.cells

    def prefill_s(self, own: Shares, tokens: int) -> float:
        shrinking_s, constant_s = self._divided(lambda degree: degree.prefill.seconds_for(tokens))
        return constant_s + shrinking_s * own.rows

    def _divided(self, step_s: Callable[[Degree], float]) -> tuple[float, float]:
        """Return the scaling part of a step, as time on one rank, and the constant part."""
        near, far = self.near, self.far
        near_s = step_s(near)
        if far is None:
            return near_s * near.ranks, 0.0
        shared_s = (near_s - step_s(far)) / (1 / near.ranks - 1 / far.ranks)
        shared_s = min(max(shared_s, 0.0), near_s * near.ranks)  # Neither part is negative.
        return shared_s, near_s - shared_s / near.ranks
