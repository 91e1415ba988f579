"""A policy: the cases in which options are weighed, and which of their estimates is taken."""

from collections.abc import Iterable, Sequence

import msgspec

from kvrs.config.policy import PolicyName
from kvrs.core import options
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.core.options.base import (
    SOURCES_MAX,
    Books,
    Case,
    KvSource,
    RecoveryOption,
    Term,
    lookahead_s,
)
from kvrs.profiles.tables import PrefillTable

_MIGRATE = Option.MIGRATE
_NO_SOURCES: Sequence[KvSource] = ()


class Rule:
    """The cheapest of `options` at the assigned target. A policy of its own overrides what
    differs.
    """

    several_targets = False  # The least loaded targets are weighed beside the assigned one.
    stays = True  # A stream may go on where it is when its instance re-forms.
    learns = True  # Predictions are corrected by what recoveries really took.
    spares_others = False  # A choice is charged what it has other victims wait for.

    def __init__(self, name: PolicyName, weighed: Sequence[RecoveryOption]) -> None:
        self.name = name
        self._weighed = tuple((each.needs, each.estimate) for each in weighed)

    def weigh(
        self, books: Books, stream: Stream, targets: Sequence[Member], now_s: float
    ) -> list[Estimate]:
        """Estimates of all options for the stream at each target."""
        estimates: list[Estimate] = []
        for case in cases_of(books, stream, targets, now_s):
            weighed = len(estimates)
            for needs, estimate in self._weighed:
                if needs is None or needs(case):
                    estimate(case, estimates)
            if case.target.slower_token_s:
                later_s = lookahead_s(stream, case.target)
                estimates[weighed:] = [_later(each, later_s) for each in estimates[weighed:]]
        return estimates

    def choose(self, estimates: Sequence[Estimate], fastest: Estimate) -> Estimate:
        """The estimate to carry out, of at least one."""
        return fastest

    def choose_sparing(
        self, estimates: Sequence[Estimate], budget_s: float | None, others: float
    ) -> Estimate | None:
        """The choice of a rule that spares others, where there are any; None: as for one victim."""
        return None

    def decide(
        self, estimates: Sequence[Estimate], budget_s: float | None = None, others: float = 0.0
    ) -> Estimate:
        """The choice within the budget; where no estimate meets that, `Option.ABORT` with what the
        fastest option would have cost (seed KVRS). `others`: how many other victims of the event
        there are for each target; only a rule that spares them counts what they wait.
        """
        if others:
            chosen = self.choose_sparing(estimates, budget_s, others)
            if chosen is not None:
                return chosen
        fastest = cheapest(estimates)
        if budget_s is not None and fastest.next_token_s > budget_s:
            return Estimate(Option.ABORT, fastest.target, fastest.total_s, raw_s=fastest.raw_s)
        return self.choose(estimates, fastest)

    def terms(self, case: Case, estimate: Estimate) -> Iterable[Term]:
        """The summands of `estimate.raw_s`."""
        return options.BY_NAME[estimate.option].terms(case, estimate)


def _later(estimate: Estimate, later_s: float) -> Estimate:
    total_s = estimate.total_s + later_s
    return msgspec.structs.replace(estimate, total_s=total_s, lookahead_s=later_s)


def cheapest(estimates: Sequence[Estimate]) -> Estimate:
    """The least `total_s`; a tie goes to migrate, as in `ROM_DECIDE` of seed KVRS: it leaves the
    prefill instances to new requests.
    """
    best = estimates[0]
    for estimate in estimates:
        if estimate.total_s < best.total_s or (
            estimate.total_s == best.total_s
            and estimate.option is _MIGRATE
            and best.option is not _MIGRATE
        ):
            best = estimate
    return best


def best_by_option(estimates: Iterable[Estimate]) -> tuple[Estimate, ...]:
    """The least `total_s` of each option, whatever the number of targets."""
    best: dict[Option, Estimate] = {}
    for estimate in estimates:
        if (found := best.get(estimate.option)) is None or estimate.total_s < found.total_s:
            best[estimate.option] = estimate
    return tuple(best.values())


def cases_of(books: Books, stream: Stream, targets: Sequence[Member], now_s: float) -> list[Case]:
    """The case of this stream at each target, with the sources that it could fetch from. What
    targets have in common is looked up once.
    """
    history_tokens = stream.prompt_tokens + stream.produced_tokens
    table: PrefillTable | None = None
    history_s, extrapolated = 0.0, False
    cases: list[Case] = []
    for target in targets:
        if target.prefill is not table:
            table = target.prefill
            history_s = table.seconds_for(history_tokens)
            extrapolated = not table.covers(history_tokens)
        sources, wanted, held, slot_wait_s = _NO_SOURCES, 0, 0, 0.0
        if stream.holders or stream.checkpoints:
            wanted = (history_tokens - 1) // target.page_size_tokens
            if (own := stream.holders.get(target.id)) is not None:
                held = min(own.pages, wanted)
            if wanted and target.pulls:
                sources = sources_of(books.view, stream, target, wanted)
                # Tested here, because calls make up the time of a decision.
                if sources and books.slots.is_used:
                    slot_wait_s = books.slots.expected_wait_s(target.id, stream.id, now_s)
        cases.append(
            Case(
                books,
                stream,
                target,
                history_tokens,
                history_s,
                extrapolated,
                wanted,
                held,
                sources,
                slot_wait_s,
            )
        )
    return cases


def sources_of(view: ClusterView, stream: Stream, target: Member, wanted: int) -> list[KvSource]:
    """Instances that retain leading pages of the history, and agents and stores that have some; at
    most `SOURCES_MAX`, those with the most pages.
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
        link = view.links.get((member.node, node), view.assumed_link)
        rate = link.bytes_per_s
        pages = holder.pages if holder.pages < wanted else wanted
        sources.append(
            KvSource(member.id, pages, page_bytes / rate, link.in_flight_bytes / rate, False)
        )
    for checkpoint in stream.checkpoints.values() if target.restores else ():
        agent = checkpoint.agent
        if not checkpoint.pages or not checkpoint.is_of(target):
            continue
        if (
            checkpoint.rows
            and agent.node != node
            and agent is not view.store
            and not agent.rows.to_other_nodes
        ):
            continue
        link = view.link_from(agent, node)
        is_local = agent.node == node and not link.measured
        rate = agent.host_to_device_bytes_per_s if is_local else link.bytes_per_s
        pages = min(checkpoint.pages, wanted)
        if agent is view.store and not (pages := int(pages * target.store_share)):
            continue
        sources.append(
            KvSource(agent.id, pages, page_bytes / rate, link.in_flight_bytes / rate, True)
        )
    if len(sources) > SOURCES_MAX:
        sources.sort(key=lambda source: (source.pages, -source.page_s), reverse=True)
        del sources[SOURCES_MAX:]
    return sources
