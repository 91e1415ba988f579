"""Decide where streams run, and how they survive the loss of what they run on.

Pure: no clock, no socket, no randomness. A proxy drives it in real time, a simulator in virtual time.

    arrived --> waiting --> prefill --> decode --> ended
                   ^  ^        |          |
                   |  +--------+----------+   lost or failed: decided again, the attempt number goes up
                   +--> queued (for a slot) --> decode

Laws: a stream has one current attempt and its number only rises; what an older attempt reports is ignored; no `Start`
names an instance that is not up; a stream that is neither started nor given up on has an alarm set.
"""

from collections.abc import Iterable, Mapping
from typing import Any, assert_never

from kvrs.ids import InstanceId, StreamId
from kvrs.policy.actions import Action, GiveUp, Plan, Reason, Recovered, Start
from kvrs.policy.cluster_view import ClusterView, Member
from kvrs.policy.config import PolicySettings, SloSettings
from kvrs.policy.costs import Estimate, Instance, Option, decide
from kvrs.policy.events import (
    AttemptFailed,
    Event,
    InstanceLost,
    InstanceUp,
    LinkMeasured,
    LoadReported,
    PrefillDone,
    RetentionLost,
    StreamArrived,
    StreamEnded,
    StreamResumed,
    TimerFired,
)
from kvrs.policy.options import Options
from kvrs.policy.routing import pair_for, targets_for
from kvrs.policy.slots import SHORTEST_WAIT_S, SlotBook
from kvrs.policy.streams import Holder, Stage, Stream
from kvrs.policy.timers import SLACK_S, Timers

LONGEST_PAUSE_S = 2.0  # Between two tries of the same instance, which double from `recovery.retry_pause_s`.


