"""Decision for a stream without an attempt, and its predicted cost. Nothing is booked here."""

from collections.abc import Sequence
from math import inf

from kvrs.config.policy import Dispatch
from kvrs.core import kv_locations, options
from kvrs.core.books.waiting import is_past
from kvrs.core.dispatch import targets_for
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import HANDSHAKE_S, Estimate, Option
from kvrs.core.model.lifecycle import Stage
from kvrs.core.model.member import Member, is_one_call
from kvrs.core.model.streams import Decision, Predicted, RestoredRows, Stream
from kvrs.core.options.in_place import estimate_stay
from kvrs.core.prefix_routing import NO_LIMITS, StartLimits
from kvrs.core.routing import pair_for, starts_at
from kvrs.core.rules import BY_NAME
from kvrs.core.rules.base import Rule
from kvrs.core.state import State

# Rows of the last steps of an engine, which may not be in its tier, or copied, when it dies.
_LATE_ROWS = 3
_MOST_RESTORED = 1000  # Restores whose count is awaited; the count of an older one is ignored.


def start(
    state: State, stream: Stream, now_s: float, *, is_by_load: bool = False
) -> Decision | None:
    """Decide where a stream starts; None: no pair of instances can take it. `is_by_load`: ignore
    cached prefixes.
    """
    limits: StartLimits | None = NO_LIMITS
    if is_by_load:
        limits = None
    elif stream.prefix.hashes or stream.recalled is not None:
        limits = _limits(state, stream, now_s)
    pair = pair_for(state.view, stream, barred_too=False, limits=limits)
    if pair is None and is_past(stream.recovery.retry_at_s, now_s):
        pair = pair_for(state.view, stream, barred_too=True, limits=limits)
    if pair is None:
        return None
    prefill, planned = pair
    decode = planned
    # The hand-off of a single call cannot be redirected later.
    if is_one_call(planned, prefill.id):
        decode = starts_at(state.view, stream, prefill, planned, state.settings.policy)
    # A text's length is a guess; a longer prompt than the model takes is refused at once.
    tokens = min(stream.prompt_tokens, prefill.info.max_model_len or stream.prompt_tokens)
    table, queue_s, transfer_s = prefill.prefill, prefill.queue_s, 0.0
    compute_s, is_covered = table.seconds_for(tokens), table.covers(tokens)
    cached = min(stream.cached.get(prefill.id, 0), tokens - 1) if stream.cached else 0
    if cached:
        compute_s, is_covered = table.behind(cached, tokens, compute_s)
    if prefill is not decode:
        link = state.view.links.get((prefill.node, decode.node), state.view.assumed_link)
        transfer_s = HANDSHAKE_S + prefill.info.geometry.sent_bytes(tokens) / link.bytes_per_s
    total_s = queue_s + compute_s + transfer_s
    source = None if prefill is decode else prefill.id
    estimate = Estimate(
        Option.START,
        decode.id,
        total_s,
        queue_s,
        transfer_s,
        compute_s,
        not is_covered,
        source=source,
        cached_tokens=cached,
    )
    # The part of the predicted times that is certain enough to refuse a new request by.
    is_known = not prefill.has_guess or stream.attempt.number > 0
    sure = 1.0 if is_known else state.prefill_scale.least_share
    most_s = budget_s(state, stream, now_s) if state.settings.slo.abort else None
    in_time = most_s is None or sure * total_s <= most_s
    plan = act.Plan(decode.id, source, load=stream.load) if in_time else None
    # An instance that does both stages has one queue.
    wait_s, refusal = queue_s if source is None else queue_s + decode.queue_s, None
    if wait_s > 0 and sure > 0.0 and not stream.attempt.number:
        refusal = _refusal(state, stream, estimate, wait_s, sure, now_s)
    if stream.picked and (refusal is not None or not in_time):
        stream.picked = ()  # The picked instances are too slow; others may not be.
        return start(state, stream, now_s)
    if refusal is not None and len(stream.cached) > 1:
        # The instance with the cached prefix would refuse the stream; another may accept it
        # without.
        found, by_load = stream.cached, start(state, stream, now_s, is_by_load=True)
        if by_load is not None and by_load.refusal is None:
            return by_load
        stream.cached = found
    return Decision(estimate, (estimate,), plan, refusal=refusal)


def _limits(state: State, stream: Stream, now_s: float) -> StartLimits:
    """Return the limits on the stream's waits, by which `start` weighs instances."""
    wait_s = inf
    if not stream.attempt.number:
        wait_s = state.settings.policy.admission.wait_s
    return StartLimits(wait_s, stream.due_s() - now_s)


