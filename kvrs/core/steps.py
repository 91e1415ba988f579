"""Steps of the lifecycle table (`model/lifecycle.py`): the effect of an event on one stream."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvrs.core import checkpoints, kv_locations, ledger, outliers, placing, staying, together
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
from kvrs.core.state import State, deadlines_of
from kvrs.ids import StreamId

# Function of the state, the stream (None for ADMIT and ADOPT), the event and the time.
# Replays of one stream whose output may differ before the stream is given up: one is tried again.
_MOST_DIFFERENCES = 2

_Method = Callable[[State, Any, Any, float], None]


def apply(state: State, stream_id: StreamId, event: StreamEvent, now_s: float) -> None:
    """Take the step that the lifecycle table names for the event in the stream's stage."""
    stream = state.streams.get(stream_id)
    method = METHODS[type(event)][None if stream is None else stream.stage]
    if method is not None:
        method(state, stream, event, now_s)


def _never(state: State, stream: Stream | None, event: StreamEvent, now_s: float) -> None:
    raise AssertionError((event, stream))


def _admit(state: State, _: None, event: ev.StreamArrived, now_s: float) -> None:
    common = state.settings.deadlines
    deadlines = common
    if event.deadlines is not ev.NO_DEADLINES:
        deadlines = deadlines_of(event.deadlines, state.settings.slo)
    stream = state.streams[event.stream] = state.stream_of(event.stream)
    stream.admit(event, state.arrivals, deadlines, common, now_s)
    state.arrivals += 1
    # The new stream is placed alone, and no instance has failed it.
    placing.carry_out(state, stream, placing.start(state, stream, now_s), now_s)


def _adopt(state: State, _: None, event: ev.StreamAdopted, now_s: float) -> None:
    """Recover the stream as a victim of the loss of its proxy."""
    common = state.settings.deadlines
    deadlines = deadlines_of(event.deadlines, state.settings.slo)
    stream = state.streams[event.stream] = state.stream_of(event.stream)
    stream.admit(event, state.arrivals, deadlines, common, now_s)
    stream.generates = state.view.generates
    state.arrivals += 1
    kv_locations.inherit(state, stream, event.kept)
    placing.place_all(state, [stream], now_s)


def _note_prefill(state: State, stream: Stream, event: ev.PrefillDone, now_s: float) -> None:
    """Note the KV of a call for both stages, or of a text prompt at decode; or the cached tokens of
    a prefill that was called together with decode.
    """
    attempt = stream.attempt
    assert attempt.runs_on is not None, stream
    if not attempt.resumed:
        ledger.prefilled(state, stream, attempt.runs_on, event, now_s)
    elif attempt.plan is not None and attempt.plan.prefill in state.view.members:
        prefill = state.view.members[attempt.plan.prefill]
        ledger.note_found(state, stream, prefill, event, now_s)


def _hand_off(state: State, stream: Stream, event: ev.PrefillDone, now_s: float) -> None:
    """Hand off to the decode instance of the plan, which may have a new epoch by now, or to a
    sooner one (`routing.py`).
    """
    attempt, view = stream.attempt, state.view
    if attempt.stay_deadline is not None:
        ledger.clear_stay_deadline(state, stream)
    plan, prefill = attempt.plan, attempt.runs_on
    assert plan is not None, stream
    assert prefill is not None, stream
    ledger.prefilled(state, stream, prefill, event, now_s)
    ledger.settle_bookings(state, stream)  # The stream's own bookings must not count against it.
    outliers.answered(state, stream, prefill, now_s)
    planned, decode = view.members.get(plan.decode), None
    cause = "the decode instance was lost during prefill, or is drained"
    leaves = planned is not None and (planned.draining or planned.drain_ordered)
    if attempt.number > 1 and stream.recovery.is_counted:
        placing.separate(state, stream, now_s)
    if planned is not None and not (leaves and planned.is_drained):
        decode = hand_off_to(view, stream, prefill, planned, state.settings.policy)
    if planned is None or decode is None:
        if planned is not None:
            _halt(state, stream)
            if not stream.is_served_at(planned):
                cause = "the decode instance has unloaded the adapter during prefill"
        ledger.end_attempt(state, stream, cause, plan.decode, now_s)
        placing.place_all(state, [stream], now_s)
        return
    # The plan is replaced only for a hand-off that goes elsewhere or needs new agents; a single
    # call is at decode already.
    if not is_one_call(planned, prefill.id) and (
        decode is not planned or state.settings.keeps_checkpoints
    ):
        plan = _redirect(state, stream, plan, prefill, decode)
    ledger.hand_off(state, stream, plan, prefill, decode)


