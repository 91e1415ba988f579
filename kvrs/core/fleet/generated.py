"""Tokens that an instance computes in its resume self-test, and the comparison of two instances by
them.
"""

from collections.abc import Mapping
from enum import StrEnum
from hashlib import blake2b

import msgspec

from kvrs.core.model.member import GOES_ON_NOWHERE
from kvrs.protocol.speculation import SpeculationReport

# Two tokens whose log probabilities lie no further apart change places by rounding.
_NEAR_TIE = 0.5


class Continues(StrEnum):
    """How an instance goes on with a history that was computed elsewhere."""

    SEEDED = "exact seeded"  # With the tokens of an uncut stream, also sampled ones of one seed.
    GREEDY = "exact greedy"  # With those of temperature 0.
    TEXT = "text-stitched"  # With other tokens: only the text is continued.
    NONE = "none"  # It does not go on.

    def is_below(self, other: "Continues") -> bool:
        levels = list(Continues)
        return levels.index(self) > levels.index(other)


class Likeness(StrEnum):
    """The difference of what two instances compute from the known prompt."""

    ALIKE = "alike"
    NEAR = "near"  # Two tokens that are about as likely change places: rounding differs.
    OTHER = "other"  # Other weights, or a fault.


class Generated(msgspec.Struct, frozen=True):
    """Tokens that an instance computes from the known prompt, and how it goes on after a cut."""

    greedy: tuple[int, ...]
    seeded: tuple[int, ...]
    continues: Continues
    # Counted meanwhile at the instance, so of other streams too; None: it has no source of drafts.
    drafts: SpeculationReport | None = None
    # Log probabilities of the likeliest tokens at each position of `greedy`; empty: it gives none.
    likeliest: tuple[Mapping[int, float], ...] = ()

    @property
    def name(self) -> str:
        """The value of `Member.tokens`."""
        if self.continues not in (Continues.SEEDED, Continues.GREEDY):
            return GOES_ON_NOWHERE
        seeded = _digest(self.seeded) if self.continues is Continues.SEEDED else ""
        return f"{_digest(self.greedy)}:{seeded}"

    def likeness(self, other: "Generated") -> Likeness:
        """A difference counts where its two tokens are far apart in likelihood at both."""
        for at, (mine, theirs) in enumerate(zip(self.greedy, other.greedy, strict=False)):
            if mine != theirs:
                is_far = _apart(self, at, theirs) and _apart(other, at, mine)
                return Likeness.OTHER if is_far else Likeness.NEAR
        return Likeness.ALIKE


def _digest(ids: tuple[int, ...]) -> str:
    return blake2b(repr(ids).encode(), digest_size=8).hexdigest()


def _apart(one: Generated, at: int, other_token: int) -> bool:
    """Another token is far less likely than the greedy one at this position. One that is not among
    the likeliest is less likely than all of these.
    """
    if at >= len(one.likeliest) or not (likeliest := one.likeliest[at]):
        return True
    lowest = min(likeliest.values())
    gap = likeliest.get(one.greedy[at], 0.0) - likeliest.get(other_token, lowest)
    return abs(gap) > _NEAR_TIE
