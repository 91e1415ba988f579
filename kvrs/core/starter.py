"""Placement of streams without an attempt: it starts them, queues them for a slot, lets them wait,
or gives them up.
"""

from collections.abc import Iterable
from itertools import islice

import msgspec

from kvrs.core import checkpoints, decisions, ledger
from kvrs.core.books.poison import is_poison, news_until_s
from kvrs.core.books.waiting import SHORTEST_WAIT_S, SLACK_S, is_past
from kvrs.core.dispatch import Victim, assign, ceiling, victim_of
from kvrs.core.model import actions as act
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.events import Promise
from kvrs.core.model.lifecycle import Stage
from kvrs.core.model.member import fraction
from kvrs.core.model.streams import Decision, Stream, by_urgency
from kvrs.core.routing import PROMPTS_MAX, computing_prompts, missing_roles
from kvrs.core.state import State
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role

# Longest delay, by jitter, before a stream tries a busy instance for which others wait too.
_TRY_JITTER_S = 0.2
# Interval at which a new stream asks for a spare retry token, with jitter.
_RETRY_TOKEN_POLL_S = 0.25
# Poll interval of a stream that waits for another stream, or for its own instance to open.
_CLOSED_POLL_S = 0.1
# Poll interval while the cause of a death is still unknown.
_NEWS_LOOK_S = 0.1
# Number of results with invalid logits after which the stream itself is at fault. One may be the
# fault of an instance, of its memory, or of older KV, none of which is used again.
_MAX_OVERFLOWS = 2


def gather(state: State, victims: Iterable[Stream], now_s: float) -> None:
    """Place victims of nearly simultaneous losses together, a moment after the first.

    Every victim leaves the books before any is placed: they are one event. Breaking connections are
    gathered too: a dead process's sockets close one by one, and its watch is not always first.
    """
    gather_s = state.settings.policy.recovery.gather_s
    if gather_s <= SLACK_S:  # An alarm this near would be due at once.
        place_all(state, victims, now_s)
        return
    for stream in victims:
        if stream.id in state.gathered:
            continue
        state.gathered[stream.id] = stream
        # The first due alarm places all gathered streams.
        state.timers.set(stream.id, now_s + gather_s)


def clear_suspects(state: State, instance: InstanceId, cause: str) -> None:
    """Note the whole instance's loss: gathered streams that failed there are its victims."""
    for stream in state.gathered.values():
        if stream.recovery.suspect_instance == instance:
            stream.recovery.clear_suspect(cause)


def place_idle(state: State, now_s: float) -> None:
    """Place waiting and queued streams that are not gathered, after an instance has come up."""
    state.roles_seen |= set(Role) - set(missing_roles(state.view))
    idle = state.idle.values()
    place_all(state, [stream for stream in idle if stream.id not in state.gathered], now_s)


def place_first(state: State, now_s: float) -> None:
    """Place the most urgent stream that waits for a busy instance, which has room for one."""
    waiting = [
        stream
        for stream in state.idle.values()
        if stream.stage is Stage.WAITING and stream.recovery.busy_since_s is not None
    ]
    if waiting:
        place_all(state, by_urgency(waiting)[:1], now_s)


def place_held_back(state: State, now_s: float) -> None:
    """Place as many new streams as decode instances have room for, in order of arrival."""
    computing = computing_prompts(state.view)
    room = sum(max(0, PROMPTS_MAX - len(member.answers.awaited)) for member in computing)
    for stream in list(islice(state.held_back.values(), room)):
        del state.held_back[stream.id]
        if stream.id in state.idle:
            place_all(state, [stream], now_s)


def place_all(state: State, streams: Iterable[Stream], now_s: float) -> None:
    """Decide the streams of one event together, most urgent first (DESIGN section 5). Streams of
    another model name have other targets, and follow.
    """
    by_name: dict[str, list[Stream]] = {}
    has_victims = False
    for stream in by_urgency(streams):
        by_name.setdefault(stream.name, []).append(stream)
        has_victims |= not stream.is_fresh
    if has_victims:
        state.view.look_ahead()
    for name, ordered in by_name.items():
        _place_together(state, name, ordered, now_s)


