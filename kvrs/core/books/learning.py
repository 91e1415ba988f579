"""Corrections of predictions, learned: the ratio of real to predicted cost, per recovery option
(DESIGN section 5, "Learn").

One factor per option, because what a table leaves out (another load, a colder cache, a slower step)
lies in the path that the option takes. It is an EWMA of logarithms, so that twice as long and half
as long weigh the same.
"""

from dataclasses import dataclass
from math import exp, isfinite, log

from kvrs.core.model.estimates import Option

WEIGHT = 0.2  # Of the newest observation: nine tenths of a change are learned from ten.
HALF_LIFE_S = 300.0  # Of a factor without new observations: its cause may be gone.
_FORGETTING_PER_S = log(2) / HALF_LIFE_S
SHORTEST_S = 0.001  # Below this, clock and polling dominate what is measured.


@dataclass(slots=True)
class _Learned:
    log_factor: float
    at_s: float

    def log_factor_at(self, now_s: float) -> float:
        """The factor's logarithm after `HALF_LIFE_S`-decay."""
        return self.log_factor * exp(-_FORGETTING_PER_S * max(0.0, now_s - self.at_s))


class Corrections:
    """A factor in `[1 / most, most]` per option; 1 until the first observation, and always with
    `most` = 1.
    """

    def __init__(self, most: float) -> None:
        self.reload(most)
        self.learned: dict[Option, _Learned] = {}
        self._latest_s = 0.0

    def reload(self, most: float) -> None:
        """Change the bound; what has been learned is kept."""
        assert most >= 1, most
        self._most = most
        self._bound = log(most)

    def factor(self, option: Option, now_s: float) -> float:
        """The factor for predictions of this option."""
        learned = self.learned.get(option)
        if learned is None:  # Nearly always: no recovery in a while.
            return 1.0
        self._latest_s = max(self._latest_s, now_s)
        return self._factor(learned, now_s)

    def observe(self, option: Option, raw_s: float, real_s: float, now_s: float) -> None:
        """The option was predicted to take `raw_s`, before any correction, and took `real_s`."""
        if self._bound == 0.0 or not (isfinite(raw_s) and isfinite(real_s)):
            return
        ratio = log(max(real_s, SHORTEST_S) / max(raw_s, SHORTEST_S))
        # An outlier counts no more than the largest correction: one hung transfer must not outweigh
        # many observations.
        ratio = min(max(ratio, -self._bound), self._bound)
        self._latest_s = max(self._latest_s, now_s)
        learned = self.learned.get(option)
        known = learned.log_factor_at(now_s) if learned is not None else 0.0
        self.learned[option] = _Learned(known + WEIGHT * (ratio - known), now_s)

    def snapshot(self) -> dict[str, float]:
        """The factor of every option that was observed, at the latest time of any call."""
        return {
            option.value: self._factor(learned, self._latest_s)
            for option, learned in self.learned.items()
        }

    def _factor(self, learned: _Learned, now_s: float) -> float:
        return min(max(exp(learned.log_factor_at(now_s)), 1 / self._most), self._most)
