"""Records of a proxy's recoveries: the decision and its reason, its predicted cost, and its real
cost. They are the decisions of the book of incidents, with what the proxy alone knows of them.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from kvrs.core.incidents import AttemptEnd, Incidents, Moment, RecordedDecision
from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.rules.base import best_by_option
from kvrs.ids import InstanceId, StreamId
from kvrs.process.row_log import RowLog
from kvrs.protocol.instance import FetchReport, RestartReport
from kvrs.proxy.streams.metrics import RecoveryMetrics
from kvrs.proxy.streams.open_stream import OpenStream
from kvrs.proxy.wire.requests import RequestContext

log = logging.getLogger(__name__)

KEPT = 1000
INCIDENTS_KEPT = 100
# Time within which a target reports what a restore of rows has loaded: its counters are read each
# second, and are final once no load is open there.
_COUNTED_WITHIN_S = 10.0


@dataclass(slots=True, eq=False, kw_only=True)
class Recovery(RecordedDecision):
    action: act.Recovered
    # Plan of the attempt that stays at its instance; None: another attempt begins, by `new_plan`.
    stays_by: act.Plan | None = None
    # Stream, owner epoch and attempt, by which instances report what the attempt does.
    name: tuple[StreamId, int, int]
    produced_tokens: int
    # Time of the last token before; None: no earlier token.
    last_write_s: float | None
    end: AttemptEnd | None = None  # None: it runs.
    # Tokens of the history that the target fetched and used, and that it computed, by its own
    # count. None: nothing fetched, or not counted.
    loaded_tokens: int | None = None
    computed_tokens: int | None = None
    # For an attempt that restarted in place: pages taken from a donor's replica, and recomputed
    # tokens of the history.
    adopted_pages: int | None = None
    recomputed_tokens: int | None = None
    request_id: str | None = None
    # Context of the client's request while the recovery runs; then None.
    request: RequestContext | None = None

    @property
    def option(self) -> Option:
        """The option that it is booked as."""
        return self.action.option if self.loaded is None else self.loaded.option

    @property
    def plan(self) -> act.Plan | None:
        return self.stays_by if self.new_plan is None else self.new_plan

    @property
    def target(self) -> InstanceId | None:
        return None if self.plan is None else self.plan.decode

    @property
    def source(self) -> InstanceId | None:
        """The first source of fetched KV, or STORE; None: no fetch."""
        return None if self.plan is None or not self.plan.runs else self.plan.runs[0].holder

    @property
    def is_of_rows(self) -> bool:
        """Return whether the target loads rows, and reports later what it has loaded."""
        plan, option = self.new_plan, self.action.option
        return plan is not None and bool(plan.asked) and option is Option.RESTORE

    @property
    def real_s(self) -> float | None:
        """The time from the decision to the first new token; None: not resumed yet."""
        return None if self.settled is None else self.settled.real_s

    @property
    def resumed_s(self) -> float:
        return self.at.now_s + (self.real_s or 0.0)

    @property
    def gap_s(self) -> float | None:
        """The time from the last token before to the first after; None: one of them is missing."""
        if self.settled is None or self.last_write_s is None:
            return None
        return self.resumed_s - self.last_write_s

    @property
    def outcome_name(self) -> str:
        return "running" if self.end is None else self.end.value

    def facts(self) -> dict[str, Any]:
        """Return the facts for the log: the decision, its predicted cost, and its result."""
        action, settled = self.action, self.settled
        others: dict[str, float] = {}  # Lowest estimate of each other option, over all targets.
        for estimate in least_estimates(action):
            if estimate.option != self.option:
                best = others.get(estimate.option, inf)
                others[estimate.option] = min(best, estimate.total_s)
        facts = {
            "stream": action.stream,
            "request_id": self.request_id,
            "attempt": action.attempt,
            "option": self.option.value,
            "from": action.failed,
            "to": self.target,
            "cause": action.cause,
            "produced_tokens": self.produced_tokens,
            "loaded_tokens": self.loaded_tokens,
            "predicted_s": self.predicted_s,
            "low_s": None if settled is None else settled.low_s,
            "high_s": None if settled is None else settled.high_s,
            "others_s": " ".join(f"{option}:{_short(cost)}" for option, cost in others.items()),
            "outcome": self.outcome_name,
            "real_s": self.real_s,
            "gap_s": self.gap_s,
        }
        return {
            name: _short(value) if isinstance(value, float) else value
            for name, value in facts.items()
            if value is not None
        }


def least_estimates(action: act.Recovered) -> tuple[Estimate, ...]:
    """Return the chosen estimate, and the least one of each other option."""
    wanted = action.option, action.predicted_s
    found = [each for each in action.estimates if (each.option, each.next_token_s) == wanted][:1]
    rest = (each for each in action.estimates if not found or each.option is not action.option)
    return (*found, *best_by_option(rest))


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


class RecoveryLog(Incidents):
    """The incidents of a proxy and its latest recoveries, which are counted and logged once their
    outcome is known.
    """

    def __init__(
        self,
        streams: Mapping[StreamId, OpenStream],
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        metrics: RecoveryMetrics,
    ) -> None:
        super().__init__(INCIDENTS_KEPT)
        self._streams = streams
        self._clock = clock
        self._metrics = metrics
        # Lines are written later, because a write would delay the other streams that the same death
        # has cut.
        self._lines = RowLog(log, "recovery", wall_clock)
        # Restores of rows that have resumed, until it is known what they have loaded.
        self._uncounted: deque[Recovery] = deque()
        self.latest: deque[Recovery] = deque(maxlen=KEPT)  # Oldest first.

    def close(self) -> None:
        """Count what has resumed, and write the waiting lines."""
        self._count_until(inf)
        self._lines.write()

    def decided(
        self, line: int, at: Moment, action: act.Recovered, plan: act.Plan | None
    ) -> RecordedDecision:
        live = self._streams.get(action.stream)
        if live is None:  # The stream has ended, and the policy is yet to be told.
            return super().decided(line, at, action, plan)
        journal = live.journal
        recovery = Recovery(
            line=line,
            at=at,
            action=action,
            new_plan=plan,
            stays_by=live.attempt.plan if plan is None else None,
            name=(action.stream, journal.owner_epoch, action.attempt),
            produced_tokens=journal.produced_tokens,
            last_write_s=journal.last_write_s,
            request_id=None if journal.request is None else journal.request.id,
            request=journal.request,
        )
        self.latest.append(recovery)
        return recovery

    def ended(self, decision: RecordedDecision, end: AttemptEnd) -> None:
        if not isinstance(decision, Recovery) or decision.end is not None:
            return
        decision.end = end
        request, decision.request = decision.request, None
        if end is AttemptEnd.REJECTED:
            with suppress(ValueError):  # The recovery may be too old to be kept still.
                self.latest.remove(decision)
            return
        if decision.is_of_rows and end is AttemptEnd.RESUMED:
            self._uncounted.append(decision)
        else:
            self._report(decision)
        if request is not None and request.trace is not None:
            request.trace.recovered(decision, self._clock())

    def loaded(self, action: act.RowsLoaded) -> None:
        """Note also what the policy has booked the restore as, which is then counted."""
        super().loaded(action)
        for each in [*self._uncounted]:
            if (each.action.stream, each.action.attempt) == (action.stream, action.attempt):
                self._uncounted.remove(each)
                each.loaded = action
                self._report(each)

    def gaps_since(self, since_s: float) -> list[float]:
        """Return the pauses that ended after `since_s`."""
        gaps_s = ((each.gap_s, each.resumed_s) for each in self.latest)
        return [gap_s for gap_s, at_s in gaps_s if gap_s is not None and at_s > since_s]

    def fetched(self, fetches: Iterable[FetchReport]) -> None:
        """Note the targets' reports of fetches. A report may come several times, before or after
        the first token.
        """
        self._count_until(self._clock() - _COUNTED_WITHIN_S)
        for fetch in fetches:
            name = fetch.stream, fetch.owner_epoch, fetch.attempt
            for each in reversed(self.latest):
                if each.name == name:
                    each.loaded_tokens = fetch.loaded_tokens
                    each.computed_tokens = fetch.computed_tokens
                    break

    def restarted(self, restarts: Iterable[RestartReport]) -> None:
        """Note instances' reports of restarted attempts, which may come several times, like those
        of `fetched`.
        """
        for restart in restarts:
            name = restart.stream, restart.owner_epoch, restart.attempt
            for each in reversed(self.latest):
                if each.action.option.stays and each.name == name:
                    each.adopted_pages = restart.adopted_pages
                    each.recomputed_tokens = restart.recomputed_tokens
                    break

    def _count_until(self, resumed_s: float) -> None:
        """Count the restores that resumed before this time as what they were planned as: their
        target has not reported what it has loaded.
        """
        while self._uncounted and self._uncounted[0].resumed_s <= resumed_s:
            self._report(self._uncounted.popleft())

    def _report(self, recovery: Recovery) -> None:
        self._metrics.count(recovery.option, recovery.outcome_name, recovery.settled)
        self._lines.add(recovery.facts())