def _place_together(state: State, name: str, ordered: list[Stream], now_s: float) -> None:
    for stream in ordered:
        if stream.recovery.suspect_instance is not None:
            _back_off(state, stream, stream.recovery.suspect_instance, now_s)
        if stream.recovery.is_counted:
            separate(state, stream, now_s)
    victims: list[Victim] = [
        victim_of(state.view, stream, now_s) for stream in ordered if not stream.is_fresh
    ]
    targets = state.view.targets(name) if victims else []
    loads = {member.id: member.streams for member in targets}
    assigned = assign(state.settings.policy.dispatch, victims, loads)
    limit = ceiling(len(victims), loads)
    others = float(len(victims) - 1)
    # Instances that load rows compute prompts in chunks: streams placed earlier in this loop
    # continue between the chunks of later ones, so they do not count as others that wait.
    is_chunked = all(member.rows for member in targets)
    for stream in ordered:
        state.gathered.pop(stream.id, None)
        shared = others / len(targets) if victims and targets else 0.0
        _place(state, stream, assigned.get(stream.id), limit, now_s, shared)
        if is_chunked and not stream.is_fresh:
            others = max(0.0, others - 1)


def place_again(state: State, stream: Stream, now_s: float) -> None:
    """Place a due stream; with the others, if gathered. A stream that queues for a slot is placed
    at its target.
    """
    if stream.id in state.gathered:
        place_all(state, list(state.gathered.values()), now_s)
    elif (awaited := state.slots.awaited.get(stream.id)) is None:
        place_all(state, [stream], now_s)
    else:
        state.view.look_ahead()
        _place(state, stream, awaited, state.view.members[awaited].streams + 1, now_s)


def forget(state: State, stream: Stream) -> None:
    state.gathered.pop(stream.id, None)
    state.held_back.pop(stream.id, None)
    ledger.forget(state, stream)


def _back_off(state: State, stream: Stream, suspect: InstanceId, now_s: float) -> None:
    """Avoid for a while an instance that failed the stream and still runs, as far as is known, and
    the failed option.
    """
    recovery, attempt = stream.recovery, stream.attempt
    if (member := state.view.members.get(suspect)) is not None:
        stream.exclude(member)
    is_by_option = (
        recovery.was_connected and not attempt.resumed and attempt.option is not Option.START
    )
    jitter = fraction(stream.id, recovery.failures)
    recovery.back_off(attempt.option if is_by_option else None, jitter, now_s)


def _place(
    state: State,
    stream: Stream,
    assigned: InstanceId | None,
    limit: int,
    now_s: float,
    others: float = 0.0,
) -> None:
    """Start the next attempt of a stream without one, or let it wait for what it lacks.

    `assigned`: target of its recovery; None: no target, or a new start. Other targets are
    considered while they have fewer than `limit` streams. `others`: victims placed together, per
    target.
    """
    recovery = stream.recovery
    failed = recovery.attempts
    if recovery.is_counted:
        if _may_be_poison(state, stream, now_s):
            return
        separate(state, stream, now_s)
    if len(recovery.overflowed) >= _MAX_OVERFLOWS:
        found_by = ", ".join(dict.fromkeys(each.instance for each in recovery.overflowed))
        message = f"the stream's logits are no numbers, as {found_by} found: {recovery.cause}"
        give_up(state, stream, act.Reason.RETRIES, message)
        return
    if failed >= state.settings.policy.recovery.max_attempts:
        message = (
            f"the stream failed {failed} times without a token in between, at last: "
            f"{recovery.cause}"
        )
        give_up(state, stream, act.Reason.RETRIES, message)
        return
    decision: Decision | None = None
    if assigned is not None and assigned not in recovery.avoided:
        target = state.view.members[assigned]
        decision = decisions.recover(state, stream, target, limit, others, now_s)
    elif stream.is_fresh:
        decision = decisions.start(state, stream, now_s)
    carry_out(state, stream, decision, now_s)


def _may_be_poison(state: State, stream: Stream, now_s: float) -> bool:
    """Refuse a stream that has killed too many instances, or let it wait while it may have killed
    the last one; return whether either was done.
    """
    allowed = state.settings.policy.recovery.poison_deaths
    if is_poison(stream, allowed):
        message = "the request ended every instance that it ran on; it is not tried again"
        give_up(state, stream, act.Reason.POISON, message)
        return True
    until_s = news_until_s(stream, allowed, now_s)
    if until_s is None or is_past(until_s, now_s):
        return False
    ledger.wait(state, stream, now_s)
    state.timers.set(stream.id, min(until_s, now_s + _NEWS_LOOK_S))
    return True


def separate(state: State, stream: Stream, now_s: float) -> None:
    settings = state.settings.policy.recovery
    wait_s, since_s = _longest_wait(state, stream, now_s)
    state.poison.separate(stream, settings.poison_deaths, since_s + wait_s, now_s)


