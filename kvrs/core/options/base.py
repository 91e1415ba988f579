"""The common part of the recovery options: the case that is weighed, its sources of KV, and
fetching from them.

One file beside this one per option: its estimate (predicted seconds), its plan (how an attempt
carries it out) and its terms (how `kvrs explain` shows the estimate). Costs follow DESIGN section
5, which generalises `MIGRATE_COST` and `RECOMPUTE_COST` of seed KVRS: each is a sum of queue,
hand-shake, bytes / bandwidth and prefill time. Every option takes a fixed number of operations,
whatever the length of the history.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kvrs.config.policy import PolicySettings
from kvrs.core.books.slots import SlotBook
from kvrs.core.model import actions as act
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Holder, Stream
from kvrs.ids import InstanceId

# How many sources are looked at per target: a bound on the time of one decision.
SOURCES_MAX = 3


class KvSource(msgspec.Struct, frozen=True, gc=False):
    """An instance or agent that has leading pages of a history, as seen from a target."""

    id: InstanceId
    pages: int  # How many of them are worth fetching.
    page_s: float  # What one takes on the link.
    drain_s: float  # Until what is on the link already has arrived.
    is_agent: bool


class Books(msgspec.Struct, frozen=True):
    """The policy's records that estimates are made from."""

    view: ClusterView
    slots: SlotBook
    settings: PolicySettings
    # Learned factors of predictions. Nearly always empty, which is tested first, because to hash an
    # enum's member is a call.
    factors: Mapping[Option, float] = msgspec.field(default_factory=dict)


class Case(msgspec.Struct, gc=False):
    """One stream at one target, with everything that more than one option needs.

    A struct, because one is made in a fraction of the time that a dataclass takes.
    """

    books: Books
    stream: Stream
    target: Member
    queue_s: float  # Before the target.
    history_tokens: int
    history_s: float  # What the target would take to compute the whole history.
    extrapolated: bool  # That is outside what was measured.
    wanted_pages: int  # Worth fetching; 0 also where no KV of the history is left.
    held_pages: int  # Of these, what the target has itself.
    sources: Sequence[KvSource]
    slot_wait_s: float  # Expected until the target has a slot for a fetch.
    best_fetch: Estimate | None = None  # Of migrate and restore, as far as they have been weighed,
    best_source: KvSource | None = None  # and where it begins to fetch.

    def factor(self, option: Option) -> float:
        """Factor by which a prediction for this option is multiplied."""
        factors = self.books.factors
        return factors.get(option, 1.0) if factors else 1.0

    def pages_of(self, source: InstanceId | None) -> int:
        """Leading pages of the history that this source (None: the target) has and are wanted."""
        if source is None:
            return self.held_pages
        return next(each.pages for each in self.sources if each.id == source)


class Term(msgspec.Struct, frozen=True):
    """One summand of an estimate, for people."""

    name: str
    seconds: float
    how: str


class RecoveryOption(msgspec.Struct, frozen=True):
    """One way to bring a stream back."""

    option: Option
    estimate: Callable[[Case, list[Estimate]], None]  # Appends as many estimates as there are ways.
    plan: Callable[[Books, Stream, Estimate], act.Plan]  # Of an estimate that was just made.
    terms: Callable[[Case, Estimate], Iterable[Term]]  # Their sum is `raw_s`.
    # Its plan fetches pages, if an estimate names a source; such a transfer takes a slot.
    fetches: bool = True
    # It is weighed only for a case for which this is true; None: for all.
    needs: Callable[[Case], object] | None = None


_NO_SOURCES: Sequence[KvSource] = ()


def case_of(books: Books, stream: Stream, target: Member, now_s: float) -> Case:
    """The case of this stream at this target, with the sources that it could fetch from."""
    history_tokens = stream.prompt_tokens + stream.produced_tokens
    sources, wanted, held, slot_wait_s = _NO_SOURCES, 0, 0, 0.0
    if stream.holders or stream.checkpoints:
        wanted = (history_tokens - 1) // target.page_size_tokens
        if (own := stream.holders.get(target.id)) is not None:
            held = min(own.pages, wanted)
        if wanted and target.pulls:
            sources = sources_of(books.view, stream, target, wanted)
            if sources:
                slot_wait_s = books.slots.expected_wait_s(target.id, stream.id, now_s)
    table, queue_s = target.prefill, target.queue_s
    history_s, extrapolated = table.seconds_for(history_tokens), not table.covers(history_tokens)
    return Case(
        books,
        stream,
        target,
        queue_s,
        history_tokens,
        history_s,
        extrapolated,
        wanted,
        held,
        sources,
        slot_wait_s,
    )


