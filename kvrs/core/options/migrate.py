"""Migrate: the target fetches the history's KV from an instance that retains it, or a prefill
instance that has the front of the history in a prefix cache hands all of it off.

Fetch: queue(target) + hand-shake + missing bytes / bandwidth + prefill(tail given prefix);
`C_mig` of seed KVRS is the third term alone. Hand-off, for targets that cannot fetch pages:
max(queue(prefill) + prefill(rest given prefix), transfers before it on the link) + hand-shake + all
bytes / bandwidth.

Restore fetches like migrate, from a checkpoint in the host memory of an agent (LUMEN section 4.2,
RaidServe's KV backup), or from rows of an engine's CPU tier that an agent serves. An agent on the
target's own node sends at the measured rate of that path, and at `host_to_device_bytes_per_s` until
the rate is measured.

Reuse takes the front of the history from the target's own pages, perhaps extended by a second
source: queue(target) [+ wait + hand-shake + more bytes / bandwidth] + prefill(rest given front).
"""

from collections.abc import Iterable
from operator import attrgetter

from kvrs.core.model import actions as act
from kvrs.core.model.cluster_view import ClusterView, agent_of
from kvrs.core.model.estimates import HANDSHAKE_S, Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Holder, Stream
from kvrs.core.options.base import (
    SOURCES_MAX,
    Case,
    KvSource,
    RecoveryOption,
    Term,
    hand_off_terms,
    handshake_term,
    step_term,
    tail,
    transfer,
    usable_pages,
)
from kvrs.core.state import State
from kvrs.ids import InstanceId

_MIGRATE, _RESTORE, _REUSE = Option.MIGRATE, Option.RESTORE, Option.REUSE


def estimate(case: Case, estimates: list[Estimate]) -> None:
    fetched = 0
    for source in case.sources:
        if not source.is_agent:
            weigh_fetch(case, _MIGRATE, source, estimates)
            fetched += 1
    if fetched < len(case.stream.holders):  # Holders that send no pages may hand off.
        for holder in cached_at(case.stream, case.target):
            estimates.append(_cached(case, holder))


def plan(state: State, stream: Stream, estimate: Estimate) -> act.Plan:
    if estimate.by_prefill:
        return act.Plan(estimate.target, estimate.source)
    return fetch_plan(state, stream, estimate)


def terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    if not estimate.by_prefill:
        yield from fetch_terms(case, estimate)
        return
    assert estimate.source is not None, estimate
    yield Term("queue", estimate.queue_s, f"before the {estimate.source}, or its link")
    held = _held_pages(case, case.stream.holders[estimate.source])
    yield Term("prefill", estimate.compute_s, f"{tail(case, held)}, at the {estimate.source}")
    yield from hand_off_terms(case, estimate)


def _cached(case: Case, holder: Holder) -> Estimate:
    there, target = holder.member, case.target
    view = case.state.view
    link = view.links.get((there.node, target.node), view.assumed_link)
    return estimate_cached(
        there,
        target,
        case.history_tokens,
        _held_pages(case, holder) * there.abilities.page_size_tokens,
        bytes_per_s=link.bytes_per_s,
        queue_s=there.ahead_s,
        target_queue_s=target.ahead_s,
        handshake_s=HANDSHAKE_S,
        drain_s=link.in_flight_bytes / link.bytes_per_s,
        step_s=case.hand_off_step_s,
    )


