"""A policy estimates the options of a stream at each target and chooses one estimate."""

from collections.abc import Iterable, Sequence

import msgspec

from kvrs.config.policy import PolicyName, RestoredAt
from kvrs.core import options
from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Stream
from kvrs.core.options.base import (
    SOURCES_MAX,
    Case,
    KvSource,
    RecoveryOption,
    Term,
    lookahead_s,
)
from kvrs.core.state import State
from kvrs.profiles.tables import PrefillTable

_MIGRATE = Option.MIGRATE
_NO_SOURCES: Sequence[KvSource] = ()


class Rule:
    """Chooses the cheapest of its options at the assigned target. A subclass overrides the parts in
    which its policy differs.
    """

    several_targets = False  # True: the least loaded targets are estimated beside the assigned one.
    stays = True  # True: a stream may stay at an instance that re-forms.
    predicts = True  # True: its costs are those of the next token, and none is left out.
    spares_others = False  # True: a choice is charged for the time that other victims wait.

    def __init__(self, name: PolicyName, weighed: Sequence[RecoveryOption]) -> None:
        self.name = name
        self._weighed = tuple((each.needs, each.estimate) for each in weighed)

    def weigh(
        self, state: State, stream: Stream, targets: Sequence[Member], now_s: float
    ) -> list[Estimate]:
        """Return the estimates of all options for the stream at each target."""
        estimates: list[Estimate] = []
        for case in cases_of(state, stream, targets, now_s):
            weighed = len(estimates)
            if not self.spares_others:
                case.waiting = 0
            for needs, estimate in self._weighed:
                if needs is None or needs(case):
                    estimate(case, estimates)
            if case.target.times.slower_token_s:
                later_s = lookahead_s(stream, case.target)
                estimates[weighed:] = [_later(each, later_s) for each in estimates[weighed:]]
        return estimates

    def choose(self, estimates: Sequence[Estimate], fastest: Estimate) -> Estimate:
        """Return the estimate to carry out: `fastest`, unless a policy prefers another of
        `estimates`.
        """
        return fastest

    def choose_sparing(
        self, estimates: Sequence[Estimate], budget_s: float | None, others: float
    ) -> Estimate | None:
        """Return the choice of a policy that counts the wait of other streams; None: it counts
        none, or no estimate meets the budget.
        """
        return None

    def decide(
        self, estimates: Sequence[Estimate], budget_s: float | None = None, others: float = 0.0
    ) -> Estimate:
        """Choose an estimate within the budget; if none meets the budget, `Option.ABORT` with the
        cost of the fastest option (seed KVRS). `others` is the number of other victims of the event
        per target; only a rule that spares others uses it.
        """
        chosen = self.choose_sparing(estimates, budget_s, others)
        if chosen is not None:
            return chosen
        fastest = cheapest(estimates)
        if budget_s is not None and fastest.next_token_s > budget_s:
            return Estimate(Option.ABORT, fastest.target, fastest.total_s)
        return self.choose(estimates, fastest)

    def terms(self, case: Case, estimate: Estimate) -> Iterable[Term]:
        """Return the summands of `estimate.next_token_s`."""
        return options.BY_NAME[estimate.option].terms(case, estimate)


def _later(estimate: Estimate, later_s: float) -> Estimate:
    total_s = estimate.total_s + later_s
    return msgspec.structs.replace(estimate, total_s=total_s, lookahead_s=later_s)


def cheapest(estimates: Sequence[Estimate]) -> Estimate:
    """Return the estimate with the least `total_s`; a tie goes to migrate, as in `ROM_DECIDE` of
    seed KVRS, because migrate leaves the prefill instances to new requests.
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
    """Return each option's estimate with the least `total_s` over all targets."""
    best: dict[Option, Estimate] = {}
    for estimate in estimates:
        if (found := best.get(estimate.option)) is None or estimate.total_s < found.total_s:
            best[estimate.option] = estimate
    return tuple(best.values())


def cases_of(state: State, stream: Stream, targets: Sequence[Member], now_s: float) -> list[Case]:
    """Return the case of this stream at each target, with the sources from which the target could
    fetch.
    """
    history_tokens = stream.prompt_tokens + stream.produced_tokens
    table: PrefillTable | None = None
    history_s, extrapolated = 0.0, False
    cases: list[Case] = []
    for target in targets:
        if target.times.table is not table:
            table = target.times.table
            history_s = table.seconds_for(history_tokens)
            extrapolated = not table.covers(history_tokens)
        sources, wanted, held, slot_wait_s = _NO_SOURCES, 0, 0, 0.0
        if stream.holders or stream.checkpoints:
            wanted = (history_tokens - 1) // target.abilities.page_size_tokens
            if (own := stream.holders.get(target.id)) is not None:
                held = min(own.pages, wanted)
            if wanted and target.abilities.pulls:
                sources = sources_of(state, stream, target, wanted)
                # `is_used` saves the call: calls dominate the time of a decision.
                if sources and state.slots.is_used:
                    slot_wait_s = state.slots.expected_wait_s(target.id, stream.id, now_s)
        step_s, next_s = 0.0, target.times.step_s
        if target.streams:  # Streams decode there: a step runs, and each step takes its time.
            over_s, next_s = next_s - target.times.table.step_overhead_s, 1.5 * next_s
            step_s = target.times.step_s / 2 + over_s if over_s > 0 else target.times.step_s / 2
        cases.append(
            Case(
                state,
                stream,
                target,
                history_tokens,
                history_s,
                extrapolated,
                wanted,
                held,
                sources,
                slot_wait_s,
                step_s,
                next_s,
                len(target.answers.awaited)
                if target.abilities.pulls and not target.shared.rows
                else 0,
            )
        )
    return cases


def sources_of(state: State, stream: Stream, target: Member, wanted: int) -> list[KvSource]:
    """Return the instances, agents and stores that have leading pages of the history: at most
    `SOURCES_MAX`, those with the most pages.
    """
    view, sources = state.view, list[KvSource]()
    at_holder = state.settings.policy.restored_at is RestoredAt.HOLDER
    geometry, node, page_bytes = target.info.geometry, target.node, target.abilities.page_bytes
    for holder in stream.holders.values() if target.moves_kv else ():
        member = holder.member
        theirs = member.info.geometry
        if (
            member is target
            or not holder.pages
            or not member.abilities.retains
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
            agent.node != node
            and agent is not view.store
            and (at_holder or (checkpoint.rows and not agent.rows.to_other_nodes))
        ):
            continue
        link = view.link_from(agent, node)
        is_local = agent.node == node and not link.measured
        rate = agent.host_to_device_bytes_per_s if is_local else link.bytes_per_s
        pages = min(checkpoint.pages, wanted)
        if agent is view.store and not (pages := int(pages * target.shared.store_share)):
            continue
        sources.append(
            KvSource(agent.id, pages, page_bytes / rate, link.in_flight_bytes / rate, True)
        )
    if len(sources) > SOURCES_MAX:
        sources.sort(key=lambda source: (source.pages, -source.page_s), reverse=True)
        del sources[SOURCES_MAX:]
    return sources