def usable_pages(stream: Stream, target: Member) -> int:
    """Pages worth fetching: the last position of a history is always computed, because its logits
    are what is needed.
    """
    return (stream.prompt_tokens + stream.produced_tokens - 1) // target.page_size_tokens


def sources_of(view: ClusterView, stream: Stream, target: Member, wanted: int) -> list[KvSource]:
    """Instances that retain leading pages of the history and agents that store some; at most
    `SOURCES_MAX`, those with the most pages.
    """
    sources: list[KvSource] = []
    geometry, node, page_bytes = target.geometry, target.node, target.page_bytes
    for holder in stream.holders.values() if target.moves_kv else ():
        member = holder.member
        theirs = member.geometry
        if (
            member is target
            or not holder.pages
            or not member.retains
            or not member.moves_kv
            or (theirs is not geometry and theirs != geometry)
        ):
            continue
        link = view.links.get((member.node, node)) or view.link(member.node, node)
        rate = link.bytes_per_s
        pages = holder.pages if holder.pages < wanted else wanted
        sources.append(
            KvSource(member.id, pages, page_bytes / rate, link.in_flight_bytes / rate, False)
        )
    for checkpoint in stream.checkpoints.values() if target.restores else ():
        agent = checkpoint.agent
        if not checkpoint.pages or not checkpoint.is_of(target):
            continue
        link = view.link_from(agent, node)
        is_local = agent.node == node and not link.measured
        rate = agent.host_to_device_bytes_per_s if is_local else link.bytes_per_s
        pages = min(checkpoint.pages, wanted)
        sources.append(
            KvSource(agent.id, pages, page_bytes / rate, link.in_flight_bytes / rate, True)
        )
    if len(sources) > SOURCES_MAX:
        sources.sort(key=lambda source: (source.pages, -source.page_s), reverse=True)
        del sources[SOURCES_MAX:]
    return sources


def lookahead_s(settings: PolicySettings, stream: Stream, target: Member) -> float:
    """Extra time that the next tokens of the stream take there, compared with all its ranks."""
    tokens = settings.lookahead_tokens
    if stream.most_tokens is not None:
        tokens = min(tokens, max(0, stream.most_tokens - stream.history_tokens))
    return tokens * target.slower_token_s


# Prefix caches.