def _redirect(
    state: State, stream: Stream, plan: act.Plan, prefill: Member, decode: Member
) -> act.Plan:
    places = checkpoints.place(state, stream, decode, prefill)
    if decode.id == plan.decode and places == plan.places:
        return plan
    changed = msgspec.structs.replace(plan, decode=decode.id, places=places)
    state.actions.append(act.Redirect(stream.id, stream.attempt.number, changed))
    return changed


def _await_whole(state: State, stream: Stream, event: ev.WholeAsked, now_s: float) -> None:
    ledger.await_whole(state, stream)


def _resume(state: State, stream: Stream, event: ev.StreamResumed, now_s: float) -> None:
    home = stream.attempt.runs_on
    attempt = stream.attempt
    is_awaited = attempt.stay_deadline is not None
    if is_awaited and staying.is_stale_token(state, stream, now_s):
        ledger.arrived(state, stream)
        return
    decision, recovers = attempt.decision, stream.adopted or attempt.number > 1
    if decision is not None and (recovers or decision.chosen.option is not Option.START):
        state.actions.append(together.settle(state, stream, decision, now_s))
    decode = attempt.decodes_on
    is_second_run = attempt.option is Option.REPLAY and not attempt.resumed
    if is_second_run and decode is not None and not decode.abilities.replays:
        state.differences.note(stream.produced_tokens, differed=False)
    if home is not None:
        outliers.answered(state, stream, home, now_s)
        if stream.recovery.overflowed:
            outliers.computed(state, stream, home)
    ledger.resume(state, stream)
    stream.note_resumed(event, now_s)


def _note(state: State, stream: Stream, event: ev.AttemptFailed, now_s: float) -> None:
    """Note the tokens of an attempt that failed after the policy had ended it, usually because its
    instance was lost.
    """
    stream.note_tokens(event.produced_tokens)


def _fail(state: State, stream: Stream, event: ev.AttemptFailed, now_s: float) -> None:
    stream.note_tokens(event.produced_tokens)
    if stream.attempt.stay_deadline is not None:
        stream.recovery.remove(stream.attempt.option)
    is_over, is_slow = (
        outliers.is_refused_for_good(state, stream, event),
        outliers.is_slow(state, stream, event),
    )
    pause_s = outliers.ERROR_PAUSE_S * outliers.is_equal_error(state, stream, event)
    member = state.view.members.get(event.instance)
    was_ejected = member is not None and member.answers.is_ejected
    outliers.failed(state, stream, event)
    ledger.end_attempt(state, stream, event.cause, event.instance, now_s)
    if event.failure is ev.FailureKind.DIFFERS:
        _differ(state, stream, event, now_s)
        return
    if is_over and event.failure is ev.FailureKind.DENIED:
        placing.give_up(state, stream, act.Reason.DENIED, f"{event.instance}: {event.cause}")
        return
    if is_over:
        placing.give_up(state, stream, act.Reason.REFUSED, event.cause)
        return
    if event.failure is ev.FailureKind.NOT_A_NUMBER:
        kv_locations.distrust(state, stream)
    elif event.instance == state.view.store.id:
        kv_locations.forget(state, stream.id, event.instance)
    if event.failure is ev.FailureKind.BUSY:
        stream.recovery.note_busy_answer(now_s)
    elif was_ejected and stream.recovery.lasts_s(now_s) < state.settings.policy.recovery.wait_s:
        stream.recovery.note_trial_failed()
    else:
        stream.recovery.note_attempt_failed()
    stream.recovery.pause(now_s, pause_s)
    is_broken = event.abrupt and event.failure is not ev.FailureKind.BUSY
    if is_broken and member is not None and not stream.attempt.resumed:
        state.poison.broke(stream, member, now_s)
    # A busy answer includes an instance that accepted no connection, which may be dead.
    was_connected = event.failure is not ev.FailureKind.BUSY
    if is_slow:
        outliers.keep_to_asked(state, stream, event)
        stream.recovery.take_for_slow(now_s)
    elif was_connected or event.abrupt:
        stream.recovery.suspect(event.instance, was_connected=was_connected)
    if event.abrupt and event.instance in state.view.members:
        placing.gather(state, [stream], now_s)
    else:
        placing.place_all(state, [stream], now_s)


