"""Records of recoveries: the decision and its reason, its predicted cost, and its real cost."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.rules.base import best_by_option
from kvrs.ids import InstanceId, StreamId
from kvrs.process.row_log import RowLog
from kvrs.protocol.instance import FetchReport
from kvrs.protocol.stages import RestartReport
from kvrs.proxy.streams.open_stream import OpenStream
from kvrs.proxy.wire.requests import RequestContext

log = logging.getLogger(__name__)

KEPT = 1000
# Time within which a target reports what a restore of rows has loaded: its counters are read each
# second, and are final once no load is open there.
_COUNTED_WITHIN_S = 10.0
# Outcomes, in order: the first token came; the stream was decided again; the target had no slot;
# the stream ended before.
OUTCOMES = ("resumed", "failed", "denied", "ended")


@dataclass(slots=True, eq=False)
class Recovery:
    at_s: float  # Unix time of the decision, for people.
    stream: StreamId
    attempt: int
    option: Option
    failed: InstanceId | None
    target: InstanceId | None
    cause: str
    # Predicted cost: of the option alone, and once the attempt has its token, beside the other
    # victims of the event.
    predicted_s: float
    estimates: tuple[Estimate, ...]
    produced_tokens: int
    decided_s: float  # Monotonic time of the decision, by the clock of `last_write_s`.
    last_write_s: float | None
    settled: act.Settled | None = None  # The policy's record of the token; None: not resumed yet.
    # Time from the decision to the first new token; None: not resumed yet.
    real_s: float | None = None
    gap_s: float | None = (
        None  # Time from the last token before to the first after; None: no earlier token.
    )
    is_of_rows: bool = False  # The target loads rows, and reports later what it has loaded.
    source: InstanceId | None = None  # First source of fetched KV, or STORE; None: no fetch.
    outcome: str = "running"  # "running", later one of `OUTCOMES`.
    owner_epoch: int = 0
    # Tokens of the history that the target fetched and used, and that it computed, by its own
    # count. None: nothing fetched, or not counted.
    loaded_tokens: int | None = None
    computed_tokens: int | None = None
    # For an attempt that restarted in place: pages taken from a donor's replica, and recomputed
    # tokens of the history.
    adopted_pages: int | None = None
    recomputed_tokens: int | None = None
    # Other victims per target: each estimate was charged `at_target_s` for each of them.
    others: float = 0.0
    request_id: str | None = None
    # Context of the client's request while the recovery runs; then None.
    request: RequestContext | None = None

    @property
    def low_s(self) -> float | None:
        """The lower end of the predicted interval; None: not resumed yet, or not predicted."""
        return None if self.settled is None else self.settled.low_s

    @property
    def high_s(self) -> float | None:
        """The upper end of the predicted interval; None as for `low_s`."""
        return None if self.settled is None else self.settled.high_s

    def facts(self) -> dict[str, Any]:
        """Return the facts for the log: the decision, its predicted cost, and its result."""
        others: dict[str, float] = {}  # Lowest estimate of each other option, over all targets.
        for estimate in self.estimates:
            if estimate.option != self.option:
                best = others.get(estimate.option, inf)
                others[estimate.option] = min(best, estimate.total_s)
        facts = {
            "stream": self.stream,
            "request_id": self.request_id,
            "attempt": self.attempt,
            "option": self.option.value,
            "from": self.failed,
            "to": self.target,
            "cause": self.cause,
            "produced_tokens": self.produced_tokens,
            "loaded_tokens": self.loaded_tokens,
            "predicted_s": self.predicted_s,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "others_s": " ".join(f"{option}:{_short(cost)}" for option, cost in others.items()),
            "outcome": self.outcome,
            "real_s": self.real_s,
            "gap_s": self.gap_s,
        }
        return {
            name: _short(value) if isinstance(value, float) else value
            for name, value in facts.items()
            if value is not None
        }


def _resumed_s(recovery: Recovery) -> float:
    return recovery.decided_s + (recovery.real_s or 0.0)


def _compared(action: act.Recovered) -> tuple[Estimate, ...]:
    """Return the chosen estimate, and the least one of each other option.

    Estimates for all targets would take megabytes in a large cluster; the event log has them.
    """
    wanted = action.option, action.predicted_s
    found = [each for each in action.estimates if (each.option, each.next_token_s) == wanted][:1]
    rest = (each for each in action.estimates if not found or each.option is not action.option)
    return (*found, *best_by_option(rest))


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


class RecoveryLog:
    """The latest recoveries, oldest first. `settled` is called once for each recovery whose outcome
    is known.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        settled: Callable[[Recovery], None],
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._settled = settled
        # Lines are written later, because a write would delay the other streams that the same death
        # has cut.
        self._lines = RowLog(log, "recovery", wall_clock)
        self.running: dict[StreamId, Recovery] = {}
        # Restores of rows that have resumed, until it is known what they have loaded.
        self._uncounted: deque[Recovery] = deque()
        self.entries: deque[Recovery] = deque(maxlen=KEPT)

    def close(self) -> None:
        """Count what has resumed, and write the waiting lines."""
        self._count_until(inf)
        self._lines.write()

    def decided(self, action: act.Recovered, live: OpenStream) -> None:
        """Note a recovery whose attempt has just begun."""
        if action.stream in self.running:
            self.settle(action.stream, "failed")
        plan = live.attempt.plan
        recovery = Recovery(
            at_s=self._wall_clock(),
            stream=action.stream,
            attempt=action.attempt,
            option=action.option,
            failed=action.failed,
            target=None if plan is None else plan.decode,
            is_of_rows=plan is not None and bool(plan.asked) and action.option is Option.RESTORE,
            source=plan.runs[0].holder if plan is not None and plan.runs else None,
            cause=action.cause,
            predicted_s=action.predicted_s,
            estimates=_compared(action),
            others=action.others,
            produced_tokens=live.journal.produced_tokens,
            owner_epoch=live.journal.owner_epoch,
            decided_s=self._clock(),
            last_write_s=live.journal.last_write_s,
            request_id=None if live.journal.request is None else live.journal.request.id,
            request=live.journal.request,
        )
        self.running[action.stream] = recovery
        self.entries.append(recovery)

    def redirected(self, live: OpenStream) -> None:
        """Note that the attempt of a recovery has moved to another decode instance."""
        if (recovery := self.running.get(live.id)) is not None and (plan := live.attempt.plan):
            recovery.target = plan.decode

    def predicted(self, action: act.Settled) -> None:
        """Note the policy's prediction for a recovery that is about to be `resumed`."""
        recovery = self.running.get(action.stream)
        if recovery is not None and recovery.attempt == action.attempt:
            recovery.settled, recovery.predicted_s = action, action.predicted_s

    def resumed(self, stream: StreamId, attempt: int) -> None:
        recovery = self.running.get(stream)
        if recovery is None or recovery.attempt != attempt:
            return
        # The token is from before the re-forming, and says nothing about the recovery.
        if recovery.option.stays and recovery.settled is None:
            return
        now_s = self._clock()
        recovery.real_s = now_s - recovery.decided_s
        if recovery.last_write_s is not None:
            recovery.gap_s = now_s - recovery.last_write_s
        self.settle(stream, "resumed")

    def gaps_since(self, since_s: float) -> list[float]:
        """Return the pauses that ended after `since_s`."""
        return [
            each.gap_s
            for each in self.entries
            if each.gap_s is not None
            and each.real_s is not None
            and each.decided_s + each.real_s > since_s
        ]

    def fetched(self, fetches: Iterable[FetchReport]) -> None:
        """Note the targets' reports of fetches. A report may come several times, before or after
        the first token.
        """
        self._count_until(self._clock() - _COUNTED_WITHIN_S)
        for fetch in fetches:
            name = fetch.stream, fetch.owner_epoch, fetch.attempt
            for each in reversed(self.entries):
                if (each.stream, each.owner_epoch, each.attempt) == name:
                    each.loaded_tokens = fetch.loaded_tokens
                    each.computed_tokens = fetch.computed_tokens
                    break

    def loaded(self, action: act.RowsLoaded) -> None:
        """Note what the policy has booked a restore of rows as, which is then counted."""
        for each in [*self._uncounted]:
            if (each.stream, each.attempt) == (action.stream, action.attempt):
                self._uncounted.remove(each)
                each.option = action.option
                self._count(each)

    def _count_until(self, resumed_s: float) -> None:
        """Count the restores that resumed before this time as what they were planned as: their
        target has not reported what it has loaded.
        """
        while self._uncounted and _resumed_s(self._uncounted[0]) <= resumed_s:
            self._count(self._uncounted.popleft())

    def _count(self, recovery: Recovery) -> None:
        self._settled(recovery)
        self._lines.add(recovery.facts())

    def restarted(self, restarts: Iterable[RestartReport]) -> None:
        """Note instances' reports of restarted attempts, which may come several times, like those
        of `fetched`.
        """
        for restart in restarts:
            name = restart.stream, restart.owner_epoch, restart.attempt
            for each in reversed(self.entries):
                if each.option.stays and (each.stream, each.owner_epoch, each.attempt) == name:
                    each.adopted_pages = restart.adopted_pages
                    each.recomputed_tokens = restart.recomputed_tokens
                    break

    def rejected(self, stream: StreamId) -> None:
        """Note that the stream was retried only to learn that its request is at fault."""
        if (recovery := self.running.pop(stream, None)) is not None:
            with suppress(ValueError):  # The recovery may be too old to be kept still.
                self.entries.remove(recovery)

    def settle(self, stream: StreamId, outcome: str) -> None:
        """Note the outcome of a running recovery; do nothing for other streams."""
        if (recovery := self.running.pop(stream, None)) is not None:
            recovery.outcome = outcome
            if recovery.is_of_rows and outcome == "resumed":
                self._uncounted.append(recovery)
            else:
                self._count(recovery)
            request, recovery.request = recovery.request, None
            if request is not None and request.trace is not None:
                request.trace.recovered(recovery, self._clock())