def cached_at(stream: Stream, target: Member) -> list[Holder]:
    """Prefill instances that have the front of the history cached, and can hand the whole of it off
    to a target that does not fetch it from there itself.
    """
    found: list[Holder] = []
    for holder in stream.holders.values() if target.moves_kv else ():
        member = holder.member
        if (
            holder.pages
            and not (target.pulls and member.retains)  # It fetches from there.
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
    """A history that is computed there counts as migrated."""
    return (
        prefill.caches
        and prefill.moves_kv
        and prefill.prefills
        and prefill.id in stream.holders
        and not stream.bars(prefill)
    )


# Fetching.


def weigh_fetch(case: Case, option: Option, source: KvSource, estimates: list[Estimate]) -> None:
    """Fetch from `source`, and what another source has beyond it from there.

    What is ahead on the link drains while a slot is waited for, so the longer of the two counts.
    """
    target, wait_s = case.target, case.slot_wait_s
    if source.drain_s > wait_s:
        wait_s = source.drain_s
    transfer_s = case.books.settings.handshake_s + source.pages * source.page_s
    pages, second = source.pages, None
    if len(case.sources) > 1 and pages < case.wanted_pages:
        second, pages, more_s = extension(case, source, pages, wait_s + transfer_s)
        transfer_s += more_s
    factors = case.books.factors
    estimate = estimate_fetch(
        option,
        target,
        case.history_tokens,
        case.history_s,
        pages * target.page_size_tokens,
        transfer_s,
        case.queue_s + wait_s,
        factors.get(option, 1.0) if factors else 1.0,
        source.id,
        second,
    )
    estimates.append(estimate)
    best = case.best_fetch
    if best is None or estimate.raw_s < best.raw_s:
        case.best_fetch, case.best_source = estimate, source


def estimate_fetch(
    option: Option,
    target: Member,
    history_tokens: int,
    history_s: float,
    prefix_tokens: int,
    transfer_s: float = 0.0,
    queue_s: float = 0.0,
    factor: float = 1.0,
    source: InstanceId | None = None,
    second: InstanceId | None = None,
) -> Estimate:
    """Queue, then `prefix_tokens` of the history, all of which would take `history_s`, at the
    target after `transfer_s`, and the rest computed there.
    """
    table = target.prefill
    compute_s, is_covered = table.behind(prefix_tokens, history_tokens, history_s)
    at_target_s = compute_s - table.step_overhead_s
    raw_s = queue_s + transfer_s + compute_s
    return Estimate(
        option,
        target.id,
        raw_s * factor,
        queue_s,
        transfer_s,
        compute_s,
        not is_covered,
        raw_s,
        at_target_s if at_target_s > 0 else 0.0,
        source,
        second,
    )


def extension(
    case: Case, first: KvSource | None, pages: int, elapsed_s: float
) -> tuple[InstanceId | None, int, float]:
    """A second source with more than the first `pages` pages, if those are sooner fetched than
    computed: (its id, pages then, seconds more).

    Reports of agents lag: an agent that has no fewer pages than an instance by its last report is
    tried for the rest all the same.
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
    size, table = case.target.page_size_tokens, case.target.prefill
    promised, history = max(best.pages, pages + 1), case.history_tokens
    wait_s = max(0.0, best.drain_s - elapsed_s) + case.books.settings.handshake_s
    saved_s = table.extra(pages * size, history - pages * size) - table.extra(
        promised * size, history - promised * size
    )
    if wait_s + (promised - pages) * best.page_s > saved_s:
        return None, pages, 0.0
    return best.id, best.pages, wait_s + (best.pages - pages) * best.page_s


def fetch_plan(books: Books, stream: Stream, estimate: Estimate) -> act.Plan:
    """The target fetches from the estimate's source (None: it has the front itself), then from its
    second one.
    """
    wanted = usable_pages(stream, books.view.members[estimate.target])
    runs: list[act.PageRange] = []
    begins = estimate.first_page
    if estimate.source is None:
        begins = min(stream.holders[estimate.target].pages, wanted)
    for holder in (estimate.source, estimate.second):
        if holder is not None:
            is_last = holder == estimate.second or estimate.second is None
            ends = _run_end(stream, holder, wanted, is_last=is_last)
            runs.append(act.PageRange(holder, begins, ends - begins, _epoch(books.view, holder)))
            begins = ends
    return act.Plan(estimate.target, None, tuple(runs))


def _epoch(view: ClusterView, holder: InstanceId) -> int:
    agent = view.agents.get(holder)
    return view.members[holder].epoch if agent is None else agent.epoch


def _run_end(stream: Stream, holder: InstanceId, wanted: int, *, is_last: bool) -> int:
    """The end of the run from this holder. From the last agent all pages are requested: it may have
    more than it has reported.
    """
    checkpoint = stream.checkpoints.get(holder)
    if checkpoint is None:
        return min(stream.holders[holder].pages, wanted)
    return wanted if is_last else min(checkpoint.pages, wanted)


# Terms.


def fetch_terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    """Terms of an estimate by `estimate_fetch`."""
    yield Term("queue", estimate.queue_s, f"before the {estimate.target}")
    prefix = has = case.pages_of(estimate.source)
    rest_s = estimate.transfer_s
    if estimate.source is not None:
        handshake_s = case.books.settings.handshake_s
        transfer_s, how = transfer(case, estimate.source, has)
        yield handshake_term(case)
        yield Term("transfer", transfer_s, how)
        rest_s = max(0.0, rest_s - handshake_s - transfer_s)
    if estimate.second is not None:
        prefix = case.pages_of(estimate.second)
        _, how = transfer(case, estimate.second, prefix - has)
        yield Term("extension", rest_s, f"handshake, and {how}")
    yield Term("prefill", estimate.compute_s, tail(case, prefix))


def handshake_term(case: Case) -> Term:
    return Term("handshake", case.books.settings.handshake_s, "connect, authenticate, ask")


def transfer(case: Case, source: InstanceId, pages: int) -> tuple[float, str]:
    """Seconds on the link, and how they come about."""
    page_s = next(each.page_s for each in case.sources if each.id == source)
    page_bytes = case.target.page_bytes
    what = f"{pages:,} pages of the {source}"
    return pages * page_s, division(what, pages * page_bytes, page_bytes / page_s)


def hand_off_terms(case: Case, estimate: Estimate) -> Iterable[Term]:
    """The whole history, from the estimate's source to the target."""
    assert estimate.source is not None, estimate
    view, target = case.books.view, case.target
    source = view.members[estimate.source]
    where = "within the node" if source.node == target.node else "between the nodes"
    size_bytes = case.history_tokens * source.bytes_per_token
    how = division(f"hand-off {where}", size_bytes, view.bytes_per_s(source.node, target.node))
    yield handshake_term(case)
    yield Term("hand-off", estimate.transfer_s - case.books.settings.handshake_s, how)


def tail(case: Case, prefix_pages: int) -> str:
    prefix = prefix_pages * case.target.page_size_tokens
    return f"{case.history_tokens - prefix:,} tokens behind {prefix:,}"


def division(what: str, size_bytes: int, bytes_per_s: float) -> str:
    return f"{what}: {size_bytes / 1e6:,.1f} MB / {bytes_per_s / 1e9:,.3g} GB/s"
