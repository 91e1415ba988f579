"""Incidents of an event log: losses, the decision for each stream, and the real cost of each
decision. Requests that were at fault themselves are no incidents.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.event_log import LogEntry
from kvrs.policy.model.actions import GiveUp, PageRange, Plan, Reason, Recovered, Settled, Start
from kvrs.policy.model.estimates import Estimate, Option
from kvrs.policy.model.events import AttemptFailed, FailureKind, HolderLost, InstanceLost


@dataclass(frozen=True, slots=True)
class Loss:
    line: int
    at_s: float
    instance: InstanceId  # Or the agent.
    cause: str
    stream: StreamId | None  # Of an attempt that broke alone; None: the instance or agent is lost.
    is_refusal: bool = False  # Of an attempt, by a 4xx.


@dataclass(slots=True)
class RecordedDecision:
    line: int
    at_s: float
    action: Recovered | GiveUp
    plan: Plan | None  # None: the stream was given up, or stayed where it was.
    settled: Settled | None = None  # None: the attempt, or the log, ended before a token.
    after_refusal: bool = False  # The attempt before was refused.


def incidents(entries: Iterable[LogEntry]) -> list[Loss | RecordedDecision]:
    """In the order in which they happened."""
    happened: list[Loss | RecordedDecision] = []
    open_: dict[tuple[StreamId, int], RecordedDecision] = {}
    refused: set[StreamId] = set()  # Their last failure was a refusal.
    rejected: set[StreamId] = set()  # Their requests were at fault.
    for entry in entries:
        if (loss := _loss(entry)) is not None:
            happened.append(loss)
            if loss.stream is not None:
                (refused.add if loss.is_refusal else refused.discard)(loss.stream)
        if isinstance(entry.event, InstanceLost):
            refused.difference_update(entry.event.produced_tokens)
        plans = {
            (start.stream, start.attempt): start.plan
            for start in entry.actions
            if isinstance(start, Start)
        }
        for action in entry.actions:
            if isinstance(action, Recovered):
                attempt = action.stream, action.attempt
                decision = RecordedDecision(
                    entry.line,
                    entry.now_s,
                    action,
                    plans.get(attempt),
                    after_refusal=action.stream in refused,
                )
                open_[attempt] = decision
                happened.append(decision)
            elif isinstance(action, GiveUp):
                if action.reason is Reason.REFUSED:
                    rejected.add(action.stream)
                happened.append(RecordedDecision(entry.line, entry.now_s, action, None))
            elif isinstance(action, Settled):
                attempt = action.stream, action.attempt
                if attempt in open_:
                    open_.pop(attempt).settled = action
    return [each for each in happened if not _is_about_a_request(each, rejected)]


def _is_about_a_request(each: Loss | RecordedDecision, rejected: set[StreamId]) -> bool:
    """True if it came of the fault of a request, and no instance is to blame."""
    if isinstance(each, Loss):
        return each.is_refusal and each.stream in rejected
    is_over = isinstance(each.action, GiveUp)
    return each.action.stream in rejected and (is_over or each.after_refusal)


def _loss(entry: LogEntry) -> Loss | None:
    event = entry.event
    if isinstance(event, InstanceLost):
        return Loss(entry.line, entry.now_s, event.instance, event.cause, None)
    if isinstance(event, HolderLost):
        return Loss(entry.line, entry.now_s, event.holder, event.cause, None)
    if isinstance(event, AttemptFailed):
        is_refusal = event.failure is FailureKind.REFUSED
        return Loss(entry.line, entry.now_s, event.instance, event.cause, event.stream, is_refusal)
    return None


def chosen_of(decision: RecordedDecision) -> Estimate | None:
    """The estimate that was carried out; None: the stream was given up."""
    action, plan = decision.action, decision.plan
    if isinstance(action, GiveUp):
        return None
    target = action.failed if plan is None else plan.decode
    taken = (
        e
        for e in action.estimates
        if (e.option, e.target, e.next_token_s) == (action.option, target, action.predicted_s)
    )
    return next(taken, None)


def waited_of(decision: RecordedDecision) -> float | None:
    """What the chosen estimate was charged for the wait of other victims; None: nothing was."""
    action, chosen = decision.action, chosen_of(decision)
    if isinstance(action, GiveUp) or chosen is None or not action.others:
        return None
    return chosen.wait_of_others_s(action.others)


def others_of(decision: RecordedDecision) -> dict[Option, float]:
    """Every other option with its least predicted cost at any target, the cheapest first."""
    action = decision.action
    if isinstance(action, GiveUp):
        return {}
    best: dict[Option, float] = {}
    for estimate in action.estimates:
        if estimate.option is not action.option:
            best[estimate.option] = min(
                estimate.total_s, best.get(estimate.option, estimate.total_s)
            )
    return dict(sorted(best.items(), key=lambda item: item[1]))


def way_of(decision: RecordedDecision) -> str:
    """How the stream was brought back: option, source, target."""
    action, plan = decision.action, decision.plan
    if isinstance(action, GiveUp):
        return Option.ABORT.value
    if plan is None:
        return f"{action.option.value} at {action.failed}"
    if plan.prefill is not None:
        return f"{action.option.value} at {plan.prefill}, to {plan.decode}"
    runs = ", ".join(map(_run, plan.runs))
    return f"{action.option.value} to {plan.decode}" + (f" from {runs}" if runs else "")


def _run(run: PageRange) -> str:
    return f"{run.holder} [{run.first_page}, {run.first_page + run.pages})"
