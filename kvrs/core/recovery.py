"""Policy that decides where streams run, and how they survive the loss of an instance.

Pure: no clock, no socket, no randomness. A proxy drives it in real time, a simulator in virtual
time. The table of `model/lifecycle.py` has the stages of a stream, and what each event does to it;
its steps are here.

Invariants: a stream has one current attempt, whose number only rises; reports of older attempts are
ignored; no `Start` names an instance that is not up, nor a lost holder; a stream that is neither
started nor given up has an alarm; a stream is moved only because its instance was lost, failed it,
is about to end, has a failing GPU, or is drained by an operator.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, assert_never

import msgspec

from kvrs.config.backup import BackupSettings
from kvrs.config.policy import Handoff, PolicySettings, Route, SloSettings
from kvrs.core import checkpoints, kv_locations, ledger, outliers, placing, staying, together
from kvrs.core.checkpoints import protection
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.cluster_view import Hits, have_roles_of
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
from kvrs.core.model.member import TRANSFER_S, Health, Member, is_one_call, pause_s
from kvrs.core.model.reforming import cause_of
from kvrs.core.model.reports import changes_ranks, takes_requests
from kvrs.core.model.streams import Stream
from kvrs.core.options.replay import REPLAY_S_MAX
from kvrs.core.outliers import peers
from kvrs.core.routing import hand_off_to, has_others
from kvrs.core.state import CoreSettings, State, deadlines_of, new_agent, new_member
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import GpuState
from kvrs.protocol.mirror import MAX_HASH_BYTES, MAX_SENT, SentPrompt

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


# Time after coming up within which a death is quick, and number of quick deaths in a row without
# consequence; each further process of the instance waits longer before it gets work.
_QUICK_S = 10.0
_FREE_DEATHS = 2
_FIRST_PAUSE_S = 1.0


def up(state: State, event: ev.InstanceUp, now_s: float) -> None:
    info = event.info
    member = state.view.members.get(info.id)
    if member is not None and info.epoch <= member.epoch:
        return
    if member is not None and event.lives_on:
        member.set_info(info)
        member.told = None
        state.view.set_self_tested(member, event)
        return
    # The former epoch's streams are lost, even if its loss was not reported.
    lost = (
        []
        if member is None
        else _lose_instance(state, member, "replaced by a new epoch", {}, now_s)
    )
    member = state.view.add(state.member_of(event))
    state.view.prefixes.up(member, keeps=bool(info.kept) or event.had_not_ended)
    state.prefill_scale.up(member)
    state.view.share_slowness(member)
    state.view.set_self_tested(member, event)
    member.gpu_degraded = info.id in state.gpu_degraded
    member.drain_ordered = info.id in state.drain_ordered
    state.view.update(member)
    _pause_after_deaths(state, member, now_s)
    kv_locations.instance_up(state, member)
    if event.had_not_ended:
        state.poison.had_not_ended(info.id)
    placing.gather(state, lost, now_s)
    placing.place_idle(state, now_s)


def _pause_after_deaths(state: State, member: Member, now_s: float) -> None:
    """Close a new process for a while if its predecessors died quickly."""
    deaths, _ = state.quick_deaths.get(member.id, (0, 0.0))
    member.answers.quick_deaths, member.up_s = deaths, now_s
    if deaths >= _FREE_DEATHS:
        cause = f"it died {deaths} times within {_QUICK_S:g} s of coming up"
        pause = pause_s(member.id, _FIRST_PAUSE_S, deaths - _FREE_DEATHS)
        member.answers.close(cause, now_s, pause)
        member.up_s += pause


def reported(state: State, event: ev.LoadReported, now_s: float) -> None:
    member, report = state.view.members.get(event.instance), event.report
    if member is None or report.epoch != member.epoch:
        return
    if member.is_unwell is takes_requests(report):
        member.is_unwell = not member.is_unwell
        placing.place_idle(state, now_s)
    if report.draining:
        _drain(state, member, event.produced_tokens, now_s)
    if changes_ranks(member, report, now_s):
        _re_form(state, member, event, now_s)
    member.told = report
    if member.times.note_steps(report):
        state.view.share_slowness(member)
    if not member.abilities.decodes:
        state.view.prefill_order.note_prompts(member, report.queued + report.running)
    else:
        # Other streams there belong to other proxies (LUMEN section 4.3: a target's load is
        # everything that it runs or queues).
        streams = report.queued + report.running if event.has_peers else 0
        others = max(0, streams - len(member.running))
        state.view.count_stream(member, others - member.others_reported)
        member.others_reported = others
    queue_s = report.queue_delay_s
    if (reforming := member.reforming) is not None:
        reforming.queue_s = queue_s
        # A queue is computed only after the re-forming.
        queue_s += max(0.0, reforming.ready_s - now_s)
    state.view.prefill_order.note_queue(member, queue_s)


def _drain(state: State, member: Member, produced: Mapping[StreamId, int], now_s: float) -> None:
    """Move streams from an instance that is about to end, while their KV is still there."""
    member.draining = True
    state.view.update(member)
    # Every report of the instance repeats the move, because a re-forming target may be ready by
    # then.
    if _can_move_from(state, member):
        _leave_kv(state, member, produced)
        _move(state, member, "moved: its instance is about to end", produced, now_s)


def _re_form(state: State, member: Member, event: ev.LoadReported, now_s: float) -> None:
    """Let the instance's streams stay or leave, and place its queue for slots again."""
    if event.report.reforming is None:
        staying.reformed(state, member, event, now_s)
        return
    staying.reforming(state, member, event, _running(state, member), now_s)
    queued = state.slots.waiting_for(member.id)
    if member.reforming is not None and member.is_drained and queued:
        cause = cause_of(member.id, event.report.reforming)
        left = InstanceLeft(member.id, cause, {}, is_lost=False)
        stranded = [state.streams[each] for each in queued]
        for stream in stranded:
            apply(state, stream.id, left, now_s)
        placing.place_all(state, stranded, now_s)


