"""Incidents of one proxy: what was lost or failed, what became of the streams there, and the
sentence that says it.

Pure. `Incidents` reads a policy's events with its actions: in `kvrs incidents` all of an event log,
in a proxy (`RecoveryLog`) those that `Control` shows. A request that is at fault itself is no
incident.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum, StrEnum, auto
from itertools import chain
from math import isfinite
from typing import NamedTuple

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Estimate, Option, real_over_predicted
from kvrs.ids import InstanceId, StreamId

# Failures of one instance belong to one incident if each follows the one before within this time.
TOGETHER_S = 10.0
_LOST = "connection lost"


class Moment(NamedTuple):
    now_s: float  # By the clock of the events.
    wall_s: float | None  # Unix time; None: the log has none.

    @property
    def utc(self) -> datetime | None:
        return None if self.wall_s is None else datetime.fromtimestamp(self.wall_s, UTC)

    def __str__(self) -> str:
        return f"at {self.now_s:.3f} s" if self.utc is None else f"{self.utc:%Y-%m-%d %H:%M:%S} UTC"


class IncidentKind(Enum):
    DIED = auto()
    ENDED = auto()  # The process was lost after a drain.
    FAILED = auto()  # Attempts failed at the instance.
    MOVED = auto()  # Streams were moved from the instance, or stayed while it re-formed.
    GIVEN_UP = auto()  # New requests that nothing could serve.


class Fate(StrEnum):
    """State or end of a stream that an incident has hit."""

    BACK = "back"
    LOST = "lost"
    LEFT = "left"  # The client has left meanwhile.
    RUNNING = "running"  # The client has no new token yet.


_WORDS = {Fate.BACK: "back", Fate.LOST: "lost", Fate.LEFT: "cancelled", Fate.RUNNING: "recovering"}


class Loss(NamedTuple):
    line: int
    at: Moment
    instance: InstanceId  # The instance or agent that was lost, or at which an attempt failed.
    cause: str
    stream: StreamId | None  # The stream of the attempt; None: the whole process was lost.
    is_refusal: bool = False  # The instance refused the attempt (HTTP 4xx).


class AttemptEnd(StrEnum):
    """End of the attempt that a recovery began."""

    RESUMED = "resumed"  # The first token has come.
    FAILED = "failed"  # The stream was decided again.
    DENIED = "denied"  # The target had no slot.
    ENDED = "ended"  # The stream ended before.
    REJECTED = "rejected"  # The attempt has only shown that its request is at fault.


class OptionCost(NamedTuple):
    """An option's best estimate, as the policy compared it."""

    option: Option
    predicted_s: float  # Until the stream's next token.
    # Charged besides: the time that other victims wait, and slower tokens later.
    extra_s: float
    is_chosen: bool
    excluded: str  # Cause for which it could not be chosen; empty: it could.