def carry_out(state: State, stream: Stream, decision: Decision | None, now_s: float) -> None:
    """Start the attempt, let the stream wait, or give it up; `decision` None: it cannot start."""
    if decision is None:
        _keep_waiting(state, stream, now_s)
        return
    plan, chosen = decision.plan, decision.chosen
    if plan is None:
        message = f"no option brings the stream on in time: {stream.tightest()}"
        give_up(state, stream, act.Reason.SLO, message)
    elif stream.attempt.number and not _has_token(state, stream, now_s):
        _pace(state, stream, now_s)
    elif (refused := decision.refusal) is not None:
        message, wait_s = refused.message, refused.retry_after_s
        give_up(state, stream, refused.reason, message, wait_s, stream.cached)
    elif plan.runs and not state.slots.acquire(
        chosen.target, stream.id, now_s, chosen.next_token_s
    ):
        _queue(state, stream, chosen, now_s)
    else:
        if state.settings.keeps_checkpoints:
            plan = _with_places(state, stream, plan)
        state.held_back.pop(stream.id, None)
        ledger.begin(state, stream, plan, decision, now_s)
        number = stream.attempt.number
        cached = stream.cached if chosen.option is Option.START else {}
        state.actions.append(act.Start(stream.id, number, plan, cached))
        if number == 1 and state.retries.used:
            state.retries.started(len(state.streams), now_s)
        if number > 1 or stream.adopted:
            _note_recovery(state, stream, decision)
        if plan.runs:
            state.timers.set(stream.id, now_s + state.settings.policy.slot_lease_s)


def _with_places(state: State, stream: Stream, plan: act.Plan) -> act.Plan:
    members = state.view.members
    prefill = None if plan.prefill is None else members[plan.prefill]
    places = checkpoints.place(state, stream, members[plan.decode], prefill)
    return msgspec.structs.replace(plan, places=places) if places else plan


def _note_recovery(state: State, stream: Stream, decision: Decision) -> None:
    recovery, chosen = stream.recovery, decision.chosen
    if recovery.slot_expired:
        recovery.note_start()
    state.begun.append((stream, stream.attempt.number))
    state.actions.append(
        act.Recovered(
            stream.id,
            stream.attempt.number,
            chosen.option,
            chosen.next_token_s,
            decision.estimates,
            recovery.cause,
            recovery.failed,
            decision.others,
            decision.excluded,
        )
    )


def _has_token(state: State, stream: Stream, now_s: float) -> bool:
    """Return whether the retry budget allows a further attempt now."""
    recovery = stream.recovery
    if recovery.owes_token:
        open_streams = len(state.streams)
        if stream.first_token_sent:
            recovery.pay_token(now_s + state.retries.take(open_streams, now_s))
        elif state.retries.take_spare(open_streams, now_s):
            recovery.pay_token(now_s)
    return not recovery.owes_token and is_past(recovery.token_at_s, now_s)


def _pace(state: State, stream: Stream, now_s: float) -> None:
    """Wait for a token of the retry budget. A begun stream is never given up for it; a new one
    waits no longer than for an instance.
    """
    ledger.wait(state, stream, now_s)
    if not stream.recovery.owes_token:
        state.timers.set(stream.id, stream.recovery.token_at_s)
        return
    wait_s = state.settings.policy.recovery.wait_s
    if is_past(stream.waiting_since_s + wait_s, now_s):
        message = f"too many retries at a time; the stream waits for {wait_s:g} s at most"
        give_up(state, stream, act.Reason.BUSY, message)
    else:
        state.timers.set(stream.id, now_s + _RETRY_TOKEN_POLL_S * (1 + fraction(stream.id, now_s)))


def _queue(state: State, stream: Stream, chosen: Estimate, now_s: float) -> None:
    """Wait for a slot at the chosen target, and decide again after the predicted wait."""
    ledger.queue(state, stream, chosen.target)
    wait_s = max(SHORTEST_WAIT_S, state.slots.expected_wait_s(chosen.target, stream.id, now_s))
    state.timers.set(stream.id, now_s + wait_s)


