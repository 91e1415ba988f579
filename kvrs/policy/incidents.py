"""What an event log says of incidents: who was lost, what was decided for each stream, and what that really took."""

from collections.abc import Iterable
from dataclasses import dataclass

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import GiveUp, Plan, Recovered, Run, Settled, Start
from kvrs.policy.costs import Estimate, Option
from kvrs.policy.event_log import Entry
from kvrs.policy.events import AttemptFailed, HolderLost, InstanceLost


@dataclass(frozen=True, slots=True)
class Loss:
    line: int
    at_s: float
    who: InstanceId
    cause: str
    stream: StreamId | None  # Of an attempt that broke by itself; None: the instance or agent is gone.


@dataclass(slots=True)
class Decision:
    line: int
    at_s: float
    action: Recovered | GiveUp
    plan: Plan | None  # None: the stream was given up.
    settled: Settled | None = None  # None: the attempt brought no token before it, or the log, ended.


def incidents(entries: Iterable[Entry]) -> list[Loss | Decision]:
    """In the order in which they happened."""
    happened: list[Loss | Decision] = []
    open_: dict[tuple[StreamId, int], Decision] = {}
    for entry in entries:
        match entry.event:
            case InstanceLost(instance=who, cause=cause) | HolderLost(holder=who, cause=cause):
                happened.append(Loss(entry.line, entry.now_s, who, cause, None))
            case AttemptFailed(instance=who, cause=cause, stream=stream):
                happened.append(Loss(entry.line, entry.now_s, who, cause, stream))
        plans = {(start.stream, start.attempt): start.plan for start in entry.actions if isinstance(start, Start)}
        for action in entry.actions:
            match action:
                case Recovered():
                    attempt = action.stream, action.attempt
                    open_[attempt] = decision = Decision(entry.line, entry.now_s, action, plans.get(attempt))
                    happened.append(decision)
                case GiveUp():
                    happened.append(Decision(entry.line, entry.now_s, action, None))
                case Settled():
                    if (settled := open_.pop((action.stream, action.attempt), None)) is not None:
                        settled.settled = action
    return happened


def chosen_of(decision: Decision) -> Estimate | None:
    """The estimate that was taken; None: there was none."""
    action, plan = decision.action, decision.plan
    if isinstance(action, GiveUp) or plan is None:
        return None
    taken = (e for e in action.estimates if (e.option, e.target, e.total_s) == (action.option, plan.decode, action.predicted_s))
    return next(taken, None)


def others_of(decision: Decision) -> dict[Option, float]:
    """Every option that was not taken, with the least that it was predicted to cost at any target; the cheapest first."""
    action = decision.action
    if isinstance(action, GiveUp):
        return {}
    best: dict[Option, float] = {}
    for estimate in action.estimates:
        if estimate.option is not action.option:
            best[estimate.option] = min(estimate.total_s, best.get(estimate.option, estimate.total_s))
    return dict(sorted(best.items(), key=lambda item: item[1]))


def way_of(decision: Decision) -> str:
    """How the stream was brought back: option, from whom, to whom."""
    action, plan = decision.action, decision.plan
    if isinstance(action, GiveUp) or plan is None:
        return Option.ABORT.value
    if plan.prefill is not None:
        return f"{action.option.value} at {plan.prefill}, to {plan.decode}"
    runs = ", ".join(map(_run, plan.runs))
    return f"{action.option.value} to {plan.decode}" + (f" from {runs}" if runs else "")


def _run(run: Run) -> str:
    return f"{run.holder} [{run.first_page}, {run.first_page + run.pages})"
