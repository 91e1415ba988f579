"""Streams of a re-forming instance: each stays in the same attempt or leaves, whichever continues
it sooner.

The instance restores staying streams one by one, most urgent first, so each is weighed behind those
before it. A deadline bounds the wait: at its alarm the stream leaves.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from kvrs.core import kv_locations, ledger, placing
from kvrs.core.books.waiting import is_past
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.member import Member
from kvrs.core.model.reforming import PredictedReforming, cause_of, factors_of
from kvrs.core.model.streams import Decision, StayDeadline, Stream, by_urgency
from kvrs.core.options.base import usable_pages
from kvrs.core.placing import assign, ceiling, victim_of
from kvrs.core.state import State
from kvrs.ids import StreamId

# A deadline has a grace of half the predicted time, within these bounds. The upper one, the
# shortest silence that counts, is also the most by which changed predictions of one re-forming
# extend a deadline.
_SHORTEST_GRACE_S = 0.1
_LONGEST_GRACE_S = 2.0
# Smaller delays of a re-forming's predicted end change no decision.
_STEP_S = 0.02
_NO_LIMIT = 1 << 62


def reforming(
    state: State, home: Member, event: ev.LoadReported, running: list[Stream], now_s: float
) -> None:
    """Handle an instance's re-forming, or a changed prediction of its end; `running` are its
    streams.
    """
    report, before = event.report.reforming, home.reforming
    assert report is not None, event
    if before is not None and report.number < before.report.number:
        return
    ready_s = now_s + report.ready_in_s
    queue_s = home.reported_queue_s if before is None else before.queue_s
    home.reforming = now = PredictedReforming(report, ready_s, event.token_s, queue_s)
    state.view.update(home)
    state.view.prefill_order.note_queue(home, queue_s + report.ready_in_s)
    home.times.set_pace(report.decode_factor, report.prefill_factor, event.token_s)
    for stream_id, pages in report.missing_pages.items():
        if pages:
            kv_locations.forget(state, stream_id, home.id)
    running = [stream for stream in running if stream.attempt.runs_on is home]
    for stream in running:
        stream.note_tokens(event.produced_tokens.get(stream.id, 0))
    if before is not None and before.report.number == report.number:
        now.ahead_s = before.ahead_s
        is_same = (before.report.missing_pages, before.option) == (
            report.missing_pages,
            now.option,
        )
        if is_same and ready_s <= before.ready_s + _STEP_S:
            return
        running = [stream for stream in running if stream.attempt.stay_deadline is not None]
    _decide(state, home, running, now_s)


def reformed(state: State, home: Member, event: ev.LoadReported, now_s: float) -> None:
    """Handle an instance whose re-forming has ended; deadlines of staying streams remain set."""
    home.times.set_pace(*factors_of(event.report), event.token_s)
    if home.reforming is not None:
        state.view.prefill_order.note_queue(home, home.reforming.queue_s)
        home.reforming = None
        state.view.update(home)
        placing.place_idle(state, now_s)


def is_stale_token(state: State, stream: Stream, now_s: float) -> bool:
    """Return whether a token may predate the re-forming that the stream stays for; then the
    stream's next token is awaited. A token after the predicted end is not stale, even if the report
    is late.
    """
    deadline, home = stream.attempt.stay_deadline, stream.attempt.runs_on
    if deadline is None or home is None or home.reforming is None:
        return False
    if is_past(home.reforming.ready_s, now_s):
        return False
    if not is_past(deadline.until_s, now_s):
        _set_deadline(state, stream, deadline)
    return True


def stay_deadline_over(state: State, stream: Stream, now_s: float) -> None:
    """Handle a deadline's alarm: the stream leaves, if it has somewhere to go."""
    attempt, home = stream.attempt, stream.attempt.runs_on
    deadline = attempt.stay_deadline
    assert deadline is not None, stream
    assert home is not None, stream
    if attempt.option not in stream.recovery.removed:
        stream.recovery.remove(attempt.option)
    must_end_s = deadline.latest_s + state.settings.policy.recovery.wait_s
    if home.reforming is not None and not is_past(must_end_s, now_s):
        state.view.look_ahead()
        target = _targets(state, home, [stream], now_s).get(stream.id)
        if placing.stay_or_leave(state, stream, home, target, _NO_LIMIT, 0.0, now_s) is None:
            _set_deadline(state, stream, replace(deadline, until_s=now_s + _LONGEST_GRACE_S))
            return
    lasts_s = now_s - deadline.since_s
    cause = f"{home.id} was to go on with it, and has not for {lasts_s:.3g} s"
    _leave(state, stream, home, cause, now_s)
    placing.gather(state, [stream], now_s)