def _refusal(
    state: State, stream: Stream, chosen: Estimate, wait_s: float, sure: float, now_s: float
) -> act.StreamRefusal | None:
    """Refusal of a new stream by its predicted wait in the queues; None: it may start. So load is
    shed before the engines are overloaded. `sure`: the part of the predicted times that counts, as
    a learned table has a spread; while a table is a guess, nothing is refused by it.

    A request is refused if its wait in the queues of its prefill and decode instance exceeds the
    bound, or makes it miss a deadline that it would keep on an idle cluster.

    Begun streams and accepted requests are never refused here: their next attempt is a recovery.
    """
    bound_s = state.settings.policy.admission.wait_s
    if sure * wait_s > bound_s:
        return act.StreamRefusal(
            act.Reason.OVERLOADED,
            f"the predicted wait is {wait_s:.1f} s; allowed: {bound_s:g} s",
            wait_s - bound_s,
        )
    left_s = stream.due_s() - now_s - sure * chosen.compute_s - chosen.transfer_s
    if 0 < left_s < sure * wait_s:
        return act.StreamRefusal(
            act.Reason.OVERLOADED,
            f"the predicted wait is {wait_s:.1f} s, too long for {stream.tightest()}",
            wait_s - left_s,
        )
    return None


def recover(
    state: State, stream: Stream, assigned: Member, limit: int, others: float, now_s: float
) -> Decision | None:
    """Decide a stream's recovery with its history, at the assigned target or another one with fewer
    than `limit` streams; None: no option keeps the stream's promise. `others`: number of other
    victims of the event, per target.
    """
    rule, targets = _rule(state), [assigned]
    if rule.several_targets and state.settings.policy.dispatch is Dispatch.REBALANCE:
        targets = targets_for(state.view, stream, assigned, limit)
    estimates = rule.weigh(state, stream, targets, now_s)
    eligible = _eligible(state, stream, estimates, now_s)
    if not eligible:
        return None
    chosen = rule.decide(eligible, budget_s(state, stream, now_s), others)
    excluded = _excluded(stream, estimates, eligible)
    return _decision(state, rule, stream, chosen, estimates, others, excluded)


def stay_or_leave(
    state: State,
    stream: Stream,
    home: Member,
    assigned: Member | None,
    limit: int,
    others: float,
    now_s: float,
) -> Decision | None:
    """Decide whether to stay in the same attempt at a re-forming instance, or to `start` or
    `recover` elsewhere; None: the stream must leave, and cannot. `assigned`: None without another
    target. `others`: as in `recover`, including the instance itself.
    """
    rule, estimates = _rule(state), list[Estimate]()
    elsewhere: Decision | None = None
    if stream.is_fresh:
        elsewhere = start(state, stream, now_s)
        if elsewhere is not None and home.id in (
            elsewhere.chosen.target,
            elsewhere.chosen.source,
        ):
            elsewhere = None
    elif assigned is not None:
        targets = targets_for(state.view, stream, assigned, limit)
        away = [target for target in targets if target is not home] or [assigned]
        estimates = rule.weigh(state, stream, away, now_s)
    if elsewhere is not None:
        estimates = list(elsewhere.estimates)
    stay = estimate_stay(state, stream, home)
    if (rule.stays or not estimates) and stay.option not in stream.recovery.removed:
        estimates.append(stay)
    if not estimates:
        return None
    eligible = _eligible(state, stream, estimates, now_s)
    if not eligible:
        return None
    chosen = rule.decide(eligible, budget_s(state, stream, now_s), others)
    excluded = _excluded(stream, estimates, eligible)
    if elsewhere is not None and chosen is elsewhere.chosen:
        return Decision(chosen, tuple(estimates), elsewhere.plan, excluded=excluded)
    return _decision(state, rule, stream, chosen, estimates, others, excluded)


def _decision(
    state: State,
    rule: Rule,
    stream: Stream,
    chosen: Estimate,
    estimates: list[Estimate],
    others: float,
    excluded: dict[Option, str],
) -> Decision:
    plan: act.Plan | None = None
    if chosen.option is not Option.ABORT:
        plan = options.BY_NAME[chosen.option].plan(state, stream, chosen)
    charged = others if rule.spares_others else 0.0
    return Decision(chosen, tuple(estimates), plan, charged, excluded)


def budget_s(state: State, stream: Stream, now_s: float) -> float | None:
    """Return the seconds until the stream's next token is due; None: no limit."""
    if not state.settings.slo.abort:
        return None
    due = stream.due_s()
    return due - now_s if due < inf else None


