"""Book of a proxy's incidents.

Pure. `Incidents` reads a policy's events with its actions: in a proxy as they happen, in `kvrs
incidents` from the event log. A request that is at fault itself is no incident.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.model.incident import (
    Fate,
    HitStream,
    Incident,
    IncidentKind,
    Loss,
    Moment,
    RecordedDecision,
    compared,
)
from kvrs.ids import InstanceId, StreamId

# Streams of an incident whose decisions a proxy keeps; the others are counted.
MOST_STREAMS = 100


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
        self._running: dict[StreamId, list[tuple[Incident, HitStream]]] = {}
        self._draining: set[InstanceId] = set()
        self._agents_down: set[InstanceId] = set()
        # The last exit that was reported before its loss was noticed.
        self._exits: dict[tuple[InstanceId, int], str] = {}

    @property
    def running(self) -> int:
        """Number of streams that are being recovered."""
        return len(self._running)

    def note(
        self,
        now_s: float,
        wall_s: float | None,
        event: ev.Event,
        actions: Sequence[act.Action],
        line: int = 0,
    ) -> None:
        told = [each for each in actions if type(each) in _NOTED]
        # Most events concern streams that no incident has hit.
        if not told and type(event) not in _NOTED:
            return
        at = Moment(now_s, wall_s)
        self._note_event(at, event, line)
        for action in told:
            self._note_action(at, event, action, actions, line)

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
                self._tried_again(event.stream, event.attempt, f"no slot at {event.target}")
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
            case ev.StreamEnded() if event.cause or event.stream in self._running:
                self._ended(at, event)
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
        actions: Sequence[act.Action],
        line: int,
    ) -> None:
        match action:
            case act.Recovered(stream=stream, attempt=attempt):
                starts = (each for each in actions if isinstance(each, act.Start))
                its = (s.plan for s in starts if (s.stream, s.attempt) == (stream, attempt))
                self._decided(RecordedDecision(line, at, action, next(its, None)))
            case act.Redirect(stream=stream, attempt=attempt):
                if (decision := self._decision(stream, attempt)) is not None:
                    decision.new_plan = action.plan
            case act.Settled(stream=stream, attempt=attempt):
                if (decision := self._decision(stream, attempt)) is not None:
                    decision.settled = action
                gap_s = event.gap_s if isinstance(event, ev.StreamResumed) else None
                self._resolve(stream, Fate.BACK, gap_s)
            case act.RowsLoaded():
                self._loaded(action)
            case act.GiveUp(reason=act.Reason.REFUSED):
                self._rejected(action.stream)
            case act.GiveUp():
                self._given_up(RecordedDecision(line, at, action, None))
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
        hits = self._running.setdefault(stream, [])
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
        if hits := self._running.get(event.stream):
            incident, victim = hits[-1]
            victim.is_refused &= is_refusal
            self._tried_again(event.stream, event.attempt, event.cause)
        else:
            incident = self._at(at, event.instance, IncidentKind.FAILED, event.cause)
            self._hit(incident, event.stream).is_refused = is_refusal
        incident.failed_attempts += event.instance == incident.subject
        if not self._is_brief or len(incident.losses) < MOST_STREAMS:
            incident.losses.append(loss)

    def _tried_again(self, stream: StreamId, attempt: int, cause: str) -> None:
        if (decision := self._decision(stream, attempt)) is not None:
            decision.retried_for = cause

    def _decision(self, stream: StreamId, attempt: int) -> RecordedDecision | None:
        """Return the last decision of a running recovery, if it is of this attempt."""
        for _, victim in reversed(self._running.get(stream, [])):
            for decision in victim.decisions[-1:]:
                if getattr(decision.action, "attempt", None) == attempt:
                    return decision
        return None

    def _decided(self, decision: RecordedDecision) -> None:
        action = decision.action
        assert isinstance(action, act.Recovered)
        if all(each.option is not Option.RESTORE for each in action.estimates):
            decision.agents_down = tuple(sorted(self._agents_down))
        if self._is_brief:
            # Estimates for all targets would take megabytes in a large cluster.
            kept = tuple(compared(action, decision.chosen))
            decision.action = msgspec.structs.replace(action, estimates=kept)
        if hits := self._running.get(action.stream):
            for _, victim in hits:
                for earlier in victim.decisions[-1:]:
                    earlier.retried_for = earlier.retried_for or action.cause
            victim = hits[-1][1]
        else:
            incident = self._at(decision.at, action.failed, IncidentKind.MOVED, action.cause)
            victim = self._hit(incident, action.stream)
        victim.decisions.append(decision)

    def _loaded(self, action: act.RowsLoaded) -> None:
        """Note what a restore has loaded; its stream may have ended."""
        for incident in reversed(self.entries):
            victim = incident.victims.get(action.stream)
            for each in () if victim is None else reversed(victim.decisions):
                decided = each.action
                if isinstance(decided, act.Recovered) and decided.attempt == action.attempt:
                    each.loaded = action
                    incident.not_loaded += decided.option is not action.option
                    return

    def _given_up(self, decision: RecordedDecision) -> None:
        action = decision.action
        assert isinstance(action, act.GiveUp)
        if hits := self._running.get(action.stream):
            hits[-1][1].decisions.append(decision)
            self._resolve(action.stream, Fate.LOST)
            return
        incident = self._at(decision.at, action.reason, IncidentKind.GIVEN_UP, action.message)
        incident.fates[Fate.LOST] += 1
        if not self._is_brief or len(incident.victims) < MOST_STREAMS:
            victim = HitStream(action.stream, Fate.LOST, decisions=[decision])
            incident.victims[action.stream] = victim

    def _resolve(self, stream: StreamId, fate: Fate, pause_s: float | None = None) -> None:
        hits = self._running.pop(stream, None)
        if hits is None:
            return
        self.fates[fate] += 1
        for incident, victim in hits:
            victim.fate, victim.pause_s = fate, pause_s
            incident.fates[Fate.RUNNING] -= 1
            incident.fates[fate] += 1
            incident.note_pause(pause_s)

    def _ended(self, at: Moment, event: ev.StreamEnded) -> None:
        if event.stream not in self._running and event.instance is not None:
            incident = self._at(at, event.instance, IncidentKind.FAILED, event.cause)
            incident.failed_attempts += 1
            self._hit(incident, event.stream)
        self._resolve(event.stream, Fate.LOST if event.cause else Fate.LEFT)

    def _rejected(self, stream: StreamId) -> None:
        """Note that a request is at fault: its refusals are no incidents."""
        hits = self._running.get(stream, [])
        self._resolve(stream, Fate.LEFT)
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


_NOTED: frozenset[type[Any]] = frozenset(
    {
        *(ev.InstanceLost, ev.HolderLost, ev.AttemptFailed, ev.SlotDenied, ev.InstanceUp),
        *(ev.HolderUp, ev.InstanceExited, ev.DrainOrdered, ev.DrainEnded, ev.LoadReported),
        ev.StreamEnded,
        *(act.Recovered, act.Redirect, act.Settled, act.RowsLoaded, act.GiveUp),
    }
)
