"""Lessons of what was observed: the bandwidth of links, and the spread of recoveries' real costs.

Lower bounds and means of the bandwidth between nodes, from the newest measurement of each
link: the mean rate predicts, the lower bound decides.

Spread of the real costs of recoveries around the predicted ones, and the chance that a replay
differs.

Costs are predicted by tables, rates and reported steps, and are not corrected by earlier ones: a
factor per option, learned from the deaths before, made predictions worse or no better in simulated
states (`experiments/decisions/learning.py`).
"""

from dataclasses import dataclass
from math import exp, isfinite, log

from kvrs.core.model import events as ev
from kvrs.core.model.estimates import real_over_predicted
from kvrs.ids import NodeId
from kvrs.transfer.meter import Measurement, lower_bound

# The least relative change of a bound or a mean that is reported: a bound decreases with the age of
# its measurement, and smaller changes affect no decision.
_STEP = 0.02
# Two reports of one measurement differ in its age by up to this time, because of message delays.
_SAME_S = 0.5


@dataclass(slots=True)
class _Link:
    measured_s: float
    bound_bytes_per_s: float = 0.0  # The bound that was reported last.
    mean_bytes_per_s: float = 0.0  # The mean that was reported with it.


class LinkBounds:
    """Keeps the newest measurement of each link. Instances report measurements directly, agents
    publish them by gossip.
    """

    def __init__(self) -> None:
        self._links: dict[tuple[NodeId, NodeId], _Link] = {}

    def measured(
        self, source: NodeId, target: NodeId, measured: Measurement, now_s: float
    ) -> ev.LinkMeasured | None:
        """Note a measurement; return the event for the policy, or None if bound and mean have
        hardly changed, or no link has such a rate.
        """
        if not 1.0 <= measured.bytes_per_s <= 1e15:  # Bytes divided by it might be infinite.
            return None
        measured_s = now_s - measured.age_s
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = _Link(measured_s)
        elif measured_s < link.measured_s - _SAME_S:
            return None
        link.measured_s = max(link.measured_s, measured_s)
        bound, mean = lower_bound(measured), measured.bytes_per_s
        if not (_moved(link.bound_bytes_per_s, bound) or _moved(link.mean_bytes_per_s, mean)):
            return None
        link.bound_bytes_per_s, link.mean_bytes_per_s = bound, mean
        return ev.LinkMeasured(source, target, bound, mean)


def _moved(reported: float, now: float) -> bool:
    return abs(now - reported) > _STEP * reported


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