def settle(state: State, stream: Stream, decision: Decision, now_s: float) -> act.Settled:
    """Learn from a recovery that has brought a token; return its record."""
    attempt, chosen, plan = stream.attempt, decision.chosen, stream.attempt.plan
    real_s, predicted = now_s - attempt.started_s, attempt.predicted
    if predicted is None:
        return act.Settled(stream.id, attempt.number, chosen.option, chosen.next_token_s, real_s)
    # The prediction of a redirected hand-off is for another target: it is not learned from.
    if plan is not None and plan.decode == chosen.target:
        if plan.asked and chosen.option is Option.RESTORE:
            _await_count(state, stream, decision, plan, predicted, real_s)
        else:
            state.spread.observe(predicted.seconds, real_s, predicted.victims)
    return act.Settled(
        stream.id,
        attempt.number,
        chosen.option,
        predicted.seconds,
        real_s,
        predicted.low_s,
        predicted.high_s,
    )


def _await_count(
    state: State,
    stream: Stream,
    decision: Decision,
    plan: act.Plan,
    predicted: Predicted,
    real_s: float,
) -> None:
    """Learn from a restore of rows only when its target has counted what it has loaded."""
    target, restored = state.view.members.get(plan.decode), state.restored
    if target is None:
        return
    stored = [found for name, found in stream.checkpoints.items() if name in plan.asked]
    wanted = max(run.first_page + run.pages for run in plan.runs)
    pages = max((found.pages for found in stored), default=wanted)
    computed = [
        each.next_token_s
        for each in decision.estimates
        if each.option is Option.RECOMPUTE and each.target == plan.decode
    ]
    restored[stream.id, stream.attempt.number] = RestoredRows(
        plan.asked,
        frozenset(found.engine.id for found in stored if found.engine is not None),
        pages * target.page_size_tokens,
        _LATE_ROWS * target.row_tokens,
        predicted,
        min(computed, default=None),
        real_s,
    )
    if len(restored) > _MOST_RESTORED:
        del restored[next(iter(restored))]


def rows_counted(state: State, event: ev.RowsCounted, now_s: float) -> None:
    """Book a restore of rows as what it was: a recompute if it has loaded less than half of what
    was expected. The agents that were asked are then believed to have no rows of those engines
    until they report others.
    """
    found = state.restored.pop((event.stream, event.attempt), None)
    if found is None:
        return
    is_restore = 2 * event.loaded_tokens >= found.expected_tokens
    option = Option.RESTORE
    predicted_s: float | None = found.predicted.seconds
    if not is_restore:
        option, predicted_s = Option.RECOMPUTE, found.recompute_s
        if found.expected_tokens > found.least_tokens:
            kv_locations.doubt(state, found.asked, found.engines)
    if predicted_s is not None:
        state.spread.observe(predicted_s, found.real_s, found.predicted.victims)
    state.actions.append(
        act.RowsLoaded(
            event.stream,
            event.attempt,
            option,
            event.loaded_tokens,
            found.expected_tokens,
            found.asked,
        )
    )


def _eligible(
    state: State, stream: Stream, estimates: Sequence[Estimate], now_s: float
) -> Sequence[Estimate]:
    """Return the estimates that may be chosen. If only a replay may continue the stream
    (`must_replay`), these are the options with the same output (`is_same_output`), perhaps none.
    Options that have just failed are left out, if others remain.
    """
    if stream.must_replay:
        estimates = [each for each in estimates if each.option.is_same_output]
        if not estimates:
            return estimates
    waited_s = state.settings.policy.recovery.wait_s
    queued_too_long = stream.stage is Stage.QUEUED and is_past(
        stream.waiting_since_s + waited_s, now_s
    )
    recovery, last = stream.recovery, stream.attempt.option
    if recovery.slot_expired or queued_too_long:
        # A stream with an expired slot may still be fetching, so only an option without a slot may
        # follow at once. A stream that has queued for `recovery.wait_s` takes such an option too,
        # so that no policy queues for ever.
        return [estimate for estimate in estimates if not options.takes_slot(estimate)]
    if stream.needs_replay and not stream.must_replay and Option.REPLAY not in recovery.removed:
        estimates = [each for each in estimates if each.option is Option.REPLAY] or estimates
    if not recovery.removed:
        return estimates
    allowed = [estimate for estimate in estimates if estimate.option not in recovery.removed]
    return allowed or [each for each in estimates if each.option is not last] or estimates


def _excluded(
    stream: Stream, estimates: Sequence[Estimate], eligible: Sequence[Estimate]
) -> dict[Option, str]:
    """Return why options with an estimate were not eligible, for operators."""
    if len(eligible) == len(estimates):
        return {}
    allowed, excluded = {each.option for each in eligible}, dict[Option, str]()
    for option in (each.option for each in estimates if each.option not in allowed):
        if option in stream.recovery.removed:
            excluded[option] = "it has just failed for this stream"
        elif stream.needs_replay and not option.is_same_output:
            excluded[option] = "its tokens would not be exact"
        else:
            excluded[option] = "it needs a slot, and none was free in time"
    return excluded


def _rule(state: State) -> Rule:
    return BY_NAME[state.settings.policy.name]