def ended(
    state: State, event: ev.InstanceLost | ev.InstanceRemoved | ev.InstanceExited, now_s: float
) -> None:
    name, member = event.instance, state.view.members.get(event.instance)
    match event:
        case ev.InstanceLost():
            if member is not None and event.epoch >= member.epoch:
                victims = _lose_instance(state, member, event.cause, event.produced_tokens, now_s)
                placing.gather(state, victims, now_s)
        case ev.InstanceRemoved():
            if member is not None:
                member.drain_ordered = True  # The instance's streams are not to blame for its end.
                victims = _lose_instance(state, member, "removed", event.produced_tokens, now_s)
                placing.gather(state, victims, now_s)
            state.drain_ordered.discard(name)
            state.gpu_degraded.discard(name)
            state.quick_deaths.pop(name, None)
            state.view.prefixes.removed(name)
        case ev.InstanceExited():
            if event.is_external:
                state.poison.exited(name, event.epoch, now_s)
        case _:
            assert_never(event)


def agent_lost(state: State, event: ev.HolderLost, now_s: float) -> None:
    agent = state.view.agents.get(event.holder)
    if agent is None or event.epoch < agent.epoch:
        return
    kv_locations.agent_lost(state, event)
    state.poison.node_lost(agent.node, now_s)


def gpu_judged(state: State, event: ev.GpuJudged, now_s: float) -> None:
    is_failing = event.state is GpuState.FAILING
    if is_failing:
        state.gpu_degraded.add(event.instance)
    else:
        state.gpu_degraded.discard(event.instance)
    member = state.view.members.get(event.instance)
    if member is None:
        return
    member.gpu_degraded = is_failing
    state.view.update(member)
    if is_failing and member.is_drained:
        cause = f"moved: its GPU is {event.state.value}: {event.reason}"
        _move(state, member, cause, event.produced_tokens, now_s)


def learned(
    state: State, event: ev.SelfTested | ev.NamesListed | ev.TransferHung, now_s: float
) -> None:
    """Update what is known of a live instance (self-test, names, a transfer that may hang)."""
    member = state.view.members.get(event.instance)
    if member is None or event.epoch != member.epoch:
        return
    match event:
        case ev.SelfTested():
            was = member.tokens, member.is_doubted
            state.view.set_self_tested(member, event)
            if was != (member.tokens, member.is_doubted):  # Streams may wait for it.
                placing.place_idle(state, now_s)
        case ev.NamesListed():
            member.learn(names=event.names)
            placing.place_idle(state, now_s)
        case ev.TransferHung():
            member.hung_until_s = now_s + TRANSFER_S
        case _:
            assert_never(event)


