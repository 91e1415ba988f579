"""Migrate: the history's KV comes from an instance that retains it, or is handed off by a prefill
instance that has its front in a prefix cache.

Fetched: queue(target) + hand-shake + missing bytes / bandwidth + prefill(tail given prefix);
`C_mig` of seed KVRS is the third term alone. From a prefix cache, for targets that cannot fetch
pages: queue(prefill) + prefill(rest given prefix) + hand-shake + all bytes / bandwidth.
"""

from collections.abc import Iterable
from operator import attrgetter

from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Holder, Stream
from kvrs.core.options.base import (
    Books,
    Case,
    RecoveryOption,
    Term,
    cached_at,
    fetch_plan,
    fetch_terms,
    hand_off_terms,
    tail,
    weigh_fetch,
)

_MIGRATE = Option.MIGRATE


def estimate(case: Case, estimates: list[Estimate]) -> None:
    for source in case.sources:
        if not source.is_agent:
            weigh_fetch(case, _MIGRATE, source, estimates)
    for holder in cached_at(case.stream, case.target):
        estimates.append(_cached(case, holder))


def plan(books: Books, stream: Stream, estimate: Estimate) -> act.Plan:
    if estimate.by_prefill:
        return act.Plan(estimate.target, estimate.source)
    return fetch_plan(books, stream, estimate)


def terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    if not estimate.by_prefill:
        yield from fetch_terms(case, estimate)
        return
    assert estimate.source is not None, estimate
    yield Term("queue", estimate.queue_s, f"before the {estimate.source}")
    held = _held_pages(case, case.stream.holders[estimate.source])
    yield Term("prefill", estimate.compute_s, f"{tail(case, held)}, at the {estimate.source}")
    yield from hand_off_terms(case, estimate)


def _cached(case: Case, holder: Holder) -> Estimate:
    there, target, settings = holder.member, case.target, case.books.settings
    return estimate_cached(
        there,
        target,
        case.history_tokens,
        _held_pages(case, holder) * there.page_size_tokens,
        bytes_per_s=case.books.view.bytes_per_s(there.node, target.node),
        queue_s=there.queue_s,
        target_queue_s=case.queue_s,
        handshake_s=settings.handshake_s,
        factor=case.factor(_MIGRATE),
    )


def _held_pages(case: Case, holder: Holder) -> int:
    return min(holder.pages, (case.history_tokens - 1) // holder.member.page_size_tokens)


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
    factor: float = 1.0,
) -> Estimate:
    """The rest of the history computed behind the prefix that `holder` has cached, then all of it
    handed off to the target.

    The queue at the target counts only as far as it outlasts that.
    """
    table = holder.prefill
    history_s = table.seconds_for(history_tokens)
    compute_s, is_covered = table.behind(prefix_tokens, history_tokens, history_s)
    transfer_s = handshake_s + history_tokens * (holder.bytes_per_token / bytes_per_s)
    raw_s = queue_s + compute_s + transfer_s
    if target_queue_s > raw_s:
        queue_s += target_queue_s - raw_s
        raw_s = target_queue_s
    return Estimate(
        _MIGRATE,
        target.id,
        raw_s * factor,
        queue_s,
        transfer_s,
        compute_s,
        not is_covered,
        raw_s,
        source=holder.id,
        by_prefill=True,
    )


MIGRATE = RecoveryOption(Option.MIGRATE, estimate, plan, terms, needs=attrgetter("wanted_pages"))
