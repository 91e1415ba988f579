"""Ledger of streams: their stages, and what their attempts occupy in the cluster view (work, bytes
on links, slots, alarms, room for checkpoints).
"""

from kvrs.core import checkpoints, kv_locations, outliers
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import Link, agent_of
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.lifecycle import MOVES, Stage
from kvrs.core.model.member import Member, is_one_call
from kvrs.core.model.streams import AttemptState, Decision, Predicted, StayDeadline, Stream
from kvrs.core.state import State
from kvrs.ids import InstanceId

_IDLE = (Stage.WAITING, Stage.QUEUED)
_WHOLE = (Option.START, Option.RECOMPUTE)  # The options that compute all of a prompt or history.


def begin(state: State, stream: Stream, plan: act.Plan, decision: Decision, now_s: float) -> None:
    """Begin the stream's next attempt. Its prefill or decode computes for
    `decision.chosen.compute_s` before its first result.
    """
    if stream.stage is Stage.QUEUED:
        state.slots.leave(stream.id)
    state.timers.alarms_s.pop(stream.id, None)
    view, chosen = state.view, decision.chosen
    decode = view.members[plan.decode]
    runs_on = decode if plan.prefill is None else view.members[plan.prefill]
    for member in (runs_on, decode):
        if member.answers.until_s is not None or member.answers.busy_until_s is not None:
            outliers.started(state, stream, member)
    stream.attempt = attempt = AttemptState(
        stream.attempt.number + 1,
        plan,
        chosen.option,
        now_s,
        decision,
        decodes_on=decode,
        booked_on=runs_on,
        booked_s=_added_s(stream, runs_on, chosen),
        is_history=not (is_start := chosen.option is Option.START),
    )
    view.prefill_order.book(runs_on, attempt.booked_s, now_s, is_history=attempt.is_history)
    if stream.prefix.hashes and (is_start or runs_on is not decode):
        view.prefixes.send(runs_on, stream.prefix, stream.prompt_tokens)
        if decode.shared.has_tier and decode is not runs_on:
            view.prefixes.send(decode, stream.prefix, stream.prompt_tokens)
    if plan.runs:
        _put_runs(state, attempt, plan, decode)
    elif (load := plan.load) is not None:
        link = view.link_from(view.agents[load.agent], runs_on.node)
        _put_on_link(attempt, link, load.tokens * runs_on.abilities.bytes_per_token)
    if decode.node != runs_on.node:
        _put_hand_off(state, stream, runs_on, decode)
    view.count_stream(decode, 1)
    _enter(state, stream, Stage.DECODE if runs_on is decode else Stage.PREFILL, runs_on)
    if runs_on.times.observed is not None:
        state.prefill_scale.began(runs_on, stream.id, now_s, is_whole=is_start)
    if runs_on is not decode and is_one_call(decode, runs_on.id):
        # The single call of both stages, or one of two calls, goes to decode, and is lost with it.
        decode.running.add(stream.id)


def _added_s(stream: Stream, runs_on: Member, chosen: Estimate) -> float:
    """Return how much longer the instance computes because of an attempt: its work shares steps
    with the other work there, so it adds the part of a step's overhead that its tokens fill.
    """
    overhead_s, tokens = runs_on.times.table.step_overhead_s, 0
    if chosen.option in _WHOLE:
        tokens = stream.history_tokens - chosen.cached_tokens
    elsewhere = 1.0 - min(1.0, tokens / runs_on.abilities.step_tokens)
    return max(0.0, chosen.compute_s - elsewhere * overhead_s)


def foretell(stream: Stream, predicted: Predicted) -> None:
    """Note the predicted cost of an attempt that has begun."""
    stream.attempt.predicted = predicted


def hand_off(state: State, stream: Stream, plan: act.Plan, prefill: Member, decode: Member) -> None:
    """Note the end of prefill: the attempt continues at `decode`, by this plan."""
    attempt, planned = stream.attempt, stream.attempt.decodes_on
    assert planned is not None, stream
    prefill.running.discard(stream.id)
    planned.running.discard(stream.id)
    if decode is not planned:
        state.view.count_stream(planned, -1)
        planned.answers.left(stream.id)
        state.view.count_stream(decode, 1)
    attempt.plan, attempt.decodes_on = plan, decode
    _enter(state, stream, Stage.DECODE, decode)
    if decode.node != prefill.node:
        _put_hand_off(state, stream, prefill, decode)


def _put_runs(state: State, attempt: AttemptState, plan: act.Plan, decode: Member) -> None:
    """Book the bytes of the pages that the attempt fetches on the links from their holders."""
    for run in plan.runs:
        agent = agent_of(state.view, run.holder)
        if agent is None:
            link = state.view.link(state.view.members[run.holder].node, decode.node)
        else:
            link = state.view.link_from(agent, decode.node)
        _put_on_link(attempt, link, run.pages * decode.abilities.page_bytes)


