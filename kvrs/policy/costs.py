"""What each way of recovery is predicted to cost, in seconds (DESIGN section 5, seed KVRS `ROM_DECIDE`).

Plain functions of plain numbers: the recovery policy calls them with its books, `kvrs explain` with what it is told.
Each takes the same few operations whatever the length of the history.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final, assert_never

import msgspec

from kvrs.ids import InstanceId, NodeId
from kvrs.policy.config import PolicyName
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, Role


class Option(StrEnum):
    START = "start"  # Not a recovery: a new stream, or one that had no KV and no token yet.
    MIGRATE = "migrate"  # From the prefill instance that retains it, or has it in its prefix cache.
    RESTORE = "restore"  # From a checkpoint in an agent's host memory.
    REUSE = "reuse"  # The target has it.
    SPLIT = "split"  # The front is computed while the back is fetched.
    RECOMPUTE = "recompute"
    ABORT = "abort"


# Until Python 3.12 a look-up of an enum's member costs as much as the rest of a line; decisions are made of such lines.
_MIGRATE, _RESTORE, _REUSE = Option.MIGRATE, Option.RESTORE, Option.REUSE
_SPLIT, _RECOMPUTE = Option.SPLIT, Option.RECOMPUTE
_AUTO: Final = PolicyName.AUTO
_ROM: Final = PolicyName.ROM


@dataclass(frozen=True, slots=True)
class Instance:
    """What the policy knows of an instance that is up."""

    id: InstanceId
    node: NodeId
    role: Role
    epoch: int
    geometry: KvGeometry
    prefill: PrefillTable
    capabilities: frozenset[Capability]
    max_model_len: int | None = None  # Tokens of prompt and output together; None: not known.
    own_prefill: InstanceId | None = None  # Of the same server: it computes a history within the one call that decodes it.


class Estimate(msgspec.Struct, frozen=True):
    """One option for one victim and target; `total_s` is what options are compared by.

    A struct, because one is made in a tenth of the time that a frozen dataclass takes, and decisions make many.
    """

    option: Option
    target: InstanceId
    total_s: float  # As corrected by what recoveries of this kind really cost.
    queue_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0
    extrapolated: bool = False  # A table was asked outside its measured range.
    raw_s: float = 0.0  # As the tables say: of a split less than the sum of its parts, of any other option their sum.
    source: InstanceId | None = None  # Who is fetched from, or who recomputes; None: the target itself.
    second: InstanceId | None = None  # Who has more of the history than the source, or than the target that reuses.
    first_page: int = 0  # What is fetched begins here; what is before it is computed meanwhile.
    by_prefill: bool = False  # Migrate: the source computes what its prefix cache lacks of the history, and hands all of it off.

    @property
    def fetches(self) -> bool:
        """Whether it takes a slot at the target."""
        option = self.option
        return (
            (option is _MIGRATE and not self.by_prefill)
            or option is _RESTORE
            or option is _SPLIT
            or (option is _REUSE and self.second is not None)
        )


def estimate_fetch(
    option: Option,
    target: Instance,
    history_tokens: int,
    prefix_tokens: int,
    transfer_s: float = 0.0,
    queue_s: float = 0.0,
    factor: float = 1.0,
    source: InstanceId | None = None,
    second: InstanceId | None = None,
) -> Estimate:
    """Have `prefix_tokens` of the history at the target after `transfer_s`, and compute the rest there."""
    rest = history_tokens - prefix_tokens
    table = target.prefill
    compute_s = table.extra(prefix_tokens, rest)
    raw_s = queue_s + transfer_s + compute_s
    return Estimate(
        option,
        target.id,
        raw_s * factor,
        queue_s,
        transfer_s,
        compute_s,
        not table.covers_extra(prefix_tokens, rest),
        raw_s,
        source,
        second,
    )


def estimate_split(
    fetch: Estimate,
    target: Instance,
    *,
    history_tokens: int,
    history_s: float,
    pages: int,
    page_s: float,
    fixed_s: float,
    drain_s: float = 0.0,
    factor: float = 1.0,
) -> Estimate | None:
    """`fetch`, with as many of its source's `pages` pages computed meanwhile as makes the longer of the two shortest.

    Of its transfer `fixed_s` comes whatever the number of pages, and `page_s` with each; of its queue `drain_s` is before
    the link only, so that the front need not wait for it. `history_s` is what the target would take to compute the whole
    history. None: to fetch all pages is as good.
    """
    size = target.geometry.page_size_tokens
    front = best_front(target.prefill, size, pages, page_s, drain_s + fixed_s, history_s, history_tokens)
    if front is None:
        return None
    first_page, both_s, front_s = front
    raw_s = fetch.queue_s - drain_s + both_s + fetch.compute_s
    return Estimate(
        _SPLIT,
        target.id,
        raw_s * factor,
        fetch.queue_s,
        fixed_s + (pages - first_page) * page_s,
        fetch.compute_s + front_s,
        fetch.extrapolated or not target.prefill.covers(first_page * size),
        raw_s,
        fetch.source,
        fetch.second,
        first_page,
    )


def best_front(
    table: PrefillTable, size: int, pages: int, page_s: float, fixed_s: float, history_s: float, history_tokens: int
) -> tuple[int, float, float] | None:
    """The k in `[1, pages)` that makes `max(fixed_s + (pages - k) * page_s, T(k pages))` least: (k, that, `T(k pages)`).

    `size` is a page's in tokens. The first of the two falls with k and the second rises, so the best k is where they
    cross: on the chord of the table up to `T(history_tokens) = history_s`, and once more on the chord between this point
    and the end of the first chord on the other side of the crossing. Where the table is a straight line that is exact to
    the page; elsewhere as near as these three look-ups bring it. None: no k is better than fetching all.
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
    # How much longer the fetch takes than the front, at k; on the chords it falls by so much with every page.
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


