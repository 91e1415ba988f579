"""`auto`: the option that costs least, at the assigned target and at the least loaded ones beside
it (DESIGN section 5): for one victim the fastest, for many the one that costs all of them least.

Victims of one event that go to the same target share its compute time: what it computes for one of
them, the others wait for. A choice is charged that wait once for each of them. Links and prefill
instances are not charged: the others need not use them.
"""

from collections.abc import Sequence
from math import inf

from kvrs.config.policy import PolicyName
from kvrs.core import options
from kvrs.core.model.estimates import Estimate
from kvrs.core.rules.base import Rule


class Auto(Rule):
    several_targets = True
    spares_others = True

    def choose_sparing(
        self, estimates: Sequence[Estimate], budget_s: float | None, others: float
    ) -> Estimate | None:
        best: Estimate | None = None
        least_s, limit_s = inf, inf if budget_s is None else budget_s
        for estimate in estimates:
            cost_s = estimate.total_s + others * estimate.at_target_s
            if cost_s < least_s and estimate.total_s - estimate.lookahead_s <= limit_s:
                best, least_s = estimate, cost_s
        return best


AUTO = Auto(PolicyName.AUTO, options.ALL)