class RecoveryPolicy:
    """One per proxy, with that proxy's own view of the cluster."""

    def __init__(self, settings: PolicySettings, slo: SloSettings) -> None:
        self._settings = settings
        self._slo = slo
        self._view = ClusterView(settings.assumed_link_bytes_per_s)
        self._slots = SlotBook(settings.slots_max)
        self._options = Options(self._view, self._slots, settings)
        self._timers = Timers()
        self._streams: dict[StreamId, Stream] = {}
        self._idle: dict[StreamId, Stream] = {}  # Those waiting or queued.
        self._arrivals = 0
        self._actions: list[Action] = []

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event; return the actions it calls for, in the order in which they are to be carried out."""
        self._apply(event, now_s)
        while (stream := self._timers.next_due(now_s)) is not None:
            self._ring(self._streams[stream], now_s)
        while (served := self._slots.next_served()) is not None:
            self._place(self._streams[served], now_s)
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
        return {
            "policy": self._settings.name.value,
            **self._view.snapshot(),
            "slots": self._slots.snapshot(),
            "streams": stages,
            "waiting": waiting,
        }

    def _apply(self, event: Event, now_s: float) -> None:
        match event:
            case InstanceUp():
                self._instance_up(event.instance, now_s)
            case InstanceLost():
                member = self._view.members.get(event.instance)
                if member is not None and event.epoch >= member.instance.epoch:
                    self._instance_lost(member, event.cause, event.produced_tokens, now_s)
            case LoadReported():
                if (reporter := self._view.members.get(event.instance)) is not None:
                    reporter.reported_queue_s = event.queue_delay_s
            case LinkMeasured():
                if event.bytes_per_s > 0:
                    link = self._view.link(event.source, event.target)
                    link.bytes_per_s, link.measured = event.bytes_per_s, True
            case StreamArrived():
                self._arrived(event, now_s)
            case PrefillDone():
                self._prefill_done(event, now_s)
            case RetentionLost():
                for stream in event.streams:
                    self._forget_holder(stream, event.instance)
            case StreamResumed():
                self._resumed(event)
            case AttemptFailed():
                self._attempt_failed(event, now_s)
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

    # --- instances

    def _instance_up(self, instance: Instance, now_s: float) -> None:
        member = self._view.members.get(instance.id)
        if member is not None and instance.epoch <= member.instance.epoch:
            return
        if member is not None:
            # What ran in its former life is gone, also when nobody has told us.
            self._instance_lost(member, "replaced by a new epoch", {}, now_s, place=False)
        self._view.add(instance)
        for stream in _by_arrival(self._idle.values()):
            self._place(stream, now_s)

    def _instance_lost(
        self, member: Member, cause: str, produced_tokens: Mapping[StreamId, int], now_s: float, *, place: bool = True
    ) -> None:
        self._view.remove(member)
        for stream_id in list(member.held):
            self._forget_holder(stream_id, member.instance.id)
        victims = _by_arrival(self._streams[stream_id] for stream_id in member.running)
        stranded = [self._streams[stream_id] for stream_id in self._slots.waiting_for(member.instance.id)]
        for stream in victims:
            stream.produced_tokens = max(stream.produced_tokens, produced_tokens.get(stream.id, 0))
            self._fail(stream, cause, member.instance.id, now_s)
        for stream in stranded:
            self._wait(stream, now_s)
        if place:
            # Every victim has left the books before the first is decided: they are one event, not many.
            for stream in _by_arrival([*victims, *stranded]):
                self._place(stream, now_s)

    def _forget_holder(self, stream_id: StreamId, instance: InstanceId) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and (holder := stream.holders.pop(instance, None)) is not None:
            holder.member.held.discard(stream_id)

    # --- streams

    def _arrived(self, event: StreamArrived, now_s: float) -> None:
        if event.stream in self._streams:
            return
        stream = Stream(event.stream, self._arrivals, max(1, event.prompt_tokens), waiting_since_s=now_s)
        self._arrivals += 1
        self._streams[stream.id] = self._idle[stream.id] = stream
        self._place(stream, now_s)

    def _prefill_done(self, event: PrefillDone, now_s: float) -> None:
        stream = self._current(event.stream, event.attempt)
        if stream is None or stream.stage is not Stage.PREFILL:
            return
        prefill, plan = stream.runs_on, stream.plan
        assert prefill is not None
        assert plan is not None
        if not stream.prefilled:
            stream.prompt_tokens = max(1, event.history_tokens - stream.produced_tokens)
            stream.prefilled = True
        if prefill.retains:
            pages = event.history_tokens // prefill.instance.geometry.page_size_tokens
            stream.holders[prefill.instance.id] = Holder(prefill, pages)
            prefill.held.add(stream.id)
        self._unbook(stream)
        decode = self._view.members.get(plan.decode)
        if decode is None:
            self._fail(stream, "the decode instance was lost during prefill", plan.decode, now_s)
            self._place(stream, now_s)
            return
        # It may be a new life of the instance that was planned with.
        self._run(stream, Stage.DECODE, decode, decodes_on=decode)

    def _resumed(self, event: StreamResumed) -> None:
        stream = self._current(event.stream, event.attempt)
        if stream is None or stream.stage is not Stage.DECODE:
            return
        self._unbook(stream)
        self._slots.release(stream.id)
        self._timers.clear(stream.id)
        stream.resumed = True
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
        if (member := self._view.members.get(event.instance)) is not None:
            stream.barred[event.instance] = member.instance.epoch
        if not stream.resumed and stream.option is not Option.START:
            stream.removed.add(stream.option)
        pause_s = min(LONGEST_PAUSE_S, self._settings.recovery.retry_pause_s * 2**stream.failures)
        stream.failures += 1
        stream.retry_at_s = now_s + pause_s
        self._fail(stream, event.cause, event.instance, now_s)
        self._place(stream, now_s)

    def _ring(self, stream: Stream, now_s: float) -> None:
        """The stream's alarm: its slot has expired, or its wait is over in one way or another."""
        if stream.stage is Stage.DECODE:
            stream.removed.add(stream.option)
            self._fail(stream, f"its slot expired after {self._settings.slot_lease_s:g} s", None, now_s)
        self._place(stream, now_s)

    def _forget(self, stream: Stream) -> None:
        self._leave(stream)
        for instance in list(stream.holders):
            self._forget_holder(stream.id, instance)
        self._idle.pop(stream.id, None)
        del self._streams[stream.id]

    # --- the decision

    def _place(self, stream: Stream, now_s: float) -> None:
        """Start the next attempt of a stream that has none running, or leave it waiting for what it lacks."""
        if stream.attempt >= self._settings.recovery.max_attempts:
            message = f"the stream failed {stream.attempt} times, at last: {stream.cause}"
            self._give_up(stream, Reason.RETRIES, message)
            return
        barred_too = _is_past(stream.retry_at_s, now_s)
        placed = self._start_over(stream, now_s, barred_too) if stream.is_fresh else self._recover(stream, now_s, barred_too)
        if not placed:
            self._keep_waiting(stream, now_s)

    def _start_over(self, stream: Stream, now_s: float, barred_too: bool) -> bool:
        pair = pair_for(self._view, stream, barred_too=False) or (barred_too and pair_for(self._view, stream, barred_too=True))
        if not pair:
            return False
        prefill, decode = pair
        compute_s = prefill.instance.prefill.seconds_for(stream.prompt_tokens)
        covered = prefill.instance.prefill.covers(stream.prompt_tokens)
        total_s = prefill.queue_s + compute_s
        estimate = Estimate(Option.START, decode.instance.id, total_s, prefill.queue_s, 0.0, compute_s, not covered)
        plan = Plan(decode=decode.instance.id, prefill=None if prefill is decode else prefill.instance.id)
        self._start(stream, plan, estimate, (estimate,))
        return True

    def _recover(self, stream: Stream, now_s: float, barred_too: bool) -> bool:
        targets = targets_for(self._view, stream, barred_too=False)
        if not targets and barred_too:
            targets = targets_for(self._view, stream, barred_too=True)
        if not targets:
            return False
        estimates = self._options.weigh(stream, targets, now_s)
        chosen = decide(self._settings.name, self._eligible(stream, estimates, now_s), self._budget_s(stream, now_s))
        if chosen.option is Option.ABORT:
            message = f"no option brings the stream back within {self._slo.recovery_gap_s:g} s"
            self._give_up(stream, Reason.SLO, message)
            return True
        if chosen.option is Option.MIGRATE and not self._slots.acquire(chosen.target, stream.id, now_s, chosen.total_s):
            self._queue(stream, chosen, now_s)
            return True
        self._start(stream, self._options.plan(stream, chosen, now_s), chosen, tuple(estimates))
        if chosen.option is Option.MIGRATE:
            self._timers.set(stream.id, now_s + self._settings.slot_lease_s)
        return True

    def _eligible(self, stream: Stream, estimates: list[Estimate], now_s: float) -> list[Estimate]:
        """What has not just failed. Never empty, and never only what failed last: then nothing would replace that attempt."""
        if stream.stage is Stage.QUEUED and _is_past(stream.waiting_since_s + self._settings.recovery.wait_s, now_s):
            # Who has queued for as long as anybody waits takes the other way, so that no policy queues for ever.
            return [estimate for estimate in estimates if estimate.option is not Option.MIGRATE]
        allowed = [estimate for estimate in estimates if estimate.option not in stream.removed]
        return allowed or [estimate for estimate in estimates if estimate.option is not stream.option] or estimates

    def _budget_s(self, stream: Stream, now_s: float) -> float | None:
        if not self._slo.abort or stream.failed_at_s is None:
            return None
        return stream.failed_at_s + self._slo.recovery_gap_s - now_s

    # --- attempts

    def _start(self, stream: Stream, plan: Plan, chosen: Estimate, estimates: tuple[Estimate, ...]) -> None:
        stream.attempt += 1
        stream.plan, stream.option, stream.resumed = plan, chosen.option, False
        self._slots.leave(stream.id)
        self._timers.clear(stream.id)
        del self._idle[stream.id]
        decode = self._view.members[plan.decode]
        prefill = None if plan.prefill is None else self._view.members[plan.prefill]
        self._book(stream, prefill or decode, chosen)
        stage = Stage.DECODE if prefill is None else Stage.PREFILL
        self._run(stream, stage, prefill or decode, decodes_on=decode)
        self._actions.append(Start(stream.id, stream.attempt, plan))
        if stream.attempt > 1:
            self._actions.append(
                Recovered(
                    stream.id, stream.attempt, chosen.option, chosen.total_s, estimates, cause=stream.cause, failed=stream.failed
                )
            )

    def _run(self, stream: Stream, stage: Stage, member: Member, decodes_on: Member) -> None:
        if stream.runs_on is not None:
            stream.runs_on.running.discard(stream.id)
        if stream.decodes_on is not decodes_on:
            if stream.decodes_on is not None:
                self._view.count_stream(stream.decodes_on, -1)
            self._view.count_stream(decodes_on, 1)
        stream.stage, stream.runs_on, stream.decodes_on = stage, member, decodes_on
        member.running.add(stream.id)

    def _book(self, stream: Stream, member: Member, chosen: Estimate) -> None:
        member.book(chosen.compute_s)
        stream.booked_on, stream.booked_s = member, chosen.compute_s
        plan = stream.plan
        if plan is not None and plan.source is not None:
            source = self._view.members[plan.source].instance
            stream.link = self._view.link(source.node, member.instance.node)
            stream.link_bytes = plan.source_pages * source.geometry.page_bytes
            stream.link.in_flight_bytes += stream.link_bytes

    def _unbook(self, stream: Stream) -> None:
        if stream.booked_on is not None:
            stream.booked_on.unbook(stream.booked_s)
            stream.booked_on = None
        if stream.link is not None:
            stream.link.in_flight_bytes -= stream.link_bytes
            stream.link = None

    def _leave(self, stream: Stream) -> None:
        """Take the stream out of every book: its attempt is over, or its wait."""
        self._unbook(stream)
        self._slots.release(stream.id)
        self._slots.leave(stream.id)
        self._timers.clear(stream.id)
        if stream.runs_on is not None:
            stream.runs_on.running.discard(stream.id)
            stream.runs_on = None
        if stream.decodes_on is not None:
            self._view.count_stream(stream.decodes_on, -1)
            stream.decodes_on = None

    def _fail(self, stream: Stream, cause: str, failed: InstanceId | None, now_s: float) -> None:
        """The current attempt is over; the stream waits to be placed."""
        stream.cause, stream.failed = cause, failed
        if stream.failed_at_s is None:
            stream.failed_at_s = now_s
        self._wait(stream, now_s)

    # --- waiting

    def _wait(self, stream: Stream, now_s: float) -> None:
        """From an attempt, or from a queue that is gone, to waiting; whoever calls has it placed."""
        self._leave(stream)
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
        budget_s = self._budget_s(stream, now_s)
        budget_ends_s = wait_ends_s if budget_s is None else now_s + budget_s
        if _is_past(wait_ends_s, now_s):
            self._give_up(stream, Reason.NO_INSTANCE, f"no instance came up within {self._settings.recovery.wait_s:g} s")
        elif _is_past(budget_ends_s, now_s):
            self._give_up(stream, Reason.SLO, f"no instance came up within {self._slo.recovery_gap_s:g} s")
        else:
            alarms_s = [wait_ends_s, budget_ends_s, stream.retry_at_s]
            self._timers.set(stream.id, min(at_s for at_s in alarms_s if not _is_past(at_s, now_s)))

    def _give_up(self, stream: Stream, reason: Reason, message: str) -> None:
        # A client that comes back when others have just waited in vain should not come at once.
        retry_after_s = max(1.0, min(self._settings.recovery.wait_s, 30.0)) if reason is Reason.NO_INSTANCE else 1.0
        self._forget(stream)
        self._actions.append(GiveUp(stream.id, reason, message, retry_after_s))


def _by_arrival(streams: Iterable[Stream]) -> list[Stream]:
    return sorted(streams, key=lambda stream: stream.number)


def _is_past(at_s: float, now_s: float) -> bool:
    return at_s <= now_s + SLACK_S