def _keep_waiting(state: State, stream: Stream, now_s: float) -> None:
    """Wait on, since nothing can be started: at most `recovery.wait_s`, and within the stream's
    deadline.
    """
    ledger.wait(state, stream, now_s)
    recovery = stream.recovery
    next_try_s = _next_try_s(state.view)
    if next_try_s is not None:
        recovery.note_busy(now_s)
    if stream.is_fresh and computing_prompts(state.view):
        state.held_back[stream.id] = stream
    wait_s, since_s = _longest_wait(state, stream, now_s)
    wait_ends_s = since_s + wait_s
    budget_s = decisions.budget_s(state, stream, now_s)
    budget_ends_s = wait_ends_s if budget_s is None else now_s + budget_s
    is_hopeless = (
        not stream.first_token_sent and next_try_s is not None and next_try_s > wait_ends_s
    )
    if is_past(wait_ends_s, now_s) and _is_unkept(state, stream):
        message = f"cannot be continued exactly: no instance that could came up within {wait_s:g} s"
        give_up(state, stream, act.Reason.INEXACT, message)
    elif is_past(wait_ends_s, now_s) or is_hopeless:
        next_try_in_s = None if next_try_s is None else next_try_s - now_s
        is_held_back = stream.id in state.held_back
        found = _refusal(state, wait_s, next_try_in_s, held_back=is_held_back)
        give_up(state, stream, found.reason, found.message, found.retry_after_s)
    elif is_past(budget_ends_s, now_s):
        give_up(state, stream, act.Reason.SLO, f"no instance came up in time: {stream.tightest()}")
    else:
        alarms_s = [wait_ends_s, budget_ends_s, recovery.retry_at_s]
        if recovery.avoided or _awaits_own(state, stream):
            alarms_s.append(now_s + _CLOSED_POLL_S * (1 + fraction(stream.id, now_s)))
        if next_try_s is not None:
            # The jitter is above 0: an alarm slightly too early would find the instance paused, and
            # no other alarm would follow.
            jitter = 0.1 + fraction(stream.id, next_try_s)
            alarms_s.append(next_try_s + _TRY_JITTER_S * jitter)
        state.timers.set(stream.id, min(at_s for at_s in alarms_s if not is_past(at_s, now_s)))


def _awaits_own(state: State, stream: Stream) -> bool:
    """Return whether an instance that keeps the stream's promise is paused, ejected or overdue:
    nothing shows when that ends, and healthy instances may not take the stream.
    """
    return stream.promise is not Promise.NONE and any(
        member.continues(stream.tokens, stream.promise) and not state.view.is_healthy(member)
        for member in state.view.decoders
    )


def _is_unkept(state: State, stream: Stream) -> bool:
    """Return whether instances are up, but none continues the stream as it must be continued."""
    is_promised = stream.promise is not Promise.NONE and stream.first_token_sent
    return (is_promised or stream.must_replay) and bool(state.view.targets(stream.name))


def give_up(
    state: State,
    stream: Stream,
    reason: act.Reason,
    message: str,
    retry_after_s: float = 1.0,
    cached: dict[InstanceId, int] | None = None,
) -> None:
    # Jitter keeps clients that were given up together from returning together.
    retry_after_s = max(1.0, retry_after_s) * (1 + fraction(stream.id))
    forget(state, stream)
    state.actions.append(act.GiveUp(stream.id, reason, message, retry_after_s, cached or {}))


def _next_try_s(view: ClusterView) -> float | None:
    """Time when the first busy instance may be tried again; None: no busy instance."""
    busy = (each for each in view.members.values() if view.is_busy(each))
    ends_s = (member.answers.busy_until_s for member in busy)
    return min((end_s for end_s in ends_s if end_s is not None), default=None)


def _longest_wait(state: State, stream: Stream, now_s: float) -> tuple[float, float]:
    """Longest wait of a stream for a usable instance, in seconds, and the start of the wait.

    A new request waits `recovery.role_wait_s` if every instance of a role was lost: restarted
    instances return within seconds, and after that a new request is better refused than kept
    silent.
    """
    settings, missing = state.settings.policy.recovery, missing_roles(state.view)
    if missing != state.missing_roles:
        state.missing_roles, state.missing_since_s = missing, now_s
    is_new = stream.is_fresh and not stream.attempt.number
    if is_new and missing and state.roles_seen.issuperset(missing):
        since_s = max(stream.waiting_since_s, state.missing_since_s)
        return min(settings.wait_s, settings.role_wait_s), since_s
    since_s = stream.waiting_since_s
    # The wait for a busy instance continues while the instance is tried.
    if stream.recovery.busy_since_s is not None:
        since_s = min(since_s, stream.recovery.busy_since_s)
    return settings.wait_s, since_s


def _refusal(
    state: State, wait_s: float, next_try_in_s: float | None, *, held_back: bool
) -> act.StreamRefusal:
    """Refusal of a stream after waiting `wait_s`. `next_try_in_s`: time until the first busy
    instance may be tried again; None: no busy instance. `held_back`: decode instances compute
    prompts, and none had room.
    """
    missing = missing_roles(state.view)
    if held_back:
        message = (
            f"no prefill instance is up, and no decode instance had room for the prompt within "
            f"{wait_s:g} s"
        )
    elif next_try_in_s is None or missing:
        which = f"{missing[0].value} instance" if len(missing) == 1 else "instance"
        message = f"no {which} came up within {wait_s:g} s"
    else:
        message = f"every instance is busy; the stream waits for {wait_s:g} s at most"
        return act.StreamRefusal(act.Reason.BUSY, message, next_try_in_s)
    # The client is to wait as long as the stream waited in vain: an earlier retry would fail too.
    return act.StreamRefusal(act.Reason.NO_INSTANCE, message, min(wait_s, 30.0))