def estimate_recompute(
    prefill: Instance,
    target: Instance,
    history_tokens: int,
    *,
    bytes_per_s: float = inf,
    queue_s: float = 0.0,
    target_queue_s: float = 0.0,
    handshake_s: float = 0.0,
    factor: float = 1.0,
) -> Estimate:
    """Compute the whole history at `prefill`, then hand it off to the target, unless they are the same instance.

    Of the queue at the target only that is waited for which the way there does not outlast.
    """
    compute_s = prefill.prefill.seconds_for(history_tokens)
    transfer_s = 0.0
    source: InstanceId | None = None
    if prefill.id != target.id:
        transfer_s = handshake_s + history_tokens * (prefill.geometry.bytes_per_token / bytes_per_s)
        source = prefill.id
    raw_s = queue_s + compute_s + transfer_s
    if target_queue_s > raw_s:
        queue_s += target_queue_s - raw_s
        raw_s = target_queue_s
    extrapolated = not prefill.prefill.covers(history_tokens)
    return Estimate(_RECOMPUTE, target.id, raw_s * factor, queue_s, transfer_s, compute_s, extrapolated, raw_s, source)


def estimate_cached(
    holder: Instance,
    target: Instance,
    history_tokens: int,
    prefix_tokens: int,
    *,
    bytes_per_s: float,
    queue_s: float = 0.0,
    target_queue_s: float = 0.0,
    handshake_s: float = 0.0,
    factor: float = 1.0,
) -> Estimate:
    """Have the rest of the history computed behind the prefix that `holder` has cached, then all of it handed off to the target.

    For targets that cannot fetch pages themselves. Of the queue at the target as in `estimate_recompute`.
    """
    rest, table = history_tokens - prefix_tokens, holder.prefill
    compute_s = table.extra(prefix_tokens, rest)
    transfer_s = handshake_s + history_tokens * (holder.geometry.bytes_per_token / bytes_per_s)
    raw_s = queue_s + compute_s + transfer_s
    if target_queue_s > raw_s:
        queue_s += target_queue_s - raw_s
        raw_s = target_queue_s
    extrapolated = not table.covers_extra(prefix_tokens, rest)
    return Estimate(
        _MIGRATE, target.id, raw_s * factor, queue_s, transfer_s, compute_s, extrapolated, raw_s, holder.id, by_prefill=True
    )


def rom_migrate(
    target: Instance, *, prompt_tokens: int, bytes_per_s: float, source: InstanceId | None = None, by_prefill: bool = False
) -> Estimate:
    """Seed KVRS `MIGRATE_COST`: KV bytes of the prompt over the bandwidth, in bytes and bytes per second."""
    transfer_s = prompt_tokens * (target.geometry.bytes_per_token / bytes_per_s)
    return Estimate(
        _MIGRATE, target.id, transfer_s, transfer_s=transfer_s, raw_s=transfer_s, source=source, by_prefill=by_prefill
    )


def rom_recompute(prefill: Instance, target: Instance, *, prompt_tokens: int) -> Estimate:
    """Seed KVRS `RECOMPUTE_COST`: the prefill table at the length of the prompt."""
    compute_s = prefill.prefill.seconds_for(prompt_tokens)
    extrapolated = not prefill.prefill.covers(prompt_tokens)
    source = None if prefill.id == target.id else prefill.id
    return Estimate(
        _RECOMPUTE, target.id, compute_s, compute_s=compute_s, extrapolated=extrapolated, raw_s=compute_s, source=source
    )


def decide(name: PolicyName, estimates: Sequence[Estimate], budget_s: float | None = None) -> Estimate:
    """The policy's choice among at least one estimate.

    With a budget that no estimate meets, the answer is `Option.ABORT`, with what the fastest option would have cost.
    """
    cheapest = _cheapest(estimates)
    if budget_s is not None and cheapest.total_s > budget_s:
        return Estimate(Option.ABORT, cheapest.target, cheapest.total_s, raw_s=cheapest.raw_s)
    if name is _AUTO or name is _ROM:
        return cheapest
    match name:
        case PolicyName.ALWAYS_MIGRATE:
            return _cheapest_by(_MIGRATE, estimates) or cheapest
        case PolicyName.ALWAYS_RECOMPUTE:
            return _cheapest_by(_RECOMPUTE, estimates) or cheapest
        case PolicyName.ALWAYS_RESTORE:
            return _cheapest_by(_RESTORE, estimates) or _cheapest_by(_RECOMPUTE, estimates) or cheapest
        case _:
            assert_never(name)


def _cheapest(estimates: Sequence[Estimate]) -> Estimate:
    best = estimates[0]
    for estimate in estimates:
        # A tie goes to migrate, as in the seed: it leaves the prefill instances to new requests.
        if estimate.total_s < best.total_s or (
            estimate.total_s == best.total_s and estimate.option is _MIGRATE and best.option is not _MIGRATE
        ):
            best = estimate
    return best


def _cheapest_by(option: Option, estimates: Sequence[Estimate]) -> Estimate | None:
    best: Estimate | None = None
    for estimate in estimates:
        if estimate.option is option and (best is None or estimate.total_s < best.total_s):
            best = estimate
    return best
