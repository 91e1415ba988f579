"""A policy: which options are weighed, and which of their estimates is taken."""

from collections.abc import Iterable, Sequence

import msgspec

from kvrs.config.policy import PolicyName
from kvrs.core import options
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.core.options.base import (
    Books,
    Case,
    RecoveryOption,
    Term,
    cases_of,
    lookahead_s,
)

_MIGRATE = Option.MIGRATE


class Rule:
    """The cheapest of `options` at the assigned target. A policy of its own overrides what
    differs.
    """

    several_targets = False  # The least loaded targets are weighed beside the assigned one.
    stays = True  # A stream may go on where it is when its instance re-forms.
    learns = True  # Predictions are corrected by what recoveries really took.
    spares_others = False  # A choice is charged what it has other victims wait for.

    def __init__(self, name: PolicyName, weighed: Sequence[RecoveryOption]) -> None:
        self.name = name
        self._weighed = tuple((each.needs, each.estimate) for each in weighed)

    def weigh(
        self, books: Books, stream: Stream, targets: Sequence[Member], now_s: float
    ) -> list[Estimate]:
        """Estimates of all options for the stream at each target."""
        estimates: list[Estimate] = []
        for case in cases_of(books, stream, targets, now_s):
            weighed = len(estimates)
            for needs, estimate in self._weighed:
                if needs is None or needs(case):
                    estimate(case, estimates)
            if case.target.slower_token_s:
                later_s = lookahead_s(books.settings, stream, case.target)
                estimates[weighed:] = [_later(each, later_s) for each in estimates[weighed:]]
        return estimates

    def choose(self, estimates: Sequence[Estimate], fastest: Estimate) -> Estimate:
        """The estimate to carry out, of at least one."""
        return fastest

    def choose_sparing(
        self, estimates: Sequence[Estimate], budget_s: float | None, others: float
    ) -> Estimate | None:
        """The choice of a rule that spares others, where there are any; None: as for one victim."""
        return None

    def decide(
        self, estimates: Sequence[Estimate], budget_s: float | None = None, others: float = 0.0
    ) -> Estimate:
        """The choice within the budget; where no estimate meets that, `Option.ABORT` with what the
        fastest option would have cost (seed KVRS). `others`: how many other victims of the event
        there are for each target; only a rule that spares them counts what they wait.
        """
        if others:
            chosen = self.choose_sparing(estimates, budget_s, others)
            if chosen is not None:
                return chosen
        fastest = cheapest(estimates)
        if budget_s is not None and fastest.next_token_s > budget_s:
            return Estimate(Option.ABORT, fastest.target, fastest.total_s, raw_s=fastest.raw_s)
        return self.choose(estimates, fastest)

    def terms(self, case: Case, estimate: Estimate) -> Iterable[Term]:
        """The summands of `estimate.raw_s`."""
        return options.BY_NAME[estimate.option].terms(case, estimate)


def _later(estimate: Estimate, later_s: float) -> Estimate:
    total_s = estimate.total_s + later_s
    return msgspec.structs.replace(estimate, total_s=total_s, lookahead_s=later_s)


def cheapest(estimates: Sequence[Estimate]) -> Estimate:
    """The least `total_s`; a tie goes to migrate, as in `ROM_DECIDE` of seed KVRS: it leaves the
    prefill instances to new requests.
    """
    best = estimates[0]
    for estimate in estimates:
        if estimate.total_s < best.total_s or (
            estimate.total_s == best.total_s
            and estimate.option is _MIGRATE
            and best.option is not _MIGRATE
        ):
            best = estimate
    return best