def _differ(state: State, stream: Stream, event: ev.AttemptFailed, now_s: float) -> None:
    """Try a replay whose output differs once more, elsewhere if possible; then give the stream up,
    or continue it inexactly. Where the client's text is not that of its tokens, only a replay may
    follow.
    """
    recovery, member = stream.recovery, state.view.members.get(event.instance)
    recovery.note_attempt_failed()
    if stream.attempt.option is not Option.REPLAY:
        stream.needs_replay = stream.only_replay = True
    else:
        recovery.note_difference(event.instance)
        if member is not None:
            stream.exclude(member)
            if not member.abilities.replays:
                state.differences.note(event.same_tokens + 1, differed=True)
        if len(recovery.differed) >= _MOST_DIFFERENCES:
            if stream.must_replay:
                found = ", ".join(dict.fromkeys(recovery.differed))
                message = f"the known output did not come again ({found}): {event.cause}"
                placing.give_up(state, stream, act.Reason.INEXACT, message)
                return
            recovery.remove(Option.REPLAY)
    placing.place_all(state, [stream], now_s)


def _deny(state: State, stream: Stream, event: ev.SlotDenied, now_s: float) -> None:
    held = state.slots.held.get(stream.id)
    if held is not None and held.target == event.target:
        ledger.deny(state, stream, now_s + event.wait_s)
        placing.place_again(state, stream, now_s)


def _lose(state: State, stream: Stream, event: InstanceLeft, now_s: float) -> None:
    stream.note_tokens(event.produced_tokens.get(stream.id, 0))
    if event.is_lost:
        stream.recovery.note_attempt_failed()
    ledger.end_attempt(state, stream, event.cause, event.instance, now_s)


def _target_lost(state: State, stream: Stream, event: InstanceLeft, now_s: float) -> None:
    ledger.wait(state, stream, now_s)


def _expire(state: State, stream: Stream, event: AlarmDue, now_s: float) -> None:
    if stream.attempt.stay_deadline is not None:
        staying.stay_deadline_over(state, stream, now_s)
        return
    stream.recovery.expire_slot(stream.attempt.option)
    stream.recovery.note_attempt_failed()
    cause = f"its slot expired after {state.settings.policy.slot_lease_s:g} s"
    ledger.end_attempt(state, stream, cause, None, now_s)
    number = stream.attempt.number
    placing.place_again(state, stream, now_s)
    if stream.id in state.streams and stream.attempt.number == number:
        # No new attempt has replaced the expired one, which must not fetch KV without a slot.
        state.actions.append(act.Halt(stream.id, number))


def _place(state: State, stream: Stream, event: AlarmDue | SlotFree, now_s: float) -> None:
    placing.place_again(state, stream, now_s)


def _end(state: State, stream: Stream, event: ev.StreamEnded, now_s: float) -> None:
    attempt = stream.attempt
    there = attempt.runs_on if attempt.resumed else None
    if attempt.runs_on is None:
        placing.forget(state, stream)
    else:
        ledger.forget(state, stream)
    is_paused = there is not None and there.answers.busy_until_s is not None
    if there is not None and is_paused and there.answers.note_room(now_s):
        placing.place_first(state, now_s)


def _halt(state: State, stream: Stream) -> None:
    """End a running attempt because its stream moves, which is no failure."""
    state.actions.append(act.Halt(stream.id, stream.attempt.number))


def halt_all(state: State, streams: list[Stream]) -> None:
    for stream in streams:
        _halt(state, stream)


STEPS: Mapping[Step, _Method] = {
    Step.ADMIT: _admit,
    Step.ADOPT: _adopt,
    Step.PLACE: _place,
    Step.NOTE_PREFILL: _note_prefill,
    Step.HAND_OFF: _hand_off,
    Step.AWAIT_WHOLE: _await_whole,
    Step.RESUME: _resume,
    Step.NOTE: _note,
    Step.FAIL: _fail,
    Step.DENY: _deny,
    Step.LOSE: _lose,
    Step.TARGET_LOST: _target_lost,
    Step.EXPIRE: _expire,
    Step.END: _end,
}


def _method(cell: Cell) -> _Method | None:
    """Return the function for a cell of the table; None: the event is ignored."""
    if cell is None:
        return _never
    return None if isinstance(cell, Ignored) else STEPS[cell]


METHODS: Mapping[type[StreamEvent], Mapping[Stage | None, _Method | None]] = {
    event: {stage: _method(cell) for stage, cell in row.items()} for event, row in TABLE.items()
}
