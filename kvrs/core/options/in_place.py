"""The in-place option: the attempt goes on at its own instance, which has lost ranks and re-forms.

The estimate is: time until the instance is ready + one decode step. A stream that has lost KV cells
or has not produced a token also pays for the restores before its own, its own restore, and the
rest of its attempt's own work.

Substitute is the same option of an instance that has lost the host of a pipeline stage, and borrows
the same stage of another instance: that costs a session and the lost cells, where a new host costs
loading the weights.
"""

from collections.abc import Iterable

from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.reforming import PredictedReforming
from kvrs.core.model.streams import Stream
from kvrs.core.options.base import Case, RecoveryOption, Term, lookahead_s
from kvrs.core.state import State


def estimate(case: Case, estimates: list[Estimate]) -> None:
    """Append an estimate if the stream's attempt runs at the target and the target re-forms."""
    if case.target.reforming is not None and case.stream.attempt.runs_on is case.target:
        estimates.append(estimate_stay(case.state, case.stream, case.target))


def estimate_stay(state: State, stream: Stream, home: Member) -> Estimate:
    reforming, now_s = home.reforming, state.view.now_s
    assert reforming is not None, home
    queue_s = max(0.0, reforming.ready_s - now_s) + reforming.step_s
    transfer_s, compute_s = reforming.restore_s(stream.id), rest_s(stream, reforming, now_s)
    if transfer_s or compute_s:  # A stream with nothing to restore waits for no other stream.
        queue_s += reforming.ahead_s
    later_s = lookahead_s(stream, home)
    return Estimate(
        reforming.option,
        home.id,
        queue_s + transfer_s + compute_s + later_s,
        queue_s,
        transfer_s,
        compute_s,
        at_target_s=transfer_s + compute_s,
        lookahead_s=later_s,
    )


def rest_s(stream: Stream, reforming: PredictedReforming, now_s: float) -> float:
    """Return the predicted rest of the attempt's work before its first token; 0 if it has produced
    a token.
    """
    attempt = stream.attempt
    if attempt.decision is None:
        return 0.0
    chosen, deadline = attempt.decision.chosen, attempt.stay_deadline
    left_s = max(0.0, chosen.next_token_s - (now_s - attempt.started_s))
    if not chosen.option.stays:
        return left_s
    if deadline is not None and deadline.number == reforming.report.number:
        # A new report of the same re-forming predicts the other times anew.
        return chosen.compute_s
    # The stream stayed through an earlier re-forming whose restores are not finished.
    return min(left_s, chosen.transfer_s + chosen.compute_s)


def plan(state: State, stream: Stream, estimate: Estimate) -> act.Plan:
    assert stream.attempt.plan is not None, stream
    return stream.attempt.plan


def terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    reforming = case.target.reforming
    assert reforming is not None, estimate
    ready_s = max(0.0, reforming.ready_s - case.state.view.now_s)
    yield Term("re-form", ready_s, f"until the {estimate.target} serves again")
    yield Term("step", reforming.step_s, "of decoding with the remaining ranks")
    ahead_s = estimate.queue_s - ready_s - reforming.step_s
    yield Term("ahead", ahead_s, "lost cells of the streams before this stream")
    pages, held = reforming.pages_of(case.stream.id)
    what = f"lost cells of {held:,} fetched pages, and {pages - held:,} computed pages"
    yield Term("restore", estimate.transfer_s, what)
    yield Term("rest", estimate.compute_s, "rest of the attempt's own work")


IN_PLACE = RecoveryOption(Option.IN_PLACE, estimate, plan, terms, fetches=False)
SUBSTITUTE = RecoveryOption(Option.SUBSTITUTE, estimate, plan, terms, fetches=False)