def _put_hand_off(state: State, stream: Stream, prefill: Member, decode: Member) -> None:
    """Book the hand-off on its link from the start of prefill: a fetch decided meanwhile may still
    run when the hand-off begins.
    """
    size_bytes = decode.info.geometry.sent_bytes(stream.history_tokens)
    link = state.view.link(prefill.node, decode.node)
    _put_on_link(stream.attempt, link, size_bytes)


def prefilled(
    state: State, stream: Stream, member: Member, event: ev.PrefillDone, now_s: float
) -> None:
    """Note that the instance has the KV of the attempt's history, and learn from it."""
    tokens, reused = event.history_tokens, event.reused_tokens
    note_found(state, stream, member, event, now_s)
    if member.times.observed is not None and state.prefill_scale.done(
        member, stream.id, tokens, now_s, reused or 0
    ):
        for each in state.view.members.values():
            state.prefill_scale.tune(each)
    if not stream.prefilled:
        stream.note_prefill(tokens)
    for stored in stream.checkpoints.values() if stream.prefix.hashes else ():
        if not stored.rows:
            state.view.stored.send(stored.agent, stream.prefix, stream.prompt_tokens)
    # The answer may predate the re-forming in which cells of the pages were lost.
    has_whole = member.reforming is None or not member.has_lost_cells(stream.id)
    if has_whole and (member.abilities.retains or member.abilities.caches):
        kv_locations.retain(state, stream, member, tokens // member.abilities.page_size_tokens)


def note_found(
    state: State, stream: Stream, member: Member, event: ev.PrefillDone, now_s: float
) -> None:
    """Note how much KV of a new prompt the instance, or the agent it loaded from, had, and correct
    the index that predicted it.
    """
    tokens, found = event.history_tokens, event.reused_tokens
    if found is None or stream.attempt.option is not Option.START:
        return
    view, plan, length = state.view, stream.attempt.plan, max(1, stream.prompt_tokens)
    view.prefixes.count(member, tokens, found)
    # Predicted tokens are scaled to the real length of the prompt, which may have been a guess.
    if plan is None or (load := plan.load) is None:
        predicted = stream.cached.get(member.id, 0) * tokens // length
        # The cache may have more than the prompts that were sent: a decode instance keeps its
        # answers, which return with the next turn, and a tier or a store has what others computed.
        others = member.abilities.decodes or bool(member.shared.rows)
        view.prefixes.correct(member, stream.prefix, predicted, found, finds_others=others)
    elif stream.attempt.number == 1 and (agent := view.agents.get(load.agent)) is not None:
        predicted = (load.first_token + load.tokens) * tokens // length
        view.stored.correct(agent, stream.prefix, predicted, found)
        if load.tokens:
            least = (load.first_token + load.tokens / 2) * tokens / length
            agent.note_load(stream.attempt.started_s, now_s, has_failed=found < least)


def settle_bookings(state: State, stream: Stream) -> None:
    """Remove the attempt's bookings: its work is done and its bytes have arrived, or it is over."""
    attempt = stream.attempt
    if attempt.booked_on is not None:
        state.view.prefill_order.unbook(
            attempt.booked_on, attempt.booked_s, state.view.now_s, is_history=attempt.is_history
        )
        attempt.booked_on = None
    for link, size_bytes in attempt.links:
        link.in_flight_bytes -= size_bytes
        link.in_flight -= 1
    attempt.links.clear()


def arrived(state: State, stream: Stream) -> None:
    """Note the attempt's token: everything fetched or computed before is complete."""
    settle_bookings(state, stream)
    if stream.id in state.slots.held:
        state.slots.release(stream.id)


def resume(state: State, stream: Stream) -> None:
    """Note that the client has the attempt's token: nothing more is awaited."""
    attempt = stream.attempt
    if attempt.booked_on is not None or attempt.links or stream.id in state.slots.held:
        arrived(state, stream)
    state.timers.alarms_s.pop(stream.id, None)
    if stream.checkpoints:
        checkpoints.drop_former(state, stream)
    if attempt.number > 1:
        kv_locations.resumed(state, stream)
    attempt.resumed, attempt.decision, attempt.stay_deadline = True, None, None


def stay(state: State, stream: Stream, decision: Decision, now_s: float) -> None:
    """Keep the attempt at its re-forming instance, as decided now."""
    attempt = stream.attempt
    attempt.option, attempt.decision = decision.chosen.option, decision
    attempt.predicted = None
    attempt.started_s = now_s


def set_stay_deadline(state: State, stream: Stream, deadline: StayDeadline) -> None:
    """Set the time until which a staying attempt is awaited."""
    stream.attempt.stay_deadline = deadline
    state.timers.set(stream.id, deadline.until_s)


def clear_stay_deadline(state: State, stream: Stream) -> None:
    """Clear the deadline of a staying stream: the instance has finished its re-forming."""
    state.timers.alarms_s.pop(stream.id, None)
    stream.attempt.stay_deadline = None


def end_attempt(
    state: State, stream: Stream, cause: str, failed: InstanceId | None, now_s: float
) -> None:
    """End the attempt; the caller places the stream. `failed`: the instance to blame;
    None: none.
    """
    attempt, decode = stream.attempt, stream.attempt.decodes_on
    if decode is not None and attempt.resumed:
        stream.tokens = decode.tokens or stream.tokens
        stream.generates = decode.generates or stream.generates
        stream.note_pace(now_s)
        if decode.shared.rows:
            kv_locations.rows_left(state, stream, decode)
    elif decode is not None and decode.info.joins_prefill and failed != decode.id:
        # The instance keeps memory for the unsent pages for a while, so the stream avoids it.
        stream.exclude(decode)
    stream.recovery.note_failure(cause, failed, now_s)
    wait(state, stream, now_s)


def wait(state: State, stream: Stream, now_s: float) -> None:
    """Move the stream from an attempt or a queue to waiting; the caller places it."""
    if stream.stage not in _IDLE:
        stream.waiting_since_s = now_s
    _leave(state, stream)
    _enter(state, stream, Stage.WAITING)


def queue(state: State, stream: Stream, target: InstanceId) -> None:
    state.slots.enqueue(target, stream.id)
    _enter(state, stream, Stage.QUEUED)


def deny(state: State, stream: Stream, until_s: float) -> None:
    """Return the stream to its former place in the queue: its target has no slot before
    `until_s`.
    """
    state.slots.deny(stream.id, until_s)
    _leave(state, stream)
    _enter(state, stream, Stage.QUEUED)


def forget(state: State, stream: Stream) -> None:
    assert (stream.stage, None) in MOVES, stream.stage
    _leave(state, stream)
    if stream.checkpoints:
        checkpoints.forget(state, stream)
    for held in stream.holders.values():
        held.member.held.discard(stream.id)
    stream.holders.clear()
    state.idle.pop(stream.id, None)
    state.poison.counted.pop(stream.id, None)
    del state.streams[stream.id]


def _enter(state: State, stream: Stream, stage: Stage, member: Member | None = None) -> None:
    """Change the stream's stage; no other function does. `member`: instance of the attempt, which
    must answer; None: no attempt runs.
    """
    assert stream.stage is stage or (stream.stage, stage) in MOVES, (stream.stage, stage)
    stream.stage = stage
    if member is None:
        state.idle[stream.id] = stream
        return
    state.idle.pop(stream.id, None)
    attempt, answers, now_s = stream.attempt, member.answers, state.view.now_s
    attempt.runs_on = member
    member.running.add(stream.id)
    if not answers.awaited:
        answers.awaited_from_s = now_s
    predicted_s = 0.0 if attempt.decision is None else attempt.decision.chosen.total_s
    answers.awaited[stream.id] = now_s, predicted_s


def await_whole(state: State, stream: Stream) -> None:
    """Note that the answer comes in one piece: until then its instance is not overdue, and the time
    is not compared with the prediction.
    """
    attempt = stream.attempt
    if attempt.runs_on is not None:
        attempt.runs_on.answers.await_whole(stream.id)
        if attempt.runs_on.times.observed is not None:
            state.prefill_scale.left(attempt.runs_on, stream.id, state.view.now_s)
    attempt.decision = None


def _leave(state: State, stream: Stream) -> None:
    """Remove the stream from every book: the attempt, or the wait, is over."""
    if stream.id in state.slots.held:
        state.slots.release(stream.id)
    if stream.stage is Stage.QUEUED:
        state.slots.leave(stream.id)
    attempt = stream.attempt
    if not attempt.resumed:  # After the first token no booking is left.
        settle_bookings(state, stream)
    state.timers.alarms_s.pop(stream.id, None)
    runs_on, decode = attempt.runs_on, attempt.decodes_on
    for member in (decode,) if runs_on is decode else (runs_on, decode):
        if member is None:
            continue
        member.running.discard(stream.id)
        if member.times.observed is not None:
            state.prefill_scale.left(member, stream.id, state.view.now_s)
        answers = member.answers
        if not attempt.resumed and (answers.owes(stream.id) or answers.probe == stream.id):
            outliers.left(state, stream, member)
    attempt.runs_on = attempt.decodes_on = attempt.decision = attempt.stay_deadline = None
    if decode is not None:
        state.view.count_stream(decode, -1)


def _put_on_link(attempt: AttemptState, link: Link, size_bytes: int) -> None:
    link.in_flight_bytes += size_bytes
    link.in_flight += 1
    attempt.links.append((link, size_bytes))