def ordered(state: State, event: ev.DrainOrdered | ev.DrainEnded, now_s: float) -> None:
    """Apply a drain order, for all processes of the instance."""
    member = state.view.members.get(event.instance)
    if isinstance(event, ev.DrainEnded):
        state.drain_ordered.discard(event.instance)
    else:
        state.drain_ordered.add(event.instance)
    if member is None:
        return
    member.drain_ordered = isinstance(event, ev.DrainOrdered)
    state.view.update(member)
    if isinstance(event, ev.DrainEnded):
        placing.place_idle(state, now_s)
    elif event.moves and _can_move_from(state, member):
        _leave_kv(state, member, event.produced_tokens)
        _move(state, member, f"moved: {event.cause}", event.produced_tokens, now_s)


def _can_move_from(state: State, member: Member) -> bool:
    """Return whether the instance is drained and other instances can take its streams now."""
    others = [each for each in state.view.members.values() if not each.must_drain]
    return member.is_drained and have_roles_of(member, others)


def _leave_kv(state: State, member: Member, produced_tokens: Mapping[StreamId, int]) -> None:
    """Keep the KV of the instance's streams for fetching: by a lease while the process is about to
    end, else because nothing new replaces pages in its prefix cache.
    """
    for stream in _running(state, member) if member.abilities.retains else []:
        is_whole = not member.has_lost_cells(stream.id)
        if stream.stage is Stage.DECODE and stream.attempt.resumed and is_whole:
            produced = max(stream.produced_tokens, produced_tokens.get(stream.id, 0))
            pages = (stream.prompt_tokens + produced - 1) // member.abilities.page_size_tokens
            kv_locations.leave(state, stream, member, pages)


def _move(
    state: State, member: Member, cause: str, produced_tokens: Mapping[StreamId, int], now_s: float
) -> None:
    """Decide the instance's streams as if it were lost, although it runs: nothing is fenced.
    Streams that no other instance can continue stay while it runs.
    """
    kept = {
        each.id
        for each in _running(state, member)
        if not _can_leave(state, each, member, produced_tokens.get(each.id, 0))
    }
    halt_all(state, [each for each in _running(state, member) if each.id not in kept])
    event = InstanceLeft(member.id, cause, produced_tokens, is_lost=False)
    placing.gather(state, _leave(state, member, event, now_s, kept), now_s)


def _can_leave(state: State, stream: Stream, member: Member, produced_tokens: int) -> bool:
    """Return whether another instance can continue the stream as it must be continued, in time."""
    if not stream.must_replay:
        return True
    stream.generates = member.generates or stream.generates
    step_s = member.times.table.step_overhead_s if stream.token_s is None else stream.token_s
    if max(stream.produced_tokens, produced_tokens) * step_s > REPLAY_S_MAX:
        return False
    others = (each for each in state.view.targets(stream.name) if each is not member)
    return any(stream.may_replay(each) and not stream.bars(each) for each in others)


def _lose_instance(
    state: State,
    member: Member,
    cause: str,
    produced_tokens: Mapping[StreamId, int],
    now_s: float,
) -> list[Stream]:
    """Remove the instance and its streams from the books; return the streams to place again."""
    state.view.remove(member)
    _count_if_quick(state, member, now_s)
    is_last = not have_roles_of(member, [*state.view.members.values()])
    counted = state.poison.lost(member, now_s, is_last=is_last)
    waiting = [stream for stream in counted if stream.stage is Stage.WAITING]
    for stream_id in list(member.held):
        kv_locations.forget(state, stream_id, member.id)
    event = InstanceLeft(member.id, cause, produced_tokens, is_lost=True)
    victims = _leave(state, member, event, now_s)
    placing.clear_suspects(state, member.id, cause)
    return [*victims, *waiting]


def _count_if_quick(state: State, member: Member, now_s: float) -> None:
    """Count a death soon after coming up; the count begins anew unless one other instance of the
    role has outlived all of these deaths. Where all die alike, a pause saves no stream: it gathers
    them at the instances that are left, and the next death hits all of them.
    """
    if now_s - member.up_s >= _QUICK_S:
        state.quick_deaths.pop(member.id, None)
        return
    deaths, since_s = state.quick_deaths.get(member.id, (0, member.up_s))
    if not any(each.up_s <= since_s for each in peers(state, member) if each is not member):
        deaths, since_s = 0, member.up_s
    state.quick_deaths[member.id] = deaths + 1, since_s


def _leave(
    state: State,
    member: Member,
    event: InstanceLeft,
    now_s: float,
    kept: Collection[StreamId] = (),
) -> list[Stream]:
    """Apply the event to the instance's streams but for those that stay, and to its queue for
    slots; return the streams to place again.
    """
    running = (each for each in sorted(member.running) if each not in kept)
    names = [*running, *state.slots.waiting_for(member.id)]
    streams = [state.streams[each] for each in names]
    for stream in streams:
        apply(state, stream.id, event, now_s)
    return streams


