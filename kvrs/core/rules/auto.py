"""`auto`: the cheapest option at the assigned target and at the least loaded other targets (DESIGN
section 5): for one victim the fastest, for many victims the one with the least total delay.

Victims of one event that go to the same target share its compute time: while the target computes
for one victim, the others wait. A choice is charged that wait once for each of the others. That of
a single victim is charged for the streams that wait for a token there; a split, which computes at
the target what need not be computed there, for all streams there. Links and prefill instances are
not charged, because the other victims need not use them.
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
        any_waits = others > 0
        least_s, limit_s = inf, inf if budget_s is None else budget_s
        for estimate in estimates:
            cost_s = estimate.total_s
            if others or estimate.waiting:
                any_waits = True
                cost_s += estimate.wait_of_others_s(others)
            if cost_s < least_s and estimate.total_s - estimate.lookahead_s <= limit_s:
                best, least_s = estimate, cost_s
        return best if any_waits else None


AUTO = Auto(PolicyName.AUTO, options.ALL)
