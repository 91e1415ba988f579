"""Placement of streams without an attempt: each is started, queued for a slot, left to wait, or
given up, by a decision among its options and their predicted costs.

The targets of the victims of one event are the allowed ones (`victim_of`), the assigned one (LUMEN
section 4.3, locality-aware recovery scheduling: near the KV, then rebalanced away from overloaded
targets), and further ones to weigh. The load of a target is its number of streams.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import inf
from operator import attrgetter, itemgetter

import msgspec

from kvrs.config.policy import Dispatch
from kvrs.core import checkpoints, ledger, options
from kvrs.core.books.poison import is_poison, news_until_s
from kvrs.core.books.waiting import SHORTEST_WAIT_S, SLACK_S, is_past
from kvrs.core.model import actions as act
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.estimates import HANDSHAKE_S, Estimate, Option
from kvrs.core.model.events import Promise
from kvrs.core.model.lifecycle import Stage
from kvrs.core.model.member import Member, fraction, is_one_call
from kvrs.core.model.streams import Decision, Stream, by_urgency
from kvrs.core.options.in_place import estimate_stay
from kvrs.core.prefix_routing import NO_LIMITS, StartLimits
from kvrs.core.routing import (
    PROMPTS_MAX,
    computing_prompts,
    may_have,
    missing_roles,
    pair_for,
    starts_at,
)
from kvrs.core.rules import BY_NAME
from kvrs.core.rules.base import Rule
from kvrs.core.state import State
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Role

# Targets weighed per victim: a bound on the time of a decision.
TARGETS_MAX = 4


class Victim(msgspec.Struct, frozen=True):
    stream: StreamId
    homes: tuple[InstanceId, ...] = ()  # Targets on the node that has most of the stream's KV.
    held_pages: int = 0  # Pages of the history on that node.
    excluded_epochs: frozenset[InstanceId] = frozenset()  # Targets that the stream must not get.


def victim_of(view: ClusterView, stream: Stream, now_s: float) -> Victim:
    """Return a stream as the dispatcher sees it. After its pause the stream may return to an
    instance that failed it if there is no other target, and it goes to an instance with other
    tokens only if there is no better one.
    """
    excluded_epochs = _barred(view, stream, now_s) if stream.excluded_epochs else frozenset()
    excluded_epochs |= stream.recovery.avoided
    if stream.name:
        lacking = (each for each in view.targets() if not stream.is_served_at(each))
        excluded_epochs |= frozenset(member.id for member in lacking)
    is_bound = stream.tokens and (view.tokens_differ or stream.promise is not Promise.NONE)
    if is_bound or (view.has_doubted and not stream.tokens):
        excluded_epochs |= _foreign(view, stream, excluded_epochs)
    if stream.must_replay:
        unable = (each for each in view.targets(stream.name) if not stream.may_replay(each))
        excluded_epochs |= frozenset(member.id for member in unable)
    # Agents come first at equal pages: their checkpoints survive the instances beside them.
    holders: list[tuple[int, NodeId]] = []
    for stored in stream.checkpoints.values():
        holders.append((stored.pages, stored.agent.node))
    for held in stream.holders.values():
        holders.append((held.pages, held.member.node))
    if len(holders) > 1:
        holders.sort(key=itemgetter(0), reverse=True)
    homes: list[InstanceId] = []
    for pages, node in holders:
        for member in view.by_node.get(node, ()) if pages else ():
            if (
                member.abilities.decodes
                and not member.is_drained
                and member.id not in excluded_epochs
                and view.is_healthy(member)
                and stream.is_served_at(member)
            ):
                homes.append(member.id)
        if homes:
            return Victim(stream.id, tuple(homes), pages, excluded_epochs)
    return Victim(stream.id, excluded_epochs=excluded_epochs)


def _barred(view: ClusterView, stream: Stream, now_s: float) -> frozenset[InstanceId]:
    """Return the targets that failed the stream; none if they are all targets and its pause is
    over.
    """
    targets = view.targets(stream.name)
    if stream.promise is not Promise.NONE:  # Other targets could not keep the promise.
        targets = [each for each in targets if each.continues(stream.tokens, stream.promise)]
    barred = frozenset(member.id for member in targets if stream.bars(member))
    are_all = len(barred) == len(targets)
    return frozenset() if are_all and is_past(stream.recovery.retry_at_s, now_s) else barred


def _foreign(
    view: ClusterView, stream: Stream, excluded: frozenset[InstanceId]
) -> frozenset[InstanceId]:
    """Targets at which the stream would continue with other tokens, if there are better ones, or if
    other tokens would break a promise.
    """
    open_ = [member for member in view.targets(stream.name) if member.id not in excluded]
    foreign = [
        each
        for each in open_
        if not each.continues(stream.tokens, stream.promise)
        or (each.is_doubted and not stream.tokens)
    ]
    is_left = len(foreign) < len(open_) or stream.promise is not Promise.NONE
    return frozenset(member.id for member in foreign if is_left)


def assign(
    how: Dispatch, victims: Sequence[Victim], loads: Mapping[InstanceId, int]
) -> dict[StreamId, InstanceId]:
    """Assign a target to each victim that has any; `loads` has the targets, without the victims."""
    loads = dict(loads)
    assigned: dict[StreamId, InstanceId] = {}
    # Victims with a holder are placed first; the others fill the rest.
    for victim in victims if how is not Dispatch.LEAST_LOADED else ():
        if victim.homes and (target := _least(victim, victim.homes, loads)) is not None:
            assigned[victim.stream] = target
            loads[target] += 1
    for victim in victims:
        if victim.stream in assigned:
            continue
        if (target := _least(victim, loads, loads)) is not None:
            assigned[victim.stream] = target
            loads[target] += 1
    if how is Dispatch.REBALANCE:
        _rebalance(victims, assigned, loads)
    return assigned


def ceiling(victims: int, loads: Mapping[InstanceId, int]) -> int:
    """Mean load after placing `victims`, rounded up (LUMEN section 4.3); 0 without targets."""
    return -(-(sum(loads.values()) + victims) // len(loads)) if loads else 0


def _rebalance(
    victims: Sequence[Victim], assigned: dict[StreamId, InstanceId], loads: dict[InstanceId, int]
) -> None:
    """Move victims from the most loaded target, smallest checkpoint first, to the least loaded;
    each victim moves at most once.

    The moves end when no target with movable victims is above the ceiling of the mean, or no move
    helps.
    """
    limit = ceiling(0, loads)
    movable: dict[InstanceId, list[Victim]] = {}
    for victim in sorted(victims, key=attrgetter("held_pages"), reverse=True):
        if victim.stream in assigned:
            movable.setdefault(assigned[victim.stream], []).append(victim)
    while True:
        source, most = None, limit
        for each, there in movable.items():
            load = loads[each]
            if there and (load > most or (load == most and source is not None and each > source)):
                source, most = each, load
        if source is None:
            return
        victim = movable[source].pop()
        target = _least(victim, loads, loads)
        assert target is not None, victim
        if loads[target] + 1 < most:
            assigned[victim.stream] = target
            loads[source] -= 1
            loads[target] += 1


def _least(
    victim: Victim, among: Iterable[InstanceId], loads: Mapping[InstanceId, int]
) -> InstanceId | None:
    """The least loaded of these targets that the victim may have. A loop, because it runs for each
    victim and `min` with a key takes five times as long.
    """
    best: InstanceId | None = None
    least, excluded = 0, victim.excluded_epochs
    for target in among:
        load = loads.get(target)
        if load is None or target in excluded:
            continue
        if best is None or load < least or (load == least and target < best):
            best, least = target, load
    return best


def targets_for(view: ClusterView, stream: Stream, assigned: Member, limit: int) -> list[Member]:
    """Return up to `TARGETS_MAX` targets to weigh that have fewer than `limit` streams: the
    assigned one, then the least loaded others. If none has fewer, return the assigned one alone.
    """
    targets = [assigned] if assigned.streams < limit else []
    is_free, tokens, promise = stream.is_free, stream.tokens, stream.promise
    for member in view.decoders:
        if len(targets) == TARGETS_MAX or member.streams >= limit:
            break
        if (
            member is not assigned
            and (
                (is_free and member.info.own_prefill is None and member.is_clear(view.now_s))
                or (view.is_healthy(member) and may_have(view, member, stream, barred_too=False))
            )
            and (
                not tokens
                or member.continues(tokens, promise)
                or not assigned.continues(tokens, promise)
            )
        ):
            targets.append(member)
    return targets or [assigned]


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
    table, queue_s, transfer_s = prefill.times.table, prefill.queue_s, 0.0
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
    is_known = not prefill.times.has_guess or stream.attempt.number > 0
    sure = 1.0 if is_known else state.prefill_scale.least_share
    most_s = budget_of(state, stream, now_s) if state.settings.slo.abort else None
    in_time = most_s is None or sure * total_s <= most_s
    plan = act.Plan(decode.id, source, load=stream.load) if in_time else None
    # An instance that does both stages has one queue.
    wait_s, refusal = queue_s if source is None else queue_s + decode.queue_s, None
    if wait_s > 0 and sure > 0.0 and not stream.attempt.number:
        refusal = _refusal_by_wait(state, stream, estimate, wait_s, sure, now_s)
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


def _refusal_by_wait(
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
    chosen = rule.decide(eligible, budget_of(state, stream, now_s), others)
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
    chosen = rule.decide(eligible, budget_of(state, stream, now_s), others)
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


def budget_of(state: State, stream: Stream, now_s: float) -> float | None:
    """Return the seconds until the stream's next token is due; None: no limit."""
    if not state.settings.slo.abort:
        return None
    due = stream.due_s()
    return due - now_s if due < inf else None


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
    is_chunked = all(member.shared.rows for member in targets)
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
        decision = recover(state, stream, target, limit, others, now_s)
    elif stream.is_fresh:
        decision = start(state, stream, now_s)
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
    budget_s = budget_of(state, stream, now_s)
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
