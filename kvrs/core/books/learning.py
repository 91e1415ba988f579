"""Spread of the real costs of recoveries around the predicted ones, and the chance that a replay
differs.

Costs are predicted by tables, rates and reported steps, and are not corrected by earlier ones: a
factor per option, learned from the deaths before, made predictions worse or no better in simulated
states (`experiments/decisions/learning.py`).
"""

from math import exp, isfinite, log

from kvrs.core.model.estimates import real_over_predicted

# Mean error before the first observation, as the logarithm of a factor; it counts as one event.
FIRST_ERROR = 0.25
_MOST_EVENTS = 10.0  # Events that make up the mean; older ones fade.
# Nine of ten errors are below this multiple of their mean in simulated states
# (`experiments/decisions/study.py`); 2.3 if they had a Laplace distribution.
NINE_OF_TEN = 1.85
_MOST_ERROR = log(10.0)  # A larger error counts as this: one hung transfer is not many recoveries.
# Estimate before the first replay: one difference in 100,000 tokens.
_PRIOR_FOUND, _PRIOR_TOKENS = 0.05, 5_000


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


class Spread:
    """Learns by what factor real costs are off from predicted ones, for the interval in which nine
    of ten real costs are. The victims of one event wait for the same steps and links, so that they
    count as one observation together.
    """

    def __init__(self) -> None:
        self.error = FIRST_ERROR  # Mean absolute logarithm of real over predicted cost.
        self.events = 1.0

    def observe(self, predicted_s: float, real_s: float, victims: int = 1) -> None:
        """Note the cost of one of the `victims` of an event."""
        if not (isfinite(predicted_s) and isfinite(real_s)):
            return
        ratio = log(real_over_predicted(predicted_s, real_s))
        weight = 1.0 / max(1, victims)
        self.events = min(_MOST_EVENTS, self.events + weight)
        self.error += weight / self.events * (min(abs(ratio), _MOST_ERROR) - self.error)

    def interval(self, predicted_s: float) -> tuple[float, float]:
        """Return the shortest and longest of nine of ten real costs with this prediction."""
        factor = self.factor
        return predicted_s / factor, predicted_s * factor

    @property
    def factor(self) -> float:
        """The factor from a prediction to the ends of its interval."""
        return exp(NINE_OF_TEN * self.error)

    def snapshot(self) -> dict[str, float]:
        """Return the state as plain data, for display."""
        return {"interval_factor": self.factor, "events": self.events - 1.0}
