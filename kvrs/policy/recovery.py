"""Decide where streams run, and how they survive the loss of what they run on.

Pure: no clock, no socket, no randomness. A proxy drives it in real time, a simulator in virtual time.

    arrived --> waiting --> prefill --> decode --> ended
                   ^  ^        |          |
                   |  +--------+----------+   lost or failed: decided again, the attempt number goes up
                   +--> queued (for a slot) <--> decode     back: other proxies have the slots; nothing was begun

Laws: a stream has one current attempt and its number only rises; what an older attempt reports is ignored; no `Start`
names an instance that is not up, nor a holder that is lost; a stream that is neither started nor given up on has an alarm
set; a stream is moved only because what it ran on was lost or failed it, or is about to end or runs on a GPU that is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, assert_never

from kvrs.agent.config import BackupMode, BackupSettings
from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import Action, GiveUp, Halt, Plan, Reason, Recovered, Redirect, Start
from kvrs.policy.attempts import Attempts
from kvrs.policy.checkpoints import Checkpoints, protection
from kvrs.policy.cluster_view import ClusterView, Member
from kvrs.policy.config import Failing, PolicySettings, SloSettings
from kvrs.policy.costs import Estimate, Instance, Option
from kvrs.policy.deadlines import deadlines_of, due_s, promise
from kvrs.policy.decisions import Decisions
from kvrs.policy.dispatch import assign, ceiling
from kvrs.policy.events import (
    AttemptFailed,
    CheckpointsReported,
    DrainReported,
    Event,
    GpuJudged,
    HolderLost,
    HolderUp,
    InstanceLost,
    InstanceUp,
    Kept,
    LinkMeasured,
    LoadReported,
    PrefillDone,
    RetentionLost,
    SlotDenied,
    StreamAdopted,
    StreamArrived,
    StreamEnded,
    StreamResumed,
    TimerFired,
)
from kvrs.policy.gpus import treatment_of
from kvrs.policy.keepers import Keepers
from kvrs.policy.routing import hand_off_to, victim_of
from kvrs.policy.slots import SHORTEST_WAIT_S, SlotBook
from kvrs.policy.streams import Decision, Stage, Stream
from kvrs.policy.timers import SLACK_S, Timers, is_past

NO_BACKUP = BackupSettings()
LONGEST_PAUSE_S = 2.0  # Between two tries of the same instance, which double from `recovery.retry_pause_s`.


class RecoveryPolicy:
    """One per proxy, with that proxy's own view of the cluster."""

    def __init__(self, policy: PolicySettings, slo: SloSettings, backup: BackupSettings = NO_BACKUP) -> None:
        self._settings = policy
        self._slo = slo
        self._backup = backup
        self._view = ClusterView(policy.assumed_link_bytes_per_s)
        self._slots = SlotBook(policy.slots_max)
        self._decisions = Decisions(self._view, self._slots, policy, slo)
        self._timers = Timers()
        self._attempts = Attempts(self._view, self._slots, self._timers)
        self._checkpoints = Checkpoints(self._view, backup)
        self._streams: dict[StreamId, Stream] = {}
        self._keepers = Keepers(self._view, self._checkpoints, self._streams)
        self._idle: dict[StreamId, Stream] = {}  # Those waiting or queued.
        self._gathered: dict[StreamId, Stream] = {}  # Of these, the victims of losses that are decided together in a moment.
        self._ailing: set[InstanceId] = set()  # Instances that are to be left; a new process is on the same GPU.
        self._arrivals = 0
        self._actions: list[Action] = []

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event; return the actions it calls for, in the order in which they are to be carried out."""
        self._apply(event, now_s)
        while (stream := self._timers.next_due(now_s)) is not None:
            self._ring(self._streams[stream], now_s)
        while (served := self._slots.next_served(now_s)) is not None:
            self._look_again(self._streams[served], now_s)
        if (wake := self._timers.promise(now_s)) is not None:
            self._actions.append(wake)
        actions, self._actions = self._actions, []
        return actions

    def snapshot(self) -> dict[str, Any]:
        """Plain data for people: the view of the cluster, slots, and the streams that run or wait."""
        stages = {stage.value: 0 for stage in Stage}
        for stream in self._streams.values():
            stages[stream.stage.value] += 1
        waiting = [
            {"stream": stream.id, "stage": stream.stage.value, "since_s": stream.waiting_since_s, "attempt": stream.attempt}
            for stream in _by_arrival(self._idle.values())
        ]
        kept = self._streams.values() if self._backup.mode is not BackupMode.OFF else ()
        return {
            "policy": self._settings.name.value,
            **self._view.snapshot(),
            "slots": self._slots.snapshot(),
            "streams": stages,
            "waiting": waiting,
            "checkpoints": {stream.id: protection(stream) for stream in kept if stream.attempt},
            "unprotected": {stream.id: stream.unprotected for stream in kept if stream.unprotected},
            "corrections": self._decisions.corrections.snapshot(),
        }

    def _apply(self, event: Event, now_s: float) -> None:
        match event:
            case InstanceUp():
                self._instance_up(event.instance, event.lives_on, now_s)
            case InstanceLost():
                member = self._view.members.get(event.instance)
                if member is not None and event.epoch >= member.instance.epoch:
                    self._gather(self._lose_instance(member, event.cause, event.produced_tokens, now_s), now_s)
            case GpuJudged():
                self._gpu_judged(event, now_s)
            case DrainReported():
                member = self._view.members.get(event.instance)
                if member is not None and event.epoch == member.instance.epoch:
                    self._view.set_leaving(member)
                    self._leave(member, event.produced_tokens, now_s)
            case LoadReported():
                if (reporter := self._view.members.get(event.instance)) is not None:
                    reporter.reported_queue_s = event.queue_delay_s
            case LinkMeasured():
                if event.bytes_per_s > 0:
                    link = self._view.link(event.source, event.target)
                    link.bytes_per_s, link.measured = event.bytes_per_s, True
            case HolderUp():
                self._keepers.agent_up(event)
            case HolderLost():
                self._keepers.agent_lost(event)
            case CheckpointsReported():
                self._keepers.reported(event)
            case StreamArrived():
                self._arrived(event, now_s)
            case StreamAdopted():
                self._adopted(event, now_s)
            case PrefillDone():
                self._prefill_done(event, now_s)
            case RetentionLost():
                for stream in event.streams:
                    self._keepers.forget(stream, event.instance)
            case StreamResumed():
                self._resumed(event, now_s)
            case AttemptFailed():
                self._attempt_failed(event, now_s)
            case SlotDenied():
                self._slot_denied(event, now_s)
            case StreamEnded():
                # The end of an attempt that we gave up on says nothing about the stream: its successor is still writing.
                if (ended := self._current(event.stream, event.attempt)) is not None:
                    self._forget(ended)
            case TimerFired():
                self._timers.woken(now_s)
            case _:
                assert_never(event)

    def _current(self, stream: StreamId, attempt: int) -> Stream | None:
        """The stream, if this is its current attempt; None for what comes late."""
        found = self._streams.get(stream)
        return found if found is not None and found.attempt == attempt else None

    # --- instances and agents

    def _instance_up(self, instance: Instance, lives_on: bool, now_s: float) -> None:
        member = self._view.members.get(instance.id)
        if member is not None and instance.epoch <= member.instance.epoch:
            return
        if member is not None and lives_on:
            member.instance = instance
            return
        # What ran in its former life is gone, also when nobody has told us.
        lost = [] if member is None else self._lose_instance(member, "replaced by a new epoch", {}, now_s)
        self._view.set_ailing(self._view.add(instance), instance.id in self._ailing)
        self._gather(lost, now_s)
        self._place_all([stream for stream in self._idle.values() if stream.id not in self._gathered], now_s)

    def _gpu_judged(self, event: GpuJudged, now_s: float) -> None:
        treatment = treatment_of(self._settings.gpu, event.state)
        (self._ailing.discard if treatment is None else self._ailing.add)(event.instance)
        member = self._view.members.get(event.instance)
        if member is None:
            return
        self._view.set_ailing(member, event.instance in self._ailing)
        if treatment is Failing.MOVE and member.is_drained:
            self._move(member, f"moved: its GPU is {event.state.value}: {event.reason}", event.produced_tokens, now_s)

    def _leave(self, member: Member, produced_tokens: Mapping[StreamId, int], now_s: float) -> None:
        """Take along what runs on an instance that is about to end; from its KV, which it keeps for a moment."""
        if not member.is_drained:
            return
        for stream in [self._streams[stream_id] for stream_id in member.running] if member.retains else []:
            if stream.stage is Stage.DECODE and stream.resumed:
                history = stream.prompt_tokens + max(stream.produced_tokens, produced_tokens.get(stream.id, 0))
                self._keepers.retain(stream, member, (history - 1) // member.page_size_tokens)
        self._move(member, "moved: its instance is about to end", produced_tokens, now_s)

    def _move(self, member: Member, cause: str, produced_tokens: Mapping[StreamId, int], now_s: float) -> None:
        """Decide all that runs there as if it were lost, though it still runs: nothing is fenced."""
        for stream in [self._streams[stream_id] for stream_id in sorted(member.running)]:
            self._actions.append(Halt(stream.id, stream.attempt))
            stream.excused += 1
        self._gather(self._fail_all(member, cause, produced_tokens, now_s), now_s)

    def _lose_instance(self, member: Member, cause: str, produced_tokens: Mapping[StreamId, int], now_s: float) -> list[Stream]:
        """Take it and its streams out of the books; return those that are to be placed again."""
        self._view.remove(member)
        for stream_id in list(member.held):
            self._keepers.forget(stream_id, member.instance.id)
        victims = self._fail_all(member, cause, produced_tokens, now_s)
        for stream in self._gathered.values():
            if stream.blames == member.instance.id:  # It did not fail alone, and is a victim like the others.
                stream.blames, stream.cause = None, cause
        return victims

    def _fail_all(self, member: Member, cause: str, produced_tokens: Mapping[StreamId, int], now_s: float) -> list[Stream]:
        """Whatever runs there, and whoever queues for it, is to be placed again."""
        victims = [self._streams[stream_id] for stream_id in member.running]
        stranded = [self._streams[stream_id] for stream_id in self._slots.waiting_for(member.instance.id)]
        for stream in victims:
            stream.produced_tokens = max(stream.produced_tokens, produced_tokens.get(stream.id, 0))
            self._fail(stream, cause, member.instance.id, now_s)
        for stream in stranded:
            self._wait(stream, now_s)
        return [*victims, *stranded]

    def _gather(self, victims: Iterable[Stream], now_s: float) -> None:
        """Have the victims of losses that are near to each other decided together, a moment after the first of them.

        Every victim has left the books before any of them is decided: they are one event, not many. So do connections that
        break: the sockets of a process that died are closed one after the other, and not always its watch's first.
        """
        gather_s = self._settings.recovery.gather_s
        if gather_s <= SLACK_S:  # No alarm can be set that near.
            self._place_all(victims, now_s)
            return
        for stream in victims:
            self._gathered[stream.id] = stream
            self._timers.set(stream.id, now_s + gather_s)  # The first of them rings for all.

    # --- streams

    def _arrived(self, event: StreamArrived, now_s: float) -> None:
        if event.stream in self._streams:
            return
        stream = Stream(event.stream, self._arrivals, max(1, event.prompt_tokens), now_s, event.most_tokens)
        stream.arrived_s, stream.deadlines = now_s, deadlines_of(event.deadlines, self._slo)
        self._arrivals += 1
        self._streams[stream.id] = self._idle[stream.id] = stream
        self._place_all([stream], now_s)

    def _adopted(self, event: StreamAdopted, now_s: float) -> None:
        """As a victim of the loss of its proxy: what is to be done is weighed as for any other."""
        if event.stream in self._streams:
            return
        stream = Stream(event.stream, self._arrivals, event.prompt_tokens, now_s, event.most_tokens, prefilled=True)
        stream.arrived_s, stream.deadlines = now_s - event.age_s, deadlines_of(event.deadlines, self._slo)
        stream.produced_tokens, stream.flowed = event.produced_tokens, event.produced_tokens > 0
        stream.adopted, stream.failed_at_s, stream.cause = True, now_s, "it came from another proxy"
        self._arrivals += 1
        self._streams[stream.id] = self._idle[stream.id] = stream
        self._keepers.inherit(stream, event.kept)
        self._place_all([stream], now_s)

    def kept(self, stream_id: StreamId) -> tuple[Kept, ...]:
        """Who keeps KV of a stream, for the proxy that may have to go on with it."""
        return self._keepers.of(stream_id)

    def _prefill_done(self, event: PrefillDone, now_s: float) -> None:
        stream = self._current(event.stream, event.attempt)
        if stream is None or stream.runs_on is None or stream.plan is None or stream.resumed:
            return
        self._note_prefill(stream, stream.runs_on, event.history_tokens)
        if stream.stage is Stage.PREFILL:
            self._attempts.done_waiting(stream)
            self._hand_off(stream, stream.plan, stream.runs_on, now_s)

    def _note_prefill(self, stream: Stream, prefill: Member, history_tokens: int) -> None:
        if not stream.prefilled:
            guess, stream.prompt_tokens = stream.prompt_tokens, max(1, history_tokens - stream.produced_tokens)
            stream.prefilled = True
            if stream.most_tokens is not None:
                stream.most_tokens += max(0, stream.prompt_tokens - guess)
        if prefill.retains or prefill.caches:
            self._keepers.retain(stream, prefill, history_tokens // prefill.page_size_tokens)

    def _hand_off(self, stream: Stream, plan: Plan, prefill: Member, now_s: float) -> None:
        """To the decode instance of the plan, which may be in a new life by now, or to another one where that is sooner."""
        planned = self._view.members.get(plan.decode)
        if planned is None or (planned.is_leaving and planned.is_drained):
            if planned is not None:
                self._actions.append(Halt(stream.id, stream.attempt))
                stream.excused += 1
            self._fail(stream, "the decode instance was lost during prefill, or is about to end", plan.decode, now_s)
            self._place_all([stream], now_s)
            return
        decode = hand_off_to(self._view, stream, prefill, planned, self._settings)
        if planned.own_prefill != prefill.instance.id:  # Else it is one call, to which all has been said.
            stream.plan = replace(plan, decode=decode.instance.id, places=self._checkpoints.place(stream, decode, prefill))
            if stream.plan != plan:
                self._actions.append(Redirect(stream.id, stream.attempt, stream.plan))
        self._attempts.run(stream, Stage.DECODE, decode, decodes_on=decode)
        if decode.instance.node != prefill.instance.node:
            size_bytes = stream.history_tokens * decode.instance.geometry.bytes_per_token
            self._attempts.put_on_link(stream, prefill.instance.node, decode, size_bytes)

    def _resumed(self, event: StreamResumed, now_s: float) -> None:
        stream = self._current(event.stream, event.attempt)
        if stream is None or stream.stage is not Stage.DECODE:
            return
        if (settled := self._decisions.settle(stream, now_s)) is not None:
            self._actions.append(settled)
        self._attempts.done_waiting(stream)
        self._slots.release(stream.id)
        self._timers.clear(stream.id)
        self._checkpoints.drop_former(stream)
        stream.resumed = stream.flowed = True
        stream.failed_at_s, stream.cause, stream.failed = None, "", None
        stream.failures, stream.retry_at_s = 0, 0.0
        stream.removed.clear()

    def _attempt_failed(self, event: AttemptFailed, now_s: float) -> None:
        stream = self._current(event.stream, event.attempt)
        if stream is None:
            return
        stream.produced_tokens = max(stream.produced_tokens, event.produced_tokens)
        if stream.stage in (Stage.WAITING, Stage.QUEUED):
            return  # Its instance was lost before the connection broke: that has been dealt with.
        self._fail(stream, event.cause, event.instance, now_s)
        stream.blames = event.instance
        if event.abrupt and event.instance in self._view.members:
            self._gather([stream], now_s)
        else:
            self._place_all([stream], now_s)

    def _slot_denied(self, event: SlotDenied, now_s: float) -> None:
        stream = self._current(event.stream, event.attempt)
        if stream is None or stream.stage is not Stage.DECODE or self._slots.held_at(stream.id) != event.target:
            return
        self._attempts.deny(stream, now_s + event.wait_s)
        stream.stage, stream.decision = Stage.QUEUED, None
        stream.excused += 1
        self._idle[stream.id] = stream
        self._look_again(stream, now_s)

    def _blame(self, stream: Stream, instance: InstanceId, now_s: float) -> None:
        """The instance lives on, as far as is known, and failed this stream: what was tried is not tried again at once."""
        stream.blames = None
        if (member := self._view.members.get(instance)) is not None:
            stream.barred[instance] = member.instance.epoch
        if not stream.resumed and stream.option is not Option.START:
            stream.removed.add(stream.option)
        pause_s = min(LONGEST_PAUSE_S, self._settings.recovery.retry_pause_s * 2**stream.failures)
        stream.failures += 1
        stream.retry_at_s = now_s + pause_s

    def _ring(self, stream: Stream, now_s: float) -> None:
        """The stream's alarm: the gathering is over, its slot has expired, or its wait is over in one way or another."""
        if stream.id in self._gathered:
            self._place_all(list(self._gathered.values()), now_s)
            return
        if stream.stage is Stage.DECODE:
            stream.removed.add(stream.option)
            stream.slot_expired = True
            self._fail(stream, f"its slot expired after {self._settings.slot_lease_s:g} s", None, now_s)
        self._look_again(stream, now_s)

    def _forget(self, stream: Stream) -> None:
        self._attempts.leave(stream)
        self._checkpoints.forget(stream)
        for instance in list(stream.holders):
            self._keepers.forget(stream.id, instance)
        self._idle.pop(stream.id, None)
        self._gathered.pop(stream.id, None)
        del self._streams[stream.id]

    # --- the decision

    def _place_all(self, streams: Iterable[Stream], now_s: float) -> None:
        """Decide the streams of one event together, the most urgent first."""
        self._decisions.begin(now_s)
        ordered = sorted(streams, key=lambda stream: (due_s(stream), stream.number))
        for stream in ordered:
            if stream.blames is not None:
                self._blame(stream, stream.blames, now_s)
        recovering = [stream for stream in ordered if not stream.is_fresh]
        victims = [victim_of(self._view, stream, barred_too=is_past(stream.retry_at_s, now_s)) for stream in recovering]
        loads = {member.instance.id: member.streams for member in self._view.targets()} if victims else {}
        assigned, limit = assign(self._settings.dispatch, victims, loads), ceiling(len(victims), loads)
        for stream in ordered:
            self._gathered.pop(stream.id, None)
            self._place(stream, assigned.get(stream.id), limit, now_s)

    def _look_again(self, stream: Stream, now_s: float) -> None:
        """One stream, because its time has come. Who queues for a slot goes on asking where it queues."""
        self._decisions.begin(now_s)
        awaited = self._slots.awaited_by(stream.id)
        if awaited is None:
            self._place_all([stream], now_s)
        else:
            self._place(stream, awaited, self._view.members[awaited].streams + 1, now_s)

    def _place(self, stream: Stream, assigned: InstanceId | None, limit: int, now_s: float) -> None:
        """Start the next attempt of a stream that has none running, or leave it waiting for what it lacks.

        Targets other than the assigned one are looked at only as long as they have fewer than `limit` streams.
        """
        if (failed := stream.attempt - stream.excused) >= self._settings.recovery.max_attempts:
            self._give_up(stream, Reason.RETRIES, f"the stream failed {failed} times, at last: {stream.cause}")
            return
        decision: Decision | None = None
        if stream.is_fresh:
            decision = self._decisions.start(stream, now_s)
        elif assigned is not None:
            decision = self._decisions.recover(stream, self._view.members[assigned], limit, now_s)
        if decision is None:
            self._keep_waiting(stream, now_s)
        elif decision.plan is None:
            self._give_up(stream, Reason.SLO, f"no option brings the stream on in time: {promise(stream)}")
        elif not decision.chosen.fetches:
            self._start(stream, decision.plan, decision, now_s)
        elif self._slots.acquire(decision.chosen.target, stream.id, now_s, decision.chosen.total_s):
            self._start(stream, decision.plan, decision, now_s)
            self._timers.set(stream.id, now_s + self._settings.slot_lease_s)
        else:
            self._queue(stream, decision.chosen, now_s)

    def _start(self, stream: Stream, plan: Plan, decision: Decision, now_s: float) -> None:
        prefill = None if plan.prefill is None else self._view.members[plan.prefill]
        plan = replace(plan, places=self._checkpoints.place(stream, self._view.members[plan.decode], prefill))
        chosen = decision.chosen
        del self._idle[stream.id]
        self._attempts.begin(stream, plan, chosen.compute_s)
        stream.option, stream.slot_expired = chosen.option, False
        self._actions.append(Start(stream.id, stream.attempt, plan))
        if stream.attempt > 1 or stream.adopted:
            stream.decision, stream.decided_s = decision, now_s
            record = Recovered(
                stream.id, stream.attempt, chosen.option, chosen.total_s, decision.estimates, stream.cause, stream.failed
            )
            self._actions.append(record)

    def _fail(self, stream: Stream, cause: str, failed: InstanceId | None, now_s: float) -> None:
        """The current attempt is over; the stream waits to be placed."""
        stream.cause, stream.failed, stream.decision = cause, failed, None
        if stream.failed_at_s is None:
            stream.failed_at_s = now_s
        self._wait(stream, now_s)

    # --- waiting

    def _wait(self, stream: Stream, now_s: float) -> None:
        """From an attempt, or from a queue that is gone, to waiting; whoever calls has it placed."""
        self._attempts.leave(stream)
        if stream.id not in self._idle:
            stream.waiting_since_s = now_s
            self._idle[stream.id] = stream
        stream.stage = Stage.WAITING

    def _queue(self, stream: Stream, chosen: Estimate, now_s: float) -> None:
        """Wait for a slot at the chosen target, and look again when the wait that was predicted is over."""
        self._slots.enqueue(chosen.target, stream.id)
        stream.stage = Stage.QUEUED
        wait_s = max(SHORTEST_WAIT_S, self._slots.expected_wait_s(chosen.target, stream.id, now_s))
        self._timers.set(stream.id, now_s + wait_s)

    def _keep_waiting(self, stream: Stream, now_s: float) -> None:
        """Nothing can be started: go on until the wait is over, or longer than the client should see."""
        self._wait(stream, now_s)
        wait_ends_s = stream.waiting_since_s + self._settings.recovery.wait_s
        budget_s = self._decisions.budget_s(stream, now_s)
        budget_ends_s = wait_ends_s if budget_s is None else now_s + budget_s
        if is_past(wait_ends_s, now_s):
            self._give_up(stream, Reason.NO_INSTANCE, f"no instance came up within {self._settings.recovery.wait_s:g} s")
        elif is_past(budget_ends_s, now_s):
            self._give_up(stream, Reason.SLO, f"no instance came up in time: {promise(stream)}")
        else:
            alarms_s = [wait_ends_s, budget_ends_s, stream.retry_at_s]
            self._timers.set(stream.id, min(at_s for at_s in alarms_s if not is_past(at_s, now_s)))

    def _give_up(self, stream: Stream, reason: Reason, message: str) -> None:
        # A client that comes back when others have just waited in vain should not come at once.
        retry_after_s = max(1.0, min(self._settings.recovery.wait_s, 30.0)) if reason is Reason.NO_INSTANCE else 1.0
        self._forget(stream)
        self._actions.append(GiveUp(stream.id, reason, message, retry_after_s))


def _by_arrival(streams: Iterable[Stream]) -> list[Stream]:
    return sorted(streams, key=lambda stream: stream.number)
