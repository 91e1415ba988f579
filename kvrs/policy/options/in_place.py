"""In place: the attempt goes on at its own instance, which has lost ranks and re-forms.

ready + lost cells of the streams before it + its own lost cells + what the attempt had still to do.
"""

from collections.abc import Iterable

from kvrs.policy.model.actions import Plan
from kvrs.policy.model.cluster_view import Member
from kvrs.policy.model.estimates import Estimate, Option
from kvrs.policy.model.streams import Stream
from kvrs.policy.options.base import Books, Case, RecoveryOption, Term, lookahead_s

_IN_PLACE = Option.IN_PLACE


def estimate(case: Case, estimates: list[Estimate]) -> None:
    """Of a stream whose attempt runs at the target, if that re-forms."""
    if case.target.reforming is not None and case.stream.attempt.runs_on is case.target:
        estimates.append(estimate_stay(case.books, case.stream, case.target))


def estimate_stay(books: Books, stream: Stream, home: Member) -> Estimate:
    reforming, now_s = home.reforming, books.view.now_s
    assert reforming is not None, home
    queue_s = max(0.0, reforming.ready_s - now_s) + reforming.ahead_s
    transfer_s, compute_s = reforming.restore_s(stream.id), rest_s(stream, now_s)
    raw_s = queue_s + transfer_s + compute_s
    later_s = lookahead_s(books.settings, stream, home)
    return Estimate(
        _IN_PLACE,
        home.instance.id,
        raw_s * books.factors.get(_IN_PLACE, 1.0) + later_s,
        queue_s,
        transfer_s,
        compute_s,
        raw_s=raw_s,
        lookahead_s=later_s,
    )


def rest_s(stream: Stream, now_s: float) -> float:
    """What is left of the attempt's own prediction, if it has brought no token yet."""
    attempt = stream.attempt
    if attempt.resumed or attempt.decision is None:
        return 0.0
    chosen = attempt.decision.chosen
    if chosen.option is _IN_PLACE:  # It stays already: its wait begins anew.
        return chosen.compute_s
    return max(0.0, chosen.next_token_s - (now_s - attempt.started_s))


def plan(books: Books, stream: Stream, estimate: Estimate) -> Plan:
    assert stream.attempt.plan is not None, stream
    return stream.attempt.plan


def terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    reforming = case.target.reforming
    assert reforming is not None, estimate
    ready_s = max(0.0, reforming.ready_s - case.books.view.now_s)
    yield Term("re-form", ready_s, f"until the {estimate.target} serves again")
    yield Term("ahead", estimate.queue_s - ready_s, "lost cells of the streams before it")
    pages = reforming.missing_pages.get(case.stream.id, 0)
    yield Term("restore", estimate.transfer_s, f"lost cells of {pages:,} of its pages")
    yield Term("rest", estimate.compute_s, "what the attempt had still to do")


IN_PLACE = RecoveryOption(_IN_PLACE, estimate, plan, terms, fetches=False)
