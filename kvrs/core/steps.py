"""The steps of the lifecycle table (`model/lifecycle.py`): what an event does to one stream."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.core.decisions import Decisions
from kvrs.core.ledger import Ledger
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.model.lifecycle import (
    TABLE,
    AlarmDue,
    Cell,
    Ignored,
    InstanceLeft,
    SlotFree,
    Stage,
    Step,
    StreamEvent,
)
from kvrs.core.model.member import Member, is_one_call
from kvrs.core.model.streams import Stream
from kvrs.core.routing import hand_off_to
from kvrs.core.starter import Starter
from kvrs.core.staying import Staying
from kvrs.ids import StreamId

# Takes the stream (of ADMIT and ADOPT: none), the event and the time.
_Method = Callable[[Any, Any, float], None]


class Steps:
    def __init__(
        self,
        ledger: Ledger,
        starter: Starter,
        staying: Staying,
        decisions: Decisions,
        settings: PolicySettings,
        slo: SloSettings,
        actions: list[act.Action],
        stream_of: Callable[[StreamId], Stream],
    ) -> None:
        self._stream_of = stream_of
        self._ledger = ledger
        self._starter = starter
        self._staying = staying
        self._decisions = decisions
        self._actions = actions
        self._arrivals = 0
        self._steps: Mapping[Step, _Method] = {
            Step.ADMIT: self._admit,
            Step.ADOPT: self._adopt,
            Step.PLACE: self._place,
            Step.NOTE_PREFILL: self._note_prefill,
            Step.HAND_OFF: self._hand_off,
            Step.AWAIT_WHOLE: self._await_whole,
            Step.RESUME: self._resume,
            Step.NOTE: self._note,
            Step.FAIL: self._fail,
            Step.DENY: self._deny,
            Step.LOSE: self._lose,
            Step.TARGET_LOST: self._target_lost,
            Step.EXPIRE: self._expire,
            Step.END: self._end,
        }
        self.table: Mapping[type[StreamEvent], Mapping[Stage | None, _Method | None]] = {
            event: {stage: self._method(cell) for stage, cell in row.items()}
            for event, row in TABLE.items()
        }
        self.reload(settings, slo)

    def reload(self, settings: PolicySettings, slo: SloSettings) -> None:
        self._settings = settings
        self._slo = slo
        self._deadlines = _deadlines_of(ev.NO_DEADLINES, slo)  # Of most streams.

    def apply(self, stream_id: StreamId, event: StreamEvent, now_s: float) -> None:
        """Take the step that the table names."""
        stream = self._ledger.streams.get(stream_id)
        method = self.table[type(event)][None if stream is None else stream.stage]
        if method is not None:
            method(stream, event, now_s)

    def _method(self, cell: Cell) -> _Method | None:
        """The method for a cell of the table; None: the event is ignored."""
        if cell is None:
            return self._never
        return None if isinstance(cell, Ignored) else self._steps[cell]

    def _never(self, stream: Stream | None, event: StreamEvent, now_s: float) -> None:
        raise AssertionError((event, stream))

    # A stream begins.

    def _admit(self, _: None, event: ev.StreamArrived, now_s: float) -> None:
        deadlines = self._deadlines
        if event.deadlines is not ev.NO_DEADLINES:
            deadlines = _deadlines_of(event.deadlines, self._slo)
        stream = self._ledger.streams[event.stream] = self._stream_of(event.stream)
        stream.admit(event, self._arrivals, deadlines, self._deadlines, now_s)
        self._arrivals += 1
        # No other is placed with it, and nothing has failed it.
        self._starter.carry_out(stream, self._decisions.start(stream, now_s), now_s)

    def _adopt(self, _: None, event: ev.StreamAdopted, now_s: float) -> None:
        """Recover it as a victim of the loss of its proxy."""
        deadlines = _deadlines_of(event.deadlines, self._slo)
        stream = self._ledger.streams[event.stream] = self._stream_of(event.stream)
        stream.admit(event, self._arrivals, deadlines, self._deadlines, now_s)
        self._arrivals += 1
        self._ledger.kv_locations.inherit(stream, event.kept)
        self._starter.place_all([stream], now_s)

    # Its attempt progresses.

    def _note_prefill(self, stream: Stream, event: ev.PrefillDone, now_s: float) -> None:
        """Note the KV of a call that does both stages, or of a prompt that decode got as text; or
        what the prefill of two calls at once had in its cache.
        """
        attempt = stream.attempt
        assert attempt.runs_on is not None, stream
        if not attempt.resumed:
            self._ledger.prefilled(stream, attempt.runs_on, event, now_s)
        elif attempt.plan is not None and attempt.plan.prefill in self._ledger.view.members:
            prefill = self._ledger.view.members[attempt.plan.prefill]
            self._ledger.note_found(stream, prefill, event, now_s)

    def _hand_off(self, stream: Stream, event: ev.PrefillDone, now_s: float) -> None:
        """To the decode instance of the plan, which may be a new epoch by now, or to another one
        where that is sooner (`routing.py`).
        """
        attempt, view = stream.attempt, self._ledger.view
        if attempt.stay_deadline is not None:
            self._ledger.clear_stay_deadline(stream)
        plan, prefill = attempt.plan, attempt.runs_on
        assert plan is not None, stream
        assert prefill is not None, stream
        self._ledger.prefilled(stream, prefill, event, now_s)
        self._ledger.settle_bookings(stream)  # What it booked itself is not in its own way.
        self._ledger.outliers.answered(stream, prefill, now_s)
        planned, decode = view.members.get(plan.decode), None
        cause = "the decode instance was lost during prefill, or is drained"
        leaves = planned is not None and (planned.draining or planned.drain_ordered)
        if attempt.number > 1 and stream.recovery.is_counted:
            self._starter.separate(stream, now_s)
        if planned is not None and not (leaves and planned.is_drained):
            decode = hand_off_to(view, stream, prefill, planned, self._settings)
        if planned is None or decode is None:
            if planned is not None:
                self._halt(stream)
                if not stream.is_served_at(planned):
                    cause = "the decode instance has unloaded the adapter during prefill"
            self._ledger.end_attempt(stream, cause, plan.decode, now_s)
            self._starter.place_all([stream], now_s)
            return
        # Else the plan holds: it is one call, which is at decode already, or nothing has changed.
        if not is_one_call(planned, prefill.id) and (
            decode is not planned or self._ledger.checkpoints.are_kept
        ):
            plan = self._redirect(stream, plan, prefill, decode)
        self._ledger.hand_off(stream, plan, prefill, decode)

    def _redirect(
        self, stream: Stream, plan: act.Plan, prefill: Member, decode: Member
    ) -> act.Plan:
        places = self._ledger.checkpoints.place(stream, decode, prefill)
        if decode.id == plan.decode and places == plan.places:
            return plan
        changed = msgspec.structs.replace(plan, decode=decode.id, places=places)
        self._actions.append(act.Redirect(stream.id, stream.attempt.number, changed))
        return changed

    def _await_whole(self, stream: Stream, event: ev.WholeAsked, now_s: float) -> None:
        self._ledger.await_whole(stream)

    def _resume(self, stream: Stream, event: ev.StreamResumed, now_s: float) -> None:
        home = stream.attempt.runs_on
        attempt = stream.attempt
        is_awaited = attempt.stay_deadline is not None
        if is_awaited and self._staying.is_stale_token(stream, now_s):
            self._ledger.arrived(stream)
            return
        decision, recovers = attempt.decision, stream.adopted or attempt.number > 1
        if decision is not None and (recovers or decision.chosen.option is not Option.START):
            self._actions.append(self._decisions.settle(stream, decision, now_s))
        if home is not None:
            self._ledger.outliers.answered(stream, home, now_s)
            if stream.recovery.overflowed:
                self._ledger.outliers.computed(stream, home)
        self._ledger.resume(stream)
        stream.note_resumed(event, now_s)

    # Its attempt ends.

    def _note(self, stream: Stream, event: ev.AttemptFailed, now_s: float) -> None:
        """The attempt had ended before its connection broke: with its instance, as a rule."""
        stream.note_tokens(event.produced_tokens)

    def _fail(self, stream: Stream, event: ev.AttemptFailed, now_s: float) -> None:
        stream.note_tokens(event.produced_tokens)
        if stream.attempt.stay_deadline is not None:
            stream.recovery.remove(stream.attempt.option)
        outliers = self._ledger.outliers
        is_over, is_slow = (
            outliers.is_refused_for_good(stream, event),
            outliers.is_slow(stream, event),
        )
        member = self._ledger.view.members.get(event.instance)
        was_ejected = member is not None and member.answers.is_ejected
        outliers.failed(stream, event)
        self._ledger.end_attempt(stream, event.cause, event.instance, now_s)
        if is_over and event.failure is ev.FailureKind.DENIED:
            self._starter.give_up(stream, act.Reason.DENIED, f"{event.instance}: {event.cause}")
            return
        if is_over:
            self._starter.give_up(stream, act.Reason.REFUSED, event.cause)
            return
        if event.failure is ev.FailureKind.NOT_A_NUMBER:
            self._ledger.kv_locations.distrust(stream)
        elif event.instance == self._ledger.view.store.id:
            self._ledger.kv_locations.forget(stream.id, event.instance)
        if event.failure is ev.FailureKind.BUSY:
            stream.recovery.note_busy_answer(now_s)
        elif was_ejected and stream.recovery.lasts_s(now_s) < self._settings.recovery.wait_s:
            stream.recovery.note_trial_failed()
        else:
            stream.recovery.note_attempt_failed()
        is_broken = event.abrupt and event.failure is not ev.FailureKind.BUSY
        if is_broken and member is not None and not stream.attempt.resumed:
            self._ledger.poison.broke(stream, member, now_s)
        # One that took no connection may be dead.
        was_connected = event.failure is not ev.FailureKind.BUSY
        if is_slow:
            outliers.keep_to_asked(stream, event)
            stream.recovery.take_for_slow(now_s)
        elif was_connected or event.abrupt:
            stream.recovery.suspect(event.instance, was_connected=was_connected)
        if event.abrupt and event.instance in self._ledger.view.members:
            self._starter.gather([stream], now_s)
        else:
            self._starter.place_all([stream], now_s)

    def _deny(self, stream: Stream, event: ev.SlotDenied, now_s: float) -> None:
        held = self._ledger.slots.held.get(stream.id)
        if held is not None and held.target == event.target:
            self._ledger.deny(stream, now_s + event.wait_s)
            self._starter.place_again(stream, now_s)

    def _lose(self, stream: Stream, event: InstanceLeft, now_s: float) -> None:
        stream.note_tokens(event.produced_tokens.get(stream.id, 0))
        if event.is_lost:
            stream.recovery.note_attempt_failed()
        self._ledger.end_attempt(stream, event.cause, event.instance, now_s)

    def _target_lost(self, stream: Stream, event: InstanceLeft, now_s: float) -> None:
        self._ledger.wait(stream, now_s)

    def _expire(self, stream: Stream, event: AlarmDue, now_s: float) -> None:
        if stream.attempt.stay_deadline is not None:
            self._staying.stay_deadline_over(stream, now_s)
            return
        stream.recovery.expire_slot(stream.attempt.option)
        stream.recovery.note_attempt_failed()
        cause = f"its slot expired after {self._settings.slot_lease_s:g} s"
        self._ledger.end_attempt(stream, cause, None, now_s)
        number = stream.attempt.number
        self._starter.place_again(stream, now_s)
        if stream.id in self._ledger.streams and stream.attempt.number == number:
            # No other attempt has taken its place, and without a slot it must not fetch on.
            self._actions.append(act.Halt(stream.id, number))

    def _place(self, stream: Stream, event: AlarmDue | SlotFree, now_s: float) -> None:
        self._starter.place_again(stream, now_s)

    def _end(self, stream: Stream, event: ev.StreamEnded, now_s: float) -> None:
        attempt = stream.attempt
        there = attempt.runs_on if attempt.resumed else None
        if attempt.runs_on is None:
            self._starter.forget(stream)
        else:
            self._ledger.forget(stream)
        is_paused = there is not None and there.answers.busy_until_s is not None
        if there is not None and is_paused and there.answers.note_room(now_s):
            self._starter.place_first(now_s)

    def _halt(self, stream: Stream) -> None:
        """End an attempt that still runs; to be moved is not to fail."""
        self._actions.append(act.Halt(stream.id, stream.attempt.number))

    def halt_all(self, streams: list[Stream]) -> None:
        for stream in streams:
            self._halt(stream)


def _deadlines_of(requested: ev.Deadlines, slo: SloSettings) -> ev.Deadlines:
    """The client's limits, and the operator's where the client named none."""
    return ev.Deadlines(
        ttft_s=slo.ttft_s if requested.ttft_s is None else requested.ttft_s,
        recovery_gap_s=slo.recovery_gap_s
        if requested.recovery_gap_s is None
        else requested.recovery_gap_s,
        end_to_end_s=slo.deadline_s if requested.end_to_end_s is None else requested.end_to_end_s,
    )
