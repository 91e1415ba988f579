"""Split: the target computes the front of the history while it fetches the rest of the pages.

queue(target) + max(hand-shake + bytes(k..) / bandwidth, prefill(k pages)) + prefill(tail given
both); k, in closed form, makes both sides of the max equal (DESIGN section 5).
"""

from collections.abc import Iterable
from math import inf

from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.options.base import Case, RecoveryOption, Term, step_term, tail, transfer
from kvrs.core.options.migrate import fetch_plan
from kvrs.profiles.tables import PrefillTable

_SPLIT = Option.SPLIT


def estimate(case: Case, estimates: list[Estimate]) -> None:
    """Append the estimate of the best fetch, split where computing the front and fetching the rest
    of the pages end together.

    The front does not wait for the transfers already on the link.
    """
    fetch, source, target = case.best_fetch, case.best_source, case.target
    if fetch is None or source is None or not target.abilities.splits:
        return
    pages, page_s, size = source.pages, source.page_s, target.abilities.page_size_tokens
    drain_s = source.drain_s - case.slot_wait_s
    if drain_s < 0:
        drain_s = 0.0
    fixed_s = fetch.transfer_s - pages * page_s  # Hand-shake and transfer from a second source.
    table = target.times.table
    front = best_front(
        table, size, pages, page_s, drain_s + fixed_s, case.history_s, case.history_tokens
    )
    if front is None:
        return
    first_page, both_s, front_s = front
    total_s = fetch.queue_s - drain_s + both_s + fetch.compute_s + case.step_s
    front_at_s = front_s - table.step_overhead_s
    estimates.append(
        Estimate(
            _SPLIT,
            fetch.target,
            total_s,
            fetch.queue_s,
            fixed_s + (pages - first_page) * page_s,
            fetch.compute_s + front_s,
            fetch.extrapolated or not table.covers(first_page * size),
            fetch.at_target_s + (front_at_s if front_at_s > 0 else 0.0),
            fetch.source,
            fetch.second,
            first_page,
            step_s=case.step_s,
            waiting=target.streams,
        )
    )


def terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    source, first_page = estimate.source, estimate.first_page
    assert source is not None, estimate
    front_s = case.target.times.table.seconds_for(
        first_page * case.target.abilities.page_size_tokens
    )
    tail_s = estimate.compute_s - front_s
    prefix = has = case.pages_of(source)
    _, how = transfer(case, source, has - first_page)
    if estimate.second is not None:
        prefix = case.pages_of(estimate.second)
        how += f", then {transfer(case, estimate.second, prefix - has)[1]}"
    yield Term("queue", estimate.queue_s, f"before the {estimate.target}")
    meanwhile = (
        f"the longer of handshake and {how}: {estimate.transfer_s:.6f} s, "
        f"and of computing the first {first_page:,} pages meanwhile: {front_s:.6f} s"
    )
    fetch_s = estimate.next_token_s - estimate.queue_s - tail_s - estimate.step_s
    yield Term("fetch and front", max(0.0, fetch_s), meanwhile)
    yield Term("prefill", tail_s, tail(case, prefix))
    yield from step_term(estimate)


def best_front(
    table: PrefillTable,
    size: int,
    pages: int,
    page_s: float,
    fixed_s: float,
    history_s: float,
    history_tokens: int,
) -> tuple[int, float, float] | None:
    """Find the k in `[1, pages)` with the least `max(fixed_s + (pages - k) * page_s, T(k pages))`.

    Returns k, this maximum and `T(k pages)`, or None if no k is better than fetching all pages.
    `size` is the page size in tokens. The first term falls with k and the second rises, so the
    best k is near their crossing. The crossing is computed on the chord of the table up to
    `T(history_tokens) = history_s`, then on the chord from that point to the chord's end on the
    other side of the crossing. The result is exact to the page if the table is a straight line, and
    else approximate: three look-ups in the table, no search.
    """
    whole_s = fixed_s + pages * page_s
    begin_s = table.step_overhead_s
    if pages < 2 or page_s <= 0 or not begin_s < whole_s < inf:
        return None
    ends = history_tokens / size
    k = int((whole_s - begin_s) / (page_s + (history_s - begin_s) / ends))
    if k >= pages:
        k = pages - 1
    k_s = table.seconds_for(k * size)
    # Time by which the fetch outlasts the front at k; each page more in the front shortens it.
    ahead_s = whole_s - k * page_s - k_s
    if ahead_s >= 0:
        better = k + int(ahead_s / (page_s + (history_s - k_s) / (ends - k)))
    else:
        better = int((whole_s - begin_s) / (page_s + (k_s - begin_s) / k))
    if better >= pages:
        better = pages - 1
    elif better < 1:
        better = 1
    if better != k:
        k, k_s = better, table.seconds_for(better * size)
    fetch_s = whole_s - k * page_s
    both_s, beside = (fetch_s, k + 1) if fetch_s > k_s else (k_s, k - 1)
    if 1 <= beside < pages:
        beside_s = table.seconds_for(beside * size)
        fetch_s = whole_s - beside * page_s
        beside_both_s = beside_s if beside_s > fetch_s else fetch_s
        if beside_both_s < both_s:
            k, k_s, both_s = beside, beside_s, beside_both_s
    return (k, both_s, k_s) if both_s < whole_s else None


SPLIT = RecoveryOption(Option.SPLIT, estimate, fetch_plan, terms)