@dataclass(slots=True, eq=False)
class RecordedDecision:
    """A decision about a stream that was hit. A proxy's records extend it (`Recovery`)."""

    line: int
    at: Moment
    action: act.Recovered | act.GiveUp
    # None: the stream was given up, or stayed at its instance.
    new_plan: act.Plan | None
    # Result of the decision; None: no token came before the attempt or the log ended.
    settled: act.Settled | None = None
    # Tokens that a restore of rows has loaded; None: another option, or its target has not
    # counted them.
    loaded: act.RowsLoaded | None = None
    retried_for: str = ""  # Cause for which the stream was decided again; empty: it was not.
    # Agents that were lost and not up again, if restore was not weighed: why it may be missing.
    agents_down: tuple[InstanceId, ...] = ()

    @property
    def option(self) -> str:
        if self.loaded is not None:
            return self.loaded.option.value
        return "given up" if isinstance(self.action, act.GiveUp) else self.action.option.value

    @property
    def cause(self) -> str:
        return self.action.message if isinstance(self.action, act.GiveUp) else self.action.cause

    @property
    def way(self) -> str:
        """The recovery in words: its option, source and target."""
        action, plan = self.action, self.new_plan
        if isinstance(action, act.GiveUp):
            return self.option
        if plan is None:
            return f"{action.option.value} at {action.failed}"
        if plan.prefill is not None:
            return f"{action.option.value} at {plan.prefill}, to {plan.decode}"
        if (loaded := self.loaded) is not None and loaded.option is not action.option:
            found = f"{loaded.loaded_tokens:,} of {loaded.expected_tokens:,} tokens"
            return (
                f"{loaded.option.value} at {plan.decode}: {found} were loaded from "
                f"{', '.join(loaded.asked)}"
            )
        runs = ", ".join(map(_run, plan.runs))
        return f"{action.option.value} to {plan.decode}" + (f" from {runs}" if runs else "")

    @property
    def predicted_s(self) -> float | None:
        """The predicted cost: of the option alone, and once the stream is back, beside the other
        victims; None: the stream was given up.
        """
        if self.settled is not None:
            return self.settled.predicted_s
        return None if isinstance(self.action, act.GiveUp) else self.action.predicted_s

    @property
    def interval_factor(self) -> float | None:
        """The factor from a prediction to the ends of its interval when this was decided; None: not
        known.
        """
        settled = self.settled
        if settled is None or not settled.high_s or settled.predicted_s <= 0:
            return None
        return settled.high_s / settled.predicted_s

    @property
    def off(self) -> float | None:
        """The factor from the predicted cost to the real one; None: not known."""
        if self.settled is None or not isfinite(self.settled.predicted_s):
            return None
        return real_over_predicted(self.settled.predicted_s, self.settled.real_s)

    def interval(self, cost_s: float | None) -> tuple[float, float] | None:
        """Return the interval of a cost that was predicted for this decision; None: not known."""
        factor = self.interval_factor
        return None if cost_s is None or factor is None else (cost_s / factor, cost_s * factor)

    def outcome(self, victim: "HitStream") -> str:
        if self.settled is not None:
            return "back"
        return "tried again" if self.retried_for else victim.fate.value

    @property
    def chosen(self) -> Estimate | None:
        """The estimate that was chosen; None: the stream was given up."""
        if isinstance(action := self.action, act.GiveUp):
            return None
        wanted = action.option, action.predicted_s
        found = (each for each in action.estimates if (each.option, each.next_token_s) == wanted)
        return next(found, None)

    @property
    def costs(self) -> list[OptionCost]:
        """Costs of the options, the cheapest first."""
        action = self.action
        if isinstance(action, act.GiveUp):
            return []
        chosen = self.chosen
        found = [
            OptionCost(
                each.option,
                each.next_token_s,
                each.lookahead_s + each.wait_of_others_s(action.others),
                each is chosen,
                action.excluded.get(each.option, ""),
            )
            for each in compared(action, chosen)
        ]
        return sorted(found, key=lambda each: each.predicted_s + each.extra_s)


def off_words(off: float | None) -> str | None:
    """Say how far a real cost is from the predicted one, given the factor between them."""
    if off is None:
        return None
    factor = f"x{max(off, 1 / off):.3g}"
    return factor if factor == "x1" else f"{factor} {'longer' if off > 1 else 'shorter'}"


def _run(run: act.PageRange) -> str:
    return f"{run.holder} [{run.first_page}, {run.first_page + run.pages})"


def compared(action: act.Recovered, chosen: Estimate | None) -> list[Estimate]:
    """Return one estimate for each option: the chosen one, and of the other options the cheapest
    over all targets, with the wait of other victims.
    """
    best: dict[Option, Estimate] = {} if chosen is None else {chosen.option: chosen}
    for it in sorted(action.estimates, key=lambda e: e.total_s + e.wait_of_others_s(action.others)):
        best.setdefault(it.option, it)
    return [*best.values()]