def _decide(state: State, home: Member, streams: Sequence[Stream], now_s: float) -> None:
    """Decide streams one by one, so that each is weighed with the bookings of those before it."""
    reforming = home.reforming
    assert reforming is not None, home
    reforming.ahead_s, cause = 0.0, cause_of(home.id, reforming.report)
    state.view.look_ahead()
    ordered = by_urgency(streams)
    targets = _targets(state, home, ordered, now_s)
    loads = {member.id: member.streams for member in state.view.targets()}
    loads[home.id] = home.streams
    limit = ceiling(0, loads)
    others = (len(ordered) - 1) / len(loads) if ordered else 0.0
    for stream in ordered:
        target = targets.get(stream.id)
        decision = placing.stay_or_leave(state, stream, home, target, limit, others, now_s)
        if decision is None:
            continue  # The stream should leave and cannot yet: its alarm stays.
        if decision.chosen.option.stays:
            _stay(state, stream, reforming, decision, cause, now_s)
            continue
        _leave(state, stream, home, cause, now_s)
        placing.carry_out(state, stream, decision, now_s)


def _targets(
    state: State, home: Member, streams: Sequence[Stream], now_s: float
) -> dict[StreamId, Member]:
    """Target of each stream if it left: dispatch moves streams above the ceiling away from the
    re-forming instance, their home; the others would go to the least loaded target.
    """
    view, name = state.view, home.id
    others = [member for member in view.targets() if member is not home]
    victims = [
        replace(
            victim_of(view, stream, now_s),
            homes=(name,),
            held_pages=usable_pages(stream, home),
        )
        for stream in streams
        if not stream.is_fresh
    ]
    loads = {member.id: member.streams for member in others}
    loads[name] = max(0, home.streams - len(victims))
    assigned = assign(state.settings.policy.dispatch, victims, loads)
    found: dict[StreamId, Member] = {}
    for victim in victims:
        target = assigned.get(victim.stream, name)
        if target != name:
            found[victim.stream] = view.members[target]
            continue
        allowed = (each for each in others if each.id not in victim.excluded_epochs)
        if (least := next(allowed, None)) is not None:
            found[victim.stream] = least
    return found


def _stay(
    state: State,
    stream: Stream,
    reforming: PredictedReforming,
    decision: Decision,
    cause: str,
    now_s: float,
) -> None:
    """Keep the stream's attempt. Only the first decision is learned from: a changed prediction of
    the same re-forming, by the same option, only moves the alarm.
    """
    attempt, chosen, deadline = stream.attempt, decision.chosen, stream.attempt.stay_deadline
    reforming.ahead_s += chosen.transfer_s + chosen.compute_s
    wait_s = chosen.next_token_s
    until_s = now_s + wait_s + min(max(wait_s / 2, _SHORTEST_GRACE_S), _LONGEST_GRACE_S)
    if (
        deadline is not None
        and deadline.number == reforming.report.number
        and chosen.option is attempt.option
    ):
        until_s = max(deadline.until_s, min(until_s, deadline.latest_s))
        if is_past(until_s, now_s):
            return  # This proxy was paused, and the alarm is due.
        _set_deadline(state, stream, replace(deadline, until_s=until_s))
        return
    latest_s = now_s + chosen.next_token_s + _LONGEST_GRACE_S
    _set_deadline(
        state,
        stream,
        StayDeadline(now_s, min(until_s, latest_s), reforming.report.number, latest_s),
    )
    stream.recovery.note_failure(cause, chosen.target, now_s)
    ledger.stay(state, stream, decision, now_s)
    state.begun.append((stream, attempt.number))
    state.actions.append(
        act.Recovered(
            stream.id,
            attempt.number,
            chosen.option,
            wait_s,
            decision.estimates,
            cause,
            chosen.target,
            decision.others,
            decision.excluded,
        )
    )


def _set_deadline(state: State, stream: Stream, deadline: StayDeadline) -> None:
    ledger.set_stay_deadline(state, stream, deadline)
    state.actions.append(act.Stay(stream.id, stream.attempt.number, deadline.until_s))


def _leave(state: State, stream: Stream, home: Member, cause: str, now_s: float) -> None:
    """End the attempt, which still has its connection; a move is not a failure."""
    state.actions.append(act.Halt(stream.id, stream.attempt.number))
    ledger.end_attempt(state, stream, cause, home.id, now_s)
