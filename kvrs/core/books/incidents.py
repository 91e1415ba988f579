"""Book of a proxy's incidents, with the decisions about the streams that they hit.

Pure. `Incidents` reads a policy's events with its actions: in `kvrs incidents` all of an event log,
in a proxy (`RecoveryLog`) those that `Control` shows. A request that is at fault itself is no
incident.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.model.incident import (
    AttemptEnd,
    Fate,
    HitStream,
    Incident,
    IncidentKind,
    Loss,
    Moment,
    RecordedDecision,
    brief,
)
from kvrs.ids import InstanceId, StreamId

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