def _running(state: State, member: Member) -> list[Stream]:
    return [state.streams[stream_id] for stream_id in sorted(member.running)]


NO_BACKUP = BackupSettings()


class RecoveryPolicy:
    """The policy of one proxy, with that proxy's own view of the cluster."""

    def __init__(
        self,
        policy: PolicySettings,
        slo: SloSettings,
        backup: BackupSettings = NO_BACKUP,
        *,
        member_of: Callable[[ev.InstanceUp], Member] = new_member,
        agent_of: Callable[[ev.HolderUp], Agent] = new_agent,
        stream_of: Callable[[StreamId], Stream] = Stream,
    ) -> None:
        """`member_of`, `agent_of`: make the record of an instance or agent that has come up, used
        only here or also by its watch. `stream_of`: makes the record of a stream that has arrived,
        to which the proxy adds its journal.
        """
        sections = CoreSettings(policy, slo, backup)
        self.state = state = State(sections, member_of, agent_of, stream_of)
        # Read-only views: all streams, and the instances that are up.
        self.streams: Mapping[StreamId, Stream] = state.streams
        self.members: Mapping[InstanceId, Member] = state.view.members

    def loads_rows_of(self, target: Member, holder: Member) -> bool:
        """Return whether the target can load rows that the agent of the holder's node serves."""
        if not holder.shared.has_tier or holder.shared.rows != target.shared.rows:
            return False
        if holder.node == target.node:
            return True
        agent = self.state.view.agent_on(holder.node)
        return agent is not None and agent.rows.to_other_nodes

    def handle(self, event: ev.Event, now_s: float) -> list[act.Action]:
        """Apply one event; return the actions to perform, in order."""
        state = self.state
        state.view.now_s = now_s
        if state.begun:
            together.predict(state)
        if isinstance(event, ev.OfStream):
            stream = self.streams.get(event.stream)
            if stream is None:
                method = METHODS[type(event)][None]
            elif isinstance(event, ev.OfAttempt) and event.attempt != stream.attempt.number:
                method = None  # `Ignored.LATE`: a later attempt has begun.
            else:
                method = METHODS[type(event)][stream.stage]
            if method is not None:
                method(state, stream, event, now_s)
        else:
            self._apply(event, now_s)
        if state.timers.heap or state.slots.awaited or state.held_back:
            self._place_due(now_s)
        actions = state.actions.copy()
        state.actions.clear()
        return actions

    def _apply(self, event: ev.OfCluster, now_s: float) -> None:
        """Apply an event that concerns more than one stream."""
        state = self.state
        match event:
            case ev.InstanceUp():
                up(state, event, now_s)
            case ev.PagesKept():
                kv_locations.kept_pages(state, event)
            case ev.InstanceLost() | ev.InstanceRemoved() | ev.InstanceExited():
                ended(state, event, now_s)
            case ev.GpuJudged():
                gpu_judged(state, event, now_s)
            case ev.DrainOrdered() | ev.DrainEnded():
                ordered(state, event, now_s)
            case ev.SelfTested() | ev.NamesListed() | ev.TransferHung():
                learned(state, event, now_s)
            case ev.LoadReported():
                reported(state, event, now_s)
            case ev.LinkMeasured():
                link = state.view.link(event.source, event.target)
                link.measure(event.bytes_per_s, event.mean_bytes_per_s)
            case ev.HolderUp():
                kv_locations.agent_up(state, event)
            case ev.HolderLost():
                agent_lost(state, event, now_s)
            case ev.CheckpointsReported():
                kv_locations.reported(state, event)
            case ev.RetentionLost():
                for stream in event.streams:
                    kv_locations.forget(state, stream, event.instance)
            case ev.RowsCounted():
                together.rows_counted(state, event, now_s)
            case ev.TimerFired():
                state.timers.woken(now_s)
            case ev.SettingsReloaded():
                state.reload(event.policy, event.slo)
            case _:
                assert_never(event)

    def kept(self, stream_id: StreamId) -> tuple[ev.Kept, ...]:
        """Places of a stream's KV, for a proxy that may have to continue the stream."""
        return kv_locations.of(self.state, stream_id)

    def has_others(self, instance: InstanceId, is_heard: Callable[[InstanceId], bool]) -> bool:
        """Return whether instances for which `is_heard` holds could take this
        instance's streams.
        """
        member = self.state.view.members.get(instance)
        return member is None or has_others(self.state.view, member, is_heard)

    def keeps_plan(self, stream: Stream, now_s: float) -> bool:
        """Return whether all is healthy, so that an answer of prefill, or a token, changes nothing
        for the stream.
        """
        state = self.state
        attempt = stream.attempt
        decode = attempt.decodes_on
        return (
            attempt.number == 1
            and not (stream.adopted or stream.name or state.settings.keeps_checkpoints)
            and attempt.option is Option.START
            and attempt.stay_deadline is None
            and state.settings.policy.handoff is Handoff.OWN_PAIR
            and decode is not None
            and decode.health is Health.UP
            and not decode.is_drained
            and self.members.get(decode.id) is decode
            and decode.is_clear(now_s)
        )

    @property
    def routes_by_prefix(self) -> bool:
        """Return whether streams are placed by cached prefixes: by the settings, and because some
        instance has a prefix cache.
        """
        return self.state.settings.policy.route is Route.PREFIX and bool(
            self.state.view.prefixes.caching
        )

    @property
    def prefix_hits(self) -> Mapping[InstanceId, Hits]:
        """Cached tokens of prompts, by instance that reports them."""
        return self.state.view.prefixes.hits

    def take_sent(self) -> list[SentPrompt]:
        """Take the prompts sent since the last call, for the other proxies."""
        view = self.state.view
        stored = view.stored.take_sent(MAX_HASH_BYTES // 2)
        room_bytes = MAX_HASH_BYTES - sum(len(each.hashes) for each in stored)
        return [*stored, *view.prefixes.take_sent(room_bytes)][:MAX_SENT]

    def sent_elsewhere(self, prompts: Iterable[SentPrompt]) -> None:
        """Note prompts that other proxies have sent to instances, and had agents store. Processes
        that are not up here are ignored.
        """
        state = self.state
        if not self.routes_by_prefix:
            return
        for sent in prompts:
            member = state.view.members.get(sent.instance)
            agent = state.view.agents.get(sent.instance)
            if member is not None and member.epoch == sent.epoch:
                state.view.prefixes.note_sent(member, sent)
            elif agent is not None and agent.epoch == sent.epoch:
                state.view.stored.note_sent(agent, sent)

    @property
    def has_waiting(self) -> bool:
        """Return whether some streams wait for a place or a slot."""
        return bool(self.state.idle or self.state.slots.awaited)

    def snapshot(self) -> dict[str, Any]:
        """Plain data for people: `cluster_snapshot`, and running and waiting streams."""
        state = self.state
        streams = state.streams.values()
        stages = {stage.value: 0 for stage in Stage}
        for stream in streams:
            stages[stream.stage.value] += 1
        waiting = [
            {
                "stream": stream.id,
                "stage": stream.stage.value,
                "since_s": stream.waiting_since_s,
                "attempt": stream.attempt.number,
            }
            for stream in sorted(state.idle.values(), key=lambda stream: stream.order)
        ]
        kept = streams if state.settings.keeps_checkpoints else ()
        return {
            **self.cluster_snapshot(),
            "streams": stages,
            "waiting": waiting,
            "checkpoints": {
                stream.id: protection(stream) for stream in kept if stream.attempt.number
            },
            "unprotected": {stream.id: stream.unprotected for stream in kept if stream.unprotected},
        }

    def cluster_snapshot(self) -> dict[str, Any]:
        """Plain data about the cluster and what was learned; its cost does not grow with the
        streams, so a scrape of metrics may read it on the event loop.
        """
        state = self.state
        return {
            "policy": state.settings.policy.name.value,
            **state.view.snapshot(),
            "slots": state.slots.snapshot(),
            "retries": state.retries.snapshot(len(state.streams)),
            "spread": state.spread.snapshot(),
            "prefill_guess": state.prefill_scale.snapshot(),
        }

    def _place_due(self, now_s: float) -> None:
        """Place waiting streams whose alarm, slot or instance has come."""
        state = self.state
        if state.timers.heap:
            while (due := state.timers.next_due(now_s)) is not None:
                apply(state, due, AlarmDue(), now_s)
        if state.slots.awaited:
            while (served := state.slots.next_served(now_s)) is not None:
                apply(state, served, SlotFree(), now_s)
        if state.held_back:
            placing.place_held_back(state, now_s)
        if state.timers.heap and (wake := state.timers.next_wake(now_s)) is not None:
            state.actions.append(wake)