def brief(action: act.Recovered) -> act.Recovered:
    """Return the decision with the estimates that are shown: the chosen one, and of each other
    option the cheapest over all targets, alone and with the wait of other victims.

    Estimates for all targets would take megabytes in a large cluster; the event log has them.
    """
    chosen: Estimate | None = None
    alone: dict[Option, Estimate] = {}
    beside: dict[Option, tuple[float, Estimate]] = {}
    for each in action.estimates:
        cost_s = each.total_s + each.at_target_s * (action.others or each.waiting)
        if each.option not in alone or each.total_s < alone[each.option].total_s:
            alone[each.option] = each
        if each.option not in beside or cost_s < beside[each.option][0]:
            beside[each.option] = cost_s, each
        if not chosen and (each.option, each.next_token_s) == (action.option, action.predicted_s):
            chosen = each
    if chosen is not None:
        alone[chosen.option], beside[chosen.option] = chosen, (0.0, chosen)
    kept: dict[Option, list[Estimate]] = {option: [] for option in alone}
    for each in action.estimates:
        if each is alone[each.option] or each is beside[each.option][1]:
            kept[each.option].append(each)
    return msgspec.structs.replace(action, estimates=tuple(chain.from_iterable(kept.values())))


@dataclass(slots=True, eq=False)
class HitStream:
    """A stream that an incident has hit."""

    stream: StreamId
    fate: Fate = Fate.RUNNING
    pause_s: float | None = None  # Pause that its client saw; None: not back, or no token before.
    decisions: list[RecordedDecision] = field(default_factory=list)
    is_refused: bool = False  # All its failures so far were refusals.


@dataclass(slots=True, eq=False)
class Incident:
    number: int  # Counts the incidents of this proxy from 1.
    at: Moment
    subject: InstanceId | None  # The instance or agent; None: none.
    kind: IncidentKind
    why: str  # Cause of the first failure, or of the loss.
    last_s: float
    is_agent: bool = False
    losses: list[Loss] = field(default_factory=list)
    victims: dict[StreamId, HitStream] = field(default_factory=dict)
    fates: Counter[Fate] = field(default_factory=Counter)  # Numbers of all streams.
    not_loaded: int = 0  # Restores that loaded less than half of what was expected.
    failed_attempts: int = 0  # Attempts that failed at the subject.
    longest_pause_s: float | None = None
    up: Moment | None = None  # Time at which a new process was up; None: not yet.
    exit: str = ""  # End of the process, as its supervisor reports it.

    @property
    def is_loss(self) -> bool:
        return self.kind in (IncidentKind.DIED, IncidentKind.ENDED)

    @property
    def is_over(self) -> bool:
        return not self.fates[Fate.RUNNING] and (self.up is not None or not self.is_loss)

    def takes(self, now_s: float) -> bool:
        """Return whether a failure of the same instance, or its loss, belongs to this incident."""
        return self.is_loss or now_s - self.last_s < TOGETHER_S

    def note_pause(self, pause_s: float | None) -> None:
        if pause_s is not None:
            self.longest_pause_s = max(pause_s, self.longest_pause_s or 0.0)


def sentence(incident: Incident) -> str:
    """Describe an incident in one sentence, without its time."""
    return "; ".join([_head(incident), *_streams(incident), *_end(incident)])


def _head(incident: Incident) -> str:
    subject, cause = incident.subject, incident.why
    match incident.kind:
        case IncidentKind.DIED | IncidentKind.ENDED:
            verb = "died" if incident.kind is IncidentKind.DIED else "shut down as announced"
            if cause.startswith(_LOST):  # The rest depends on what each connection was doing.
                cause = _LOST
            return f"{subject} {verb}: {cause}" + (f" ({incident.exit})" if incident.exit else "")
        case IncidentKind.FAILED:
            many = (
                f"{incident.failed_attempts} attempts"
                if incident.failed_attempts != 1
                else "1 attempt"
            )
            return f"{subject} failed {many}: {cause}"
        case IncidentKind.MOVED if subject is not None and subject not in cause:
            return f"{subject}: {cause.removeprefix('moved: ')}"
        case _:
            return cause


