"""Recompute: a prefill instance computes the whole history again and hands it off, or the target
computes it.

max(queue(prefill) + prefill(L + t), transfers before it on the link) + hand-shake + hand-off;
`C_recomp` of seed KVRS is the second term, without the t tokens produced.
"""

from collections.abc import Iterable
from math import inf

from kvrs.core.model import actions as act
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.estimates import HANDSHAKE_S, Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.core.options.base import (
    Case,
    RecoveryOption,
    Term,
    hand_off_terms,
    step_term,
)
from kvrs.core.options.migrate import has_cached
from kvrs.core.routing import least_work, may_have, own_prefill_of
from kvrs.core.state import State

_RECOMPUTE = Option.RECOMPUTE


def estimate(case: Case, estimates: list[Estimate]) -> None:
    """Append the estimate of a prefill instance, or of the target itself if the target is faster or
    the prefill instance's estimate would count as migrate.

    If the target is faster, the prefill instance's estimate comes second: it may cost the other
    victims less, because they wait while the target computes.
    """
    target, history, state = case.target, case.history_tokens, case.state
    info = target.info
    queue_s, view = target.ahead_s, state.view
    here_s = queue_s + case.history_s + case.step_s
    prefill, there = prefill_for(view, target, case.stream), None
    if prefill is target and info.joins_prefill:
        return
    # Without a hand-off of KV the target would compute the history a second time.
    computes_nothing = info.own_prefill is not None or info.joins_prefill
    is_handed_off = computes_nothing or (prefill.moves_kv and target.moves_kv)
    if view.formats_differ:
        is_handed_off = is_handed_off and target.takes_from(prefill)
    fetches = target.abilities.pulls and prefill.abilities.retains
    is_migration = not (fetches or info.joins_prefill) and has_cached(case.stream, prefill)
    if prefill is not target and is_handed_off and not is_migration:
        table, compute_s, extrapolated = prefill.times.table, case.history_s, case.extrapolated
        if table is not target.times.table:
            compute_s, extrapolated = table.seconds_for(history), not table.covers(history)
        link = view.links.get((prefill.node, target.node), view.assumed_link)
        there = estimate_handed_off(
            prefill,
            target,
            history,
            compute_s,
            extrapolated,
            prefill.ahead_s,
            queue_s,
            HANDSHAKE_S,
            link.bytes_per_s,
            link.in_flight_bytes / link.bytes_per_s,
            case.hand_off_step_s,
        )
        if there.total_s <= here_s or computes_nothing:
            estimates.append(there)
            return
    at_target_s = case.history_s - target.times.table.step_overhead_s
    estimates.append(
        Estimate(
            _RECOMPUTE,
            target.id,
            here_s,
            queue_s,
            0.0,
            case.history_s,
            case.extrapolated,
            at_target_s if at_target_s > 0 else 0.0,
            step_s=case.step_s,
            waiting=case.waiting,
        )
    )
    if there is not None:
        estimates.append(there)


def plan(state: State, stream: Stream, estimate: Estimate) -> act.Plan:
    return act.Plan(estimate.target, estimate.source)


def terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    tokens = f"{case.history_tokens:,} tokens"
    if estimate.source is None:
        yield Term(
            "queue", estimate.queue_s, f"before the {estimate.target}, which computes the history"
        )
        yield Term("prefill", estimate.compute_s, tokens)
        yield from step_term(estimate)
        return
    yield Term("queue", estimate.queue_s, f"before the {estimate.source}, or its link")
    yield Term("prefill", estimate.compute_s, tokens)
    yield from hand_off_terms(case, estimate)


def prefill_for(view: ClusterView, target: Member, stream: Stream) -> Member:
    """Choose the instance that computes a whole history for the target: the target's own prefill
    instance, else the prefill instance with the least work, else the target.
    """
    if target.info.own_prefill is not None:
        own = own_prefill_of(view, target)
        if (
            own is not None
            and may_have(view, own, stream, barred_too=False)
            and not own.answers.is_ejected
        ):
            return own
        if not target.abilities.pulls:
            return target
    best: Member | None = None
    # The loop of `least_work` for one node, inlined: calls dominate the time of a decision.
    is_free = not (stream.recovery.avoided or stream.name or stream.excluded_epochs)
    for member in view.by_node.get(target.node, ()):
        if (
            member.abilities.prefills
            and not member.is_drained
            and (best is None or member.ahead_s < best.ahead_s)
            and (
                (is_free and member.is_clear(view.now_s))
                or (
                    view.takes_recovery(member) and may_have(view, member, stream, barred_too=False)
                )
            )
        ):
            best = member
    if best is not None:
        return best
    best = least_work(view, stream, is_free, barred_too=False)
    return target if best is None or not view.takes_recovery(best) else best


def estimate_handed_off(
    prefill: Member,
    target: Member,
    history_tokens: int,
    compute_s: float,
    extrapolated: bool,
    queue_s: float = 0.0,
    target_queue_s: float = 0.0,
    handshake_s: float = 0.0,
    bytes_per_s: float = inf,
    drain_s: float = 0.0,
    step_s: float = 0.0,
) -> Estimate:
    """Estimate computing the whole history at `prefill` in `compute_s`, then handing it off to the
    target, another instance, whose step then brings the token in `step_s`.

    The target's queue runs in parallel: the longer of the two counts. So does the time `drain_s`
    until the transfers already on the link have ended, beside queue and computation at `prefill`.
    """
    transfer_s = handshake_s + prefill.info.geometry.sent_bytes(history_tokens) / bytes_per_s
    queue_s = max(queue_s, drain_s - compute_s)
    total_s = queue_s + compute_s + transfer_s
    if target_queue_s > total_s:
        queue_s += target_queue_s - total_s
        total_s = target_queue_s
    return Estimate(
        _RECOMPUTE,
        target.id,
        total_s + step_s,
        queue_s,
        transfer_s,
        compute_s,
        extrapolated,
        source=prefill.id,
        step_s=step_s,
    )


RECOMPUTE = RecoveryOption(Option.RECOMPUTE, estimate, plan, terms, fetches=False)
