"""Tokens that an instance computes in its resume self-test, and a comparison of instances."""

from collections.abc import Mapping
from enum import StrEnum
from hashlib import blake2b

import msgspec

from kvrs.core.model.member import GOES_ON_NOWHERE
from kvrs.protocol.speculation import SpeculationReport

# Largest difference of log probabilities at which rounding can exchange two tokens.
_NEAR_TIE = 0.5


class Continues(StrEnum):
    """Exactness with which an instance continues a history that was computed elsewhere."""

    SEEDED = "exact seeded"  # Equal to the uncut stream, also for sampled streams of one seed.
    GREEDY = "exact greedy"  # Equal to the uncut stream at temperature 0.
    TEXT = "text-stitched"  # Different tokens: only the text continues.
    NONE = "none"  # The instance does not continue the stream.

    def is_below(self, other: "Continues") -> bool:
        levels = list(Continues)
        return levels.index(self) > levels.index(other)


class Likeness(StrEnum):
    """Difference between the outputs of two instances for the known prompt."""

    ALIKE = "alike"
    NEAR = "near"  # Two tokens of similar likelihood change places: rounding differs.
    OTHER = "other"  # Different weights, or a fault.


class Generated(msgspec.Struct, frozen=True):
    """Tokens that an instance computes from the known prompt, and how it continues after a cut."""

    greedy: tuple[int, ...]
    seeded: tuple[int, ...]
    continues: Continues
    # Counts of the instance during the test, which include other streams; None: no source of
    # drafts.
    drafts: SpeculationReport | None = None
    # Log probabilities of the likeliest tokens at each position of `greedy`; empty: not available.
    likeliest: tuple[Mapping[int, float], ...] = ()

    @property
    def name(self) -> str:
        """Value of `Member.tokens`."""
        if self.continues not in (Continues.SEEDED, Continues.GREEDY):
            return GOES_ON_NOWHERE
        seeded = _digest(self.seeded) if self.continues is Continues.SEEDED else ""
        return f"{_digest(self.greedy)}:{seeded}"

    def likeness(self, other: "Generated") -> Likeness:
        """Compare two outputs; they are different if both instances give their first two differing
        tokens likelihoods far apart.
        """
        for at, (mine, theirs) in enumerate(zip(self.greedy, other.greedy, strict=False)):
            if mine != theirs:
                is_far = _apart(self, at, theirs) and _apart(other, at, mine)
                return Likeness.OTHER if is_far else Likeness.NEAR
        return Likeness.ALIKE


def _digest(ids: tuple[int, ...]) -> str:
    return blake2b(repr(ids).encode(), digest_size=8).hexdigest()


def _apart(one: Generated, at: int, other_token: int) -> bool:
    """Another token is far less likely than the greedy token at this position. A token outside the
    likeliest is less likely than all of these.
    """
    if at >= len(one.likeliest) or not (likeliest := one.likeliest[at]):
        return True
    lowest = min(likeliest.values())
    gap = likeliest.get(one.greedy[at], 0.0) - likeliest.get(other_token, lowest)
    return abs(gap) > _NEAR_TIE