def _streams(incident: Incident) -> Iterator[str]:
    count = incident.fates.total()
    if incident.kind is IncidentKind.GIVEN_UP:
        yield f"{count} {'request' if count == 1 else 'requests'} given up"
        return
    if not count:
        if not incident.is_agent:  # No stream runs at an agent.
            yield "no streams affected"
        return
    streams = f"{count} {'stream' if count == 1 else 'streams'}"
    fates = [(fate, n) for fate in Fate if (n := incident.fates[fate])]
    if len(fates) == 1:
        yield f"{streams}, {'all ' if count > 1 else ''}{_WORDS[fates[0][0]]}"
    else:
        yield f"{streams}: " + ", ".join(f"{n} {_WORDS[fate]}" for fate, n in fates)
    if many := incident.not_loaded:
        yield f"{many} {'restore' if many == 1 else 'restores'} loaded less than half"
    if (pause_s := incident.longest_pause_s) is not None:
        yield f"{'pause' if count == 1 else 'longest pause'} {pause_s:.2f} s"


def _end(incident: Incident) -> Iterator[str]:
    if not incident.is_loss:
        return
    if (up := incident.up) is None:
        yield "still down"
    elif up.utc is None:
        yield f"up again after {up.now_s - incident.at.now_s:.1f} s"
    else:
        yield f"up again {up.utc:%H:%M:%S}"


# Streams of an incident whose decisions a proxy keeps; the others are counted.
MOST_STREAMS = 100

_Plans = Mapping[tuple[StreamId, int], act.Plan]  # By stream and attempt.


