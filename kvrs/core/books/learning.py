"""Learned corrections of predictions: the ratio of real to predicted cost per recovery option
(DESIGN section 5, "Learn").

Each option has its own factor, because the effects that a table leaves out (another load, a colder
cache, a slower step) depend on the option's path. The factor is an EWMA of logarithms: a ratio of 2
and a ratio of 1/2 cancel out.
"""

from dataclasses import dataclass
from math import exp, isfinite, log

from kvrs.core.model.estimates import Option

# Weight of the newest observation (of 1): ten of them make up nine tenths of a change.
WEIGHT = 0.2
HALF_LIFE_S = 300.0  # Half-life of a factor without new observations.
_FORGETTING_PER_S = log(2) / HALF_LIFE_S
# Shorter costs count as this long: they show the clock and polling more than the recovery.
SHORTEST_S = 0.001
# Estimate before the first replay: one difference in 100,000 tokens.
_PRIOR_FOUND, _PRIOR_TOKENS = 0.05, 5_000


@dataclass(slots=True)
class _Learned:
    log_factor: float
    at_s: float

    def log_factor_at(self, now_s: float) -> float:
        """Return the factor's logarithm, decayed by `HALF_LIFE_S`."""
        return self.log_factor * exp(-_FORGETTING_PER_S * max(0.0, now_s - self.at_s))


class Differences:
    """Learns how likely an instance with an equal self-test generates another token than the one
    before it did, per token of a replay: near-ties flip where rounding depends on the batch.
    """

    def __init__(self) -> None:
        self.tokens = 0  # Known tokens that were generated once more.
        self.found = 0  # Replays whose output differed.

    def note(self, tokens: int, *, differed: bool) -> None:
        self.tokens += tokens
        self.found += differed

    def chance(self, tokens: int) -> float:
        """Return the probability that a replay of so many tokens differs."""
        each = (self.found + _PRIOR_FOUND) / (self.tokens + _PRIOR_TOKENS)
        return 1.0 - (1.0 - min(1.0, each)) ** tokens


class Corrections:
    """Learns a factor in `[1 / most, most]` per option, 1 before the first observation. With
    `most` = 1 nothing is learned.
    """

    def __init__(self, most: float) -> None:
        self.bound(most)
        self.learned: dict[Option, _Learned] = {}
        self._latest_s = 0.0

    def bound(self, most: float) -> None:
        """Change the bound and keep the learned factors."""
        assert most >= 1, most
        self._most = most
        self._bound = log(most)

    def factor(self, option: Option, now_s: float) -> float:
        """Return the factor for predictions of this option."""
        learned = self.learned.get(option)
        if learned is None:
            return 1.0
        self._latest_s = max(self._latest_s, now_s)
        return self._factor(learned, now_s)

    def observe(self, option: Option, raw_s: float, real_s: float, now_s: float) -> None:
        """Note that the option was predicted to take `raw_s`, before correction, and took
        `real_s`.
        """
        if self._bound == 0.0 or not (isfinite(raw_s) and isfinite(real_s)):
            return
        ratio = log(max(real_s, SHORTEST_S) / max(raw_s, SHORTEST_S))
        # An outlier, such as one hung transfer, must not outweigh many observations.
        ratio = min(max(ratio, -self._bound), self._bound)
        self._latest_s = max(self._latest_s, now_s)
        learned = self.learned.get(option)
        known = learned.log_factor_at(now_s) if learned is not None else 0.0
        self.learned[option] = _Learned(known + WEIGHT * (ratio - known), now_s)

    def snapshot(self) -> dict[str, float]:
        """Return the factor of every observed option, at the time of the latest call."""
        return {
            option.value: self._factor(learned, self._latest_s)
            for option, learned in self.learned.items()
        }

    def _factor(self, learned: _Learned, now_s: float) -> float:
        return min(max(exp(learned.log_factor_at(now_s)), 1 / self._most), self._most)