def _held_pages(case: Case, holder: Holder) -> int:
    return min(holder.pages, (case.history_tokens - 1) // holder.member.abilities.page_size_tokens)


def estimate_cached(
    holder: Member,
    target: Member,
    history_tokens: int,
    prefix_tokens: int,
    *,
    bytes_per_s: float,
    queue_s: float = 0.0,
    target_queue_s: float = 0.0,
    handshake_s: float = 0.0,
    drain_s: float = 0.0,
    step_s: float = 0.0,
) -> Estimate:
    """Estimate computing the rest of the history at `holder` behind its cached prefix, then handing
    all of it off to the target, whose step then brings the token in `step_s`.

    The target's queue runs in parallel: the longer of the two counts. So does the time `drain_s`
    until the transfers already on the link have ended, beside queue and computation at the holder.
    """
    table = holder.times.table
    history_s = table.seconds_for(history_tokens)
    compute_s, is_covered = table.behind(prefix_tokens, history_tokens, history_s)
    transfer_s = handshake_s + holder.info.geometry.sent_bytes(history_tokens) / bytes_per_s
    queue_s = max(queue_s, drain_s - compute_s)
    total_s = queue_s + compute_s + transfer_s
    if target_queue_s > total_s:
        queue_s += target_queue_s - total_s
        total_s = target_queue_s
    return Estimate(
        _MIGRATE,
        target.id,
        total_s + step_s,
        queue_s,
        transfer_s,
        compute_s,
        not is_covered,
        source=holder.id,
        by_prefill=True,
        step_s=step_s,
    )


def cached_at(stream: Stream, target: Member) -> list[Holder]:
    """Return the prefill instances that have the front of the history cached and can hand the whole
    history off to the target; instances from which the target can fetch are left out.
    """
    found: list[Holder] = []
    for holder in stream.holders.values() if target.moves_kv else ():
        member = holder.member
        if (
            holder.pages
            and not (target.abilities.pulls and member.abilities.retains)
            and has_cached(stream, member)
            and stream.is_served_at(member)
            and member is not target
            and target.takes_from(member)
        ):
            found.append(holder)
    if len(found) > SOURCES_MAX:
        found.sort(key=lambda holder: holder.pages, reverse=True)
        del found[SOURCES_MAX:]
    return found


def has_cached(stream: Stream, prefill: Member) -> bool:
    """Return whether computing the history at `prefill` counts as migrate, not as recompute."""
    return (
        prefill.abilities.caches
        and prefill.moves_kv
        and prefill.abilities.prefills
        and prefill.id in stream.holders
        and not stream.bars(prefill)
    )


def weigh_fetch(case: Case, option: Option, source: KvSource, estimates: list[Estimate]) -> None:
    """Append the estimate of a fetch from `source`, extended by a second source with more pages.

    The link drains during the wait for a slot, so the longer of the two times counts.
    """
    target, wait_s = case.target, case.slot_wait_s
    if source.drain_s > wait_s:
        wait_s = source.drain_s
    transfer_s = HANDSHAKE_S + source.pages * source.page_s
    pages, second = source.pages, None
    if len(case.sources) > 1 and pages < case.wanted_pages:
        second, pages, more_s = extension(case, source, pages, wait_s + transfer_s)
        transfer_s += more_s
    estimate = estimate_fetch(
        option,
        target,
        case.history_tokens,
        case.history_s,
        pages * target.abilities.page_size_tokens,
        transfer_s,
        target.ahead_s + wait_s,
        source.id,
        second,
        case.step_s,
        case.waiting,
    )
    estimates.append(estimate)
    best = case.best_fetch
    if best is None or estimate.total_s < best.total_s:
        case.best_fetch, case.best_source = estimate, source


def estimate_fetch(
    option: Option,
    target: Member,
    history_tokens: int,
    history_s: float,
    prefix_tokens: int,
    transfer_s: float = 0.0,
    queue_s: float = 0.0,
    source: InstanceId | None = None,
    second: InstanceId | None = None,
    step_s: float = 0.0,
    waiting: int = 0,
) -> Estimate:
    """Estimate: wait `queue_s`, transfer `prefix_tokens` of the history in `transfer_s`, compute
    the rest at the target, whose steps take `step_s` besides.

    `history_s` is the time in which the target would compute the whole history.
    """
    table = target.times.table
    compute_s, is_covered = table.behind(prefix_tokens, history_tokens, history_s)
    at_target_s = compute_s - table.step_overhead_s
    return Estimate(
        option,
        target.id,
        queue_s + transfer_s + compute_s + step_s,
        queue_s,
        transfer_s,
        compute_s,
        not is_covered,
        at_target_s if at_target_s > 0 else 0.0,
        source,
        second,
        step_s=step_s,
        waiting=waiting,
    )


def extension(
    case: Case, first: KvSource | None, pages: int, elapsed_s: float
) -> tuple[InstanceId | None, int, float]:
    """Find a second source that has more than the first `pages` pages, if fetching the difference
    is faster than computing it: (its id, pages of both sources together, extra time).

    Reports of agents lag: an agent that last reported as many pages as the instance may have more,
    and is tried too.
    """
    best: KvSource | None = None
    for other in case.sources:
        may_have_more = (
            other.is_agent and other.pages == pages and (first is None or not first.is_agent)
        )
        if (
            other is not first
            and (other.pages > pages or may_have_more)
            and (best is None or other.pages > best.pages)
        ):
            best = other
    if best is None:
        return None, pages, 0.0
    size, table = case.target.abilities.page_size_tokens, case.target.times.table
    promised, history = max(best.pages, pages + 1), case.history_tokens
    wait_s = max(0.0, best.drain_s - elapsed_s) + HANDSHAKE_S
    saved_s = table.extra(pages * size, history - pages * size) - table.extra(
        promised * size, history - promised * size
    )
    if wait_s + (promised - pages) * best.page_s > saved_s:
        return None, pages, 0.0
    return best.id, best.pages, wait_s + (best.pages - pages) * best.page_s


def fetch_plan(state: State, stream: Stream, estimate: Estimate) -> act.Plan:
    """Plan a fetch from the estimate's first source (None: the target has the front itself), then
    from the second source.
    """
    wanted = usable_pages(stream, state.view.members[estimate.target])
    runs: list[act.PageRange] = []
    begins = estimate.first_page
    if estimate.source is None:
        begins = min(stream.holders[estimate.target].pages, wanted)
    for holder in (estimate.source, estimate.second):
        if holder is not None:
            is_last = holder == estimate.second or estimate.second is None
            ends = _run_end(stream, holder, wanted, is_last=is_last)
            runs.append(act.PageRange(holder, begins, ends - begins, _epoch(state.view, holder)))
            begins = ends
    return act.Plan(estimate.target, None, tuple(runs), asked=_asked(state, stream, estimate))


def _asked(state: State, stream: Stream, estimate: Estimate) -> tuple[InstanceId, ...]:
    """Return all agents that have rows of the stream and that the target reaches, that of the rows'
    own node first. The target asks them all at once, so a copy that lags hides no row.
    """
    target = state.view.members[estimate.target]
    if not target.shared.has_tier or (estimate.source is None and estimate.second is None):
        return ()
    found = [
        (each.agent.node != each.engine.node, each.agent.id)
        for each in stream.checkpoints.values()
        if each.engine is not None
        and each.is_of(target)
        and (each.agent.node == target.node or each.agent.rows.to_other_nodes)
    ]
    return tuple(name for _, name in sorted(found))


def _epoch(view: ClusterView, holder: InstanceId) -> int:
    agent = agent_of(view, holder)
    return view.members[holder].epoch if agent is None else agent.epoch


def _run_end(stream: Stream, holder: InstanceId, wanted: int, *, is_last: bool) -> int:
    """Return the end of the page range that is requested from this holder. The last source, if an
    agent, is asked for all pages: it may have more than it has reported.
    """
    checkpoint = stream.checkpoints.get(holder)
    if checkpoint is None:
        return min(stream.holders[holder].pages, wanted)
    return wanted if is_last else min(checkpoint.pages, wanted)


def fetch_terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    """Yield the terms of an estimate that `estimate_fetch` made."""
    yield Term("queue", estimate.queue_s, f"before the {estimate.target}")
    prefix = has = case.pages_of(estimate.source)
    rest_s = estimate.transfer_s
    if estimate.source is not None:
        handshake_s = HANDSHAKE_S
        transfer_s, how = transfer(case, estimate.source, has)
        yield handshake_term(case)
        yield Term("transfer", transfer_s, how)
        rest_s = max(0.0, rest_s - handshake_s - transfer_s)
    if estimate.second is not None:
        prefix = case.pages_of(estimate.second)
        _, how = transfer(case, estimate.second, prefix - has)
        yield Term("extension", rest_s, f"handshake, and {how}")
    yield Term("prefill", estimate.compute_s, tail(case, prefix))
    yield from step_term(estimate)


def estimate_restore(case: Case, estimates: list[Estimate]) -> None:
    for source in case.sources:
        if source.is_agent:
            weigh_fetch(case, _RESTORE, source, estimates)


def estimate_reuse(case: Case, estimates: list[Estimate]) -> None:
    target = case.target
    pages, second, more_s, wait_s = case.held_pages, None, 0.0, 0.0
    if case.sources and pages < case.wanted_pages:
        second, pages, more_s = extension(case, None, pages, case.slot_wait_s)
        wait_s = case.slot_wait_s if second is not None else 0.0
    estimates.append(
        estimate_fetch(
            _REUSE,
            target,
            case.history_tokens,
            case.history_s,
            pages * target.abilities.page_size_tokens,
            transfer_s=more_s,
            queue_s=target.ahead_s + wait_s,
            second=second,
            step_s=case.step_s,
            waiting=case.waiting,
        )
    )


MIGRATE = RecoveryOption(Option.MIGRATE, estimate, plan, terms, needs=attrgetter("wanted_pages"))
RESTORE = RecoveryOption(
    _RESTORE, estimate_restore, fetch_plan, fetch_terms, needs=attrgetter("stream.checkpoints")
)
REUSE = RecoveryOption(
    _REUSE, estimate_reuse, fetch_plan, fetch_terms, needs=attrgetter("held_pages")
)