class Incidents:
    """The incidents of a proxy, oldest first. `saved` counts streams by their fate."""

    def __init__(self, most: int | None = None) -> None:
        """`most`: number of incidents that are kept, with the main facts of their streams; None:
        all, with all facts.
        """
        self.entries: deque[Incident] = deque(maxlen=most)
        self.fates: Counter[Fate] = Counter()  # Streams since the start, each once per recovery.
        self._is_brief = most is not None
        self._count = 0
        # The incident that further failures of an instance, or of a kind, belong to.
        self._open: dict[InstanceId | act.Reason | None, Incident] = {}
        # Streams that are being recovered, each with the incidents that have hit it.
        self.hit: dict[StreamId, list[tuple[Incident, HitStream]]] = {}
        self._draining: set[InstanceId] = set()
        self._agents_down: set[InstanceId] = set()
        # The last exit that was reported before its loss was noticed.
        self._exits: dict[tuple[InstanceId, int], str] = {}

    @property
    def running(self) -> int:
        """Number of streams that are being recovered."""
        return len(self.hit)

    def note(
        self,
        now_s: float,
        wall_s: float | None,
        event: ev.Event,
        actions: Sequence[act.Action],
        line: int = 0,
    ) -> None:
        at = Moment(now_s, wall_s)
        self._note_event(at, event, line)
        if actions:
            starts = [each for each in actions if isinstance(each, act.Start)]
            plans = {(each.stream, each.attempt): each.plan for each in starts}
            for action in actions:
                self._note_action(at, event, action, plans, line)

    def decided(
        self, line: int, at: Moment, action: act.Recovered, plan: act.Plan | None
    ) -> RecordedDecision:
        """Make the record of a recovery that has been decided."""
        return RecordedDecision(line, at, action, plan)

    def ended(self, decision: RecordedDecision, end: AttemptEnd) -> None:
        """Note the end of a decision's attempt; a later one of the same attempt is none."""

    def loaded(self, action: act.RowsLoaded) -> None:
        """Note what a restore has loaded; its stream may have ended."""
        for incident in reversed(self.entries):
            victim = incident.victims.get(action.stream)
            for each in () if victim is None else reversed(victim.decisions):
                decided = each.action
                if isinstance(decided, act.Recovered) and decided.attempt == action.attempt:
                    each.loaded = action
                    incident.not_loaded += decided.option is not action.option
                    return

    def _note_event(self, at: Moment, event: ev.Event, line: int) -> None:
        match event:
            case ev.InstanceLost(instance=name, epoch=epoch, cause=cause):
                incident = self._lost(at, name, cause, line)
                incident.exit = self._exits.pop((name, epoch), "")
                for stream in event.produced_tokens:
                    self._hit(incident, stream)
            case ev.HolderLost(holder=name, cause=cause):
                self._lost(at, name, cause, line).is_agent = True
                self._agents_down.add(name)
            case ev.AttemptFailed():
                self._attempt_failed(at, event, line)
            case ev.SlotDenied():
                decision = self._tried_again(event, f"no slot at {event.target}")
                if decision is not None:
                    self.ended(decision, AttemptEnd.DENIED)
            case ev.InstanceUp(info=info) if not event.lives_on:
                self._up(at, info.id)
            case ev.HolderUp(holder=name):
                self._up(at, name)
                self._agents_down.discard(name)
            case ev.InstanceExited(instance=name, epoch=epoch, cause=cause):
                found = self._open.get(name)
                if found is not None and found.is_loss:
                    found.exit = cause
                else:
                    self._exits = {(name, epoch): cause}
            case ev.StreamEnded() if event.cause or event.stream in self.hit:
                self._stream_ended(at, event)
            case _:
                self._note_drain(event)

    def _note_drain(self, event: ev.Event) -> None:
        match event:
            case ev.DrainOrdered(instance=name):
                self._draining.add(name)
            case ev.DrainEnded(instance=name):
                self._draining.discard(name)
            case ev.LoadReported(instance=name, report=report) if report.draining:
                self._draining.add(name)
            case _:
                pass

    def _note_action(
        self,
        at: Moment,
        event: ev.Event,
        action: act.Action,
        plans: _Plans,
        line: int,
    ) -> None:
        match action:
            case act.Recovered(stream=stream, attempt=attempt):
                kept = brief(action) if self._is_brief else action
                plan = plans.get((stream, attempt))
                self._recovers(self.decided(line, at, kept, plan), kept)
            case act.Redirect(stream=stream, attempt=attempt):
                if (decision := self._decision(stream, attempt)) is not None:
                    decision.new_plan = action.plan
            case act.Settled(stream=stream, attempt=attempt):
                if (decision := self._decision(stream, attempt)) is not None:
                    decision.settled = action
                    self.ended(decision, AttemptEnd.RESUMED)
                gap_s = event.gap_s if isinstance(event, ev.StreamResumed) else None
                self._resolve(stream, Fate.BACK, gap_s)
            case act.RowsLoaded():
                self.loaded(action)
            case act.GiveUp(reason=act.Reason.REFUSED):
                self._rejected(action.stream)
            case act.GiveUp():
                self._given_up(RecordedDecision(line, at, action, None), action)
            case _:
                pass

    def _at(
        self,
        at: Moment,
        key: InstanceId | act.Reason | None,
        kind: IncidentKind,
        cause: str,
    ) -> Incident:
        """Return the incident of an instance, or of a reason to give requests up."""
        found = self._open.get(key)
        if found is None or not found.takes(at.now_s):
            self._count += 1
            subject = None if isinstance(key, act.Reason) else key
            found = Incident(self._count, at, subject, kind, cause, at.now_s)
            self._open[key] = found
            self.entries.append(found)
        elif kind in (IncidentKind.DIED, IncidentKind.ENDED):
            found.kind, found.why = kind, cause
        found.last_s = at.now_s
        return found

    def _lost(self, at: Moment, name: InstanceId, cause: str, line: int) -> Incident:
        kind = IncidentKind.ENDED if name in self._draining else IncidentKind.DIED
        incident = self._at(at, name, kind, cause)
        incident.losses.append(Loss(line, at, name, cause, None))
        return incident

    def _up(self, at: Moment, name: InstanceId) -> None:
        incident = self._open.pop(name, None)
        if incident is not None and incident.is_loss:
            incident.up = at
        self._draining.discard(name)

    def _hit(self, incident: Incident, stream: StreamId) -> HitStream:
        hits = self.hit.setdefault(stream, [])
        for found, victim in hits:
            if found is incident:
                return victim
        victim = HitStream(stream)
        hits.append((incident, victim))
        incident.fates[Fate.RUNNING] += 1
        if not self._is_brief or len(incident.victims) < MOST_STREAMS:
            incident.victims[stream] = victim
        return victim

    def _attempt_failed(self, at: Moment, event: ev.AttemptFailed, line: int) -> None:
        is_refusal = event.failure is ev.FailureKind.REFUSED
        loss = Loss(line, at, event.instance, event.cause, event.stream, is_refusal)
        if hits := self.hit.get(event.stream):
            incident, victim = hits[-1]
            victim.is_refused &= is_refusal
            self._tried_again(event, event.cause)
        else:
            incident = self._at(at, event.instance, IncidentKind.FAILED, event.cause)
            self._hit(incident, event.stream).is_refused = is_refusal
        incident.failed_attempts += event.instance == incident.subject
        if not self._is_brief or len(incident.losses) < MOST_STREAMS:
            incident.losses.append(loss)

    def _tried_again(
        self, event: ev.AttemptFailed | ev.SlotDenied, cause: str
    ) -> RecordedDecision | None:
        decision = self._decision(event.stream, event.attempt)
        if decision is not None:
            decision.retried_for = cause
        return decision

    def _decision(self, stream: StreamId, attempt: int) -> RecordedDecision | None:
        """Return the last decision of a running recovery, if it is of this attempt."""
        for _, victim in reversed(self.hit.get(stream, [])):
            for decision in victim.decisions[-1:]:
                if getattr(decision.action, "attempt", None) == attempt:
                    return decision
        return None

    def _recovers(self, decision: RecordedDecision, action: act.Recovered) -> None:
        down = self._agents_down
        if down and Option.RESTORE not in {each.option for each in action.estimates}:
            decision.agents_down = tuple(sorted(down))
        if hits := self.hit.get(action.stream):
            for _, victim in hits:
                for earlier in victim.decisions[-1:]:
                    earlier.retried_for = earlier.retried_for or action.cause
                    self.ended(earlier, AttemptEnd.FAILED)
            victim = hits[-1][1]
        else:
            incident = self._at(decision.at, action.failed, IncidentKind.MOVED, action.cause)
            victim = self._hit(incident, action.stream)
        victim.decisions.append(decision)

    def _given_up(self, decision: RecordedDecision, action: act.GiveUp) -> None:
        if hits := self.hit.get(action.stream):
            self._resolve(action.stream, Fate.LOST)
            hits[-1][1].decisions.append(decision)
            return
        incident = self._at(decision.at, action.reason, IncidentKind.GIVEN_UP, action.message)
        incident.fates[Fate.LOST] += 1
        if not self._is_brief or len(incident.victims) < MOST_STREAMS:
            victim = HitStream(action.stream, Fate.LOST, decisions=[decision])
            incident.victims[action.stream] = victim

    def _resolve(
        self,
        stream: StreamId,
        fate: Fate,
        pause_s: float | None = None,
        end: AttemptEnd = AttemptEnd.ENDED,
    ) -> None:
        hits = self.hit.pop(stream, None)
        if hits is None:
            return
        self.fates[fate] += 1
        for incident, victim in hits:
            for last in victim.decisions[-1:]:
                self.ended(last, end)
            victim.fate, victim.pause_s = fate, pause_s
            incident.fates[Fate.RUNNING] -= 1
            incident.fates[fate] += 1
            incident.note_pause(pause_s)

    def _stream_ended(self, at: Moment, event: ev.StreamEnded) -> None:
        if event.stream not in self.hit and event.instance is not None:
            incident = self._at(at, event.instance, IncidentKind.FAILED, event.cause)
            incident.failed_attempts += 1
            self._hit(incident, event.stream)
        self._resolve(event.stream, Fate.LOST if event.cause else Fate.LEFT)

    def _rejected(self, stream: StreamId) -> None:
        """Note that a request is at fault: its refusals are no incidents."""
        hits = self.hit.get(stream, [])
        self._resolve(stream, Fate.LEFT, end=AttemptEnd.REJECTED)
        for incident, victim in hits:
            its = [each for each in incident.losses if each.is_refusal and each.stream == stream]
            incident.losses = [each for each in incident.losses if each not in its]
            incident.failed_attempts -= sum(each.instance == incident.subject for each in its)
            if victim.is_refused:
                self.fates[Fate.LEFT] -= 1
                incident.fates[Fate.LEFT] -= 1
                incident.victims.pop(stream, None)
            if not (incident.is_loss or incident.fates.total()) and incident in self.entries:
                self.entries.remove(incident)
                self._open.pop(incident.subject, None)
