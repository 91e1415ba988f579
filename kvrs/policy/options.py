"""The options of one victim, weighed with what the policy's books say, and the plan that carries one out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from kvrs.ids import InstanceId
from kvrs.policy.actions import Plan, Run
from kvrs.policy.cluster_view import ClusterView, Member
from kvrs.policy.config import PolicyName, PolicySettings
from kvrs.policy.costs import (
    Estimate,
    Option,
    estimate_cached,
    estimate_fetch,
    estimate_recompute,
    estimate_split,
    rom_migrate,
    rom_recompute,
)
from kvrs.policy.routing import prefill_for
from kvrs.policy.slots import SlotBook
from kvrs.policy.streams import Holder, Stream

# How many sources are looked at per target: a decision takes the same time for a stream that has been through much.
SOURCES_MAX = 3

# See costs.py: looked up once.
_AUTO, _ROM = PolicyName.AUTO, PolicyName.ROM
_MIGRATE, _RESTORE, _REUSE = Option.MIGRATE, Option.RESTORE, Option.REUSE
_RECOMPUTE, _SPLIT = Option.RECOMPUTE, Option.SPLIT


class Source(msgspec.Struct, frozen=True):
    """Somebody else who has leading pages of a history, as seen from a target."""

    id: InstanceId
    pages: int  # How many of them are worth fetching.
    page_s: float  # What one takes on the link.
    drain_s: float  # Until what is on the link already has arrived.
    is_agent: bool


@dataclass(frozen=True, slots=True)
class Options:
    view: ClusterView
    slots: SlotBook
    settings: PolicySettings
    # What predictions are multiplied by; kept up to date by whoever learns. Nearly always it is empty: asked first, because
    # to hash an enum's member is a call.
    factors: Mapping[Option, float] = field(default_factory=dict)

    def weigh(self, stream: Stream, targets: Sequence[Member], now_s: float) -> list[Estimate]:
        """What can be done for the stream at each target, and what it is predicted to cost."""
        if self.settings.name is _ROM:
            # The seed compares the two ways at one target, the best remote node; its costs cannot tell targets apart.
            return self._weigh_rom(stream, targets[0])
        estimates: list[Estimate] = []
        history = stream.prompt_tokens + stream.produced_tokens
        for target in targets:
            history_s = target.instance.prefill.seconds_for(history)
            if stream.holders or stream.checkpoints:
                self._weigh_fetches(stream, target, history_s, now_s, estimates)
            estimates.append(self._recompute(stream, target, history_s))
        return estimates

    def plan(self, stream: Stream, estimate: Estimate) -> Plan:
        """How to carry out an estimate that `weigh` has just given."""
        if estimate.option is _RECOMPUTE or estimate.by_prefill:
            return Plan(estimate.target, estimate.source)
        wanted = usable_pages(stream, self.view.members[estimate.target])
        runs: list[Run] = []
        begins = estimate.first_page
        if estimate.source is None:  # What the target has itself comes first.
            begins = min(stream.holders[estimate.target].pages, wanted)
        else:
            ends = _asked_until(stream, estimate.source, wanted, is_last=estimate.second is None)
            runs.append(Run(estimate.source, begins, ends - begins, self._epoch(estimate.source)))
            begins = ends
        if estimate.second is not None:
            ends = _asked_until(stream, estimate.second, wanted, is_last=True)
            runs.append(Run(estimate.second, begins, ends - begins, self._epoch(estimate.second)))
        return Plan(estimate.target, None, tuple(runs))

    def _epoch(self, holder: InstanceId) -> int:
        agent = self.view.agents.get(holder)
        return self.view.members[holder].instance.epoch if agent is None else agent.epoch

    # Ways that begin with KV of the history.

    def _weigh_fetches(self, stream: Stream, target: Member, history_s: float, now_s: float, estimates: list[Estimate]) -> None:
        """Reuse at the target, fetch from each source, and the best of these split."""
        wanted = usable_pages(stream, target)
        if not wanted:
            return
        if target.pulls:
            sources = self._sources(stream, target, wanted)
            slot_wait_s = self.slots.expected_wait_s(target.instance.id, stream.id, now_s) if sources else 0.0
        else:
            sources, slot_wait_s = [], 0.0
            estimates += [self._cached(stream, target, holder) for holder in _cached_at(stream, target)]
        if target.instance.id in stream.holders:
            estimates.append(self._reuse(stream, target, sources, wanted, slot_wait_s))
        best: Estimate | None = None
        for source in sources:
            estimate = self._fetch(stream, target, source, sources, wanted, slot_wait_s)
            estimates.append(estimate)
            if best is None or estimate.raw_s < best.raw_s:
                best, best_source = estimate, source
        if best is not None and target.splits and self.settings.name is _AUTO:
            split = estimate_split(
                best,
                target.instance,
                history_tokens=stream.prompt_tokens + stream.produced_tokens,
                history_s=history_s,
                pages=best_source.pages,
                page_s=best_source.page_s,
                fixed_s=best.transfer_s - best_source.pages * best_source.page_s,
                drain_s=best_source.drain_s - slot_wait_s if best_source.drain_s > slot_wait_s else 0.0,
                factor=self.factors.get(_SPLIT, 1.0) if self.factors else 1.0,
            )
            if split is not None:
                estimates.append(split)

    def _sources(self, stream: Stream, target: Member, wanted: int) -> list[Source]:
        sources: list[Source] = []
        geometry, node, page_bytes = target.instance.geometry, target.instance.node, target.page_bytes
        for holder in stream.holders.values():
            member = holder.member
            instance = member.instance
            theirs = instance.geometry
            if member is target or not holder.pages or not member.retains or (theirs is not geometry and theirs != geometry):
                continue
            link = self.view.link(instance.node, node)
            rate = link.bytes_per_s
            pages = holder.pages if holder.pages < wanted else wanted
            sources.append(Source(instance.id, pages, page_bytes / rate, link.in_flight_bytes / rate, False))
        for checkpoint in stream.checkpoints.values():
            agent = checkpoint.agent
            theirs = checkpoint.geometry
            if not checkpoint.pages or (theirs is not geometry and theirs != geometry):
                continue
            link = self.view.link(agent.node, node)
            is_local = agent.node == node and not link.measured
            rate = agent.host_to_device_bytes_per_s if is_local else link.bytes_per_s
            pages = min(checkpoint.pages, wanted)
            sources.append(Source(agent.id, pages, page_bytes / rate, link.in_flight_bytes / rate, True))
        if len(sources) > SOURCES_MAX:
            sources.sort(key=_worth, reverse=True)
            del sources[SOURCES_MAX:]
        return sources

    def _fetch(
        self, stream: Stream, target: Member, source: Source, sources: Sequence[Source], wanted: int, slot_wait_s: float
    ) -> Estimate:
        """Fetch from `source`, and what another one has beyond it from there.

        What is ahead on the link drains while a slot is waited for, so the longer of the two counts.
        """
        wait_s = slot_wait_s if slot_wait_s > source.drain_s else source.drain_s
        transfer_s = self.settings.handshake_s + source.pages * source.page_s
        pages, second = source.pages, None
        if len(sources) > 1 and pages < wanted:
            second, pages, more_s = self._extended(stream, target, source, sources, pages, wait_s + transfer_s)
            transfer_s += more_s
        option = _RESTORE if source.is_agent else _MIGRATE
        return estimate_fetch(
            option,
            target.instance,
            stream.prompt_tokens + stream.produced_tokens,
            pages * target.page_size_tokens,
            transfer_s,
            target.queue_s + wait_s,
            self.factors.get(option, 1.0) if self.factors else 1.0,
            source.id,
            second,
        )

    def _reuse(self, stream: Stream, target: Member, sources: Sequence[Source], wanted: int, slot_wait_s: float) -> Estimate:
        pages, second, more_s, wait_s = min(stream.holders[target.instance.id].pages, wanted), None, 0.0, 0.0
        if sources and pages < wanted:
            second, pages, more_s = self._extended(stream, target, None, sources, pages, slot_wait_s)
            wait_s = slot_wait_s if second is not None else 0.0
        return estimate_fetch(
            _REUSE,
            target.instance,
            stream.history_tokens,
            pages * target.page_size_tokens,
            transfer_s=more_s,
            queue_s=target.queue_s + wait_s,
            factor=self.factors.get(_REUSE, 1.0) if self.factors else 1.0,
            second=second,
        )

    def _extended(
        self,
        stream: Stream,
        target: Member,
        first: Source | None,
        sources: Sequence[Source],
        pages: int,
        elapsed_s: float,
    ) -> tuple[InstanceId | None, int, float]:
        """Who has more than the first `pages` pages, if that is sooner fetched than computed: (who, pages then, seconds more).

        Reports of agents lag: one that is known to have no less than an instance is asked for the rest all the same.
        """
        best: Source | None = None
        for other in sources:
            hopes = other.is_agent and other.pages == pages and (first is None or not first.is_agent)
            if other is not first and (other.pages > pages or hopes) and (best is None or other.pages > best.pages):
                best = other
        if best is None:
            return None, pages, 0.0
        handshake_s, size, table = self.settings.handshake_s, target.page_size_tokens, target.instance.prefill
        promised, history = max(best.pages, pages + 1), stream.history_tokens
        wait_s = max(0.0, best.drain_s - elapsed_s) + handshake_s
        saved_s = table.extra(pages * size, history - pages * size) - table.extra(promised * size, history - promised * size)
        if wait_s + (promised - pages) * best.page_s > saved_s:
            return None, pages, 0.0
        return best.id, best.pages, wait_s + (best.pages - pages) * best.page_s

    def _cached(self, stream: Stream, target: Member, holder: Holder) -> Estimate:
        """For a target that fetches nothing itself: by the prefill instance whose prefix cache has the front of the history."""
        there, instance = holder.member, target.instance
        return estimate_cached(
            there.instance,
            instance,
            stream.history_tokens,
            min(holder.pages, usable_pages(stream, there)) * there.page_size_tokens,
            bytes_per_s=self.view.bytes_per_s(there.instance.node, instance.node),
            queue_s=there.queue_s,
            target_queue_s=target.queue_s,
            handshake_s=self.settings.handshake_s,
            factor=self.factors.get(_MIGRATE, 1.0) if self.factors else 1.0,
        )

    # Ways that need none.

    def _recompute(self, stream: Stream, target: Member, history_s: float) -> Estimate:
        """By a prefill instance, or by the target itself when that is sooner, or when there it would be to migrate."""
        instance, history = target.instance, stream.prompt_tokens + stream.produced_tokens
        factor, queue_s = self.factors.get(_RECOMPUTE, 1.0) if self.factors else 1.0, target.queue_s
        prefill = prefill_for(self.view, target, stream)
        if prefill is not target and (target.pulls or not _has_cached(stream, prefill)):
            table, here_s, there_s = prefill.instance.prefill, queue_s + history_s, prefill.queue_s + self.settings.handshake_s
            there_s += history_s if table is instance.prefill else table.seconds_for(history)
            # A server with a prefill instance of its own computes nowhere else.
            if there_s <= here_s or target.own_prefill is not None:  # Else it is later there even before a byte is sent.
                there = estimate_recompute(
                    prefill.instance,
                    instance,
                    history,
                    bytes_per_s=self.view.bytes_per_s(prefill.instance.node, instance.node),
                    queue_s=prefill.queue_s,
                    target_queue_s=queue_s,
                    handshake_s=self.settings.handshake_s,
                    factor=factor,
                )
                if there.raw_s <= here_s or target.own_prefill is not None:
                    return there
        return estimate_recompute(instance, instance, history, queue_s=queue_s, factor=factor)

    def _weigh_rom(self, stream: Stream, target: Member) -> list[Estimate]:
        estimates: list[Estimate] = []
        sources = self._sources(stream, target, usable_pages(stream, target)) if target.pulls else []
        kept = [source for source in sources if not source.is_agent and source.pages]
        if kept:
            source = min(kept, key=lambda source: source.drain_s + source.pages * source.page_s)
            from_node = self.view.members[source.id].instance.node
            rate = self.view.link(from_node, target.instance.node).bytes_per_s
            estimates.append(rom_migrate(target.instance, prompt_tokens=stream.prompt_tokens, bytes_per_s=rate, source=source.id))
        prefill = prefill_for(self.view, target, stream)
        if not target.pulls:
            for holder in _cached_at(stream, target):
                instance = holder.member.instance
                rate = self.view.link(instance.node, target.instance.node).bytes_per_s
                tokens = stream.prompt_tokens
                estimates.append(
                    rom_migrate(target.instance, prompt_tokens=tokens, bytes_per_s=rate, source=instance.id, by_prefill=True)
                )
            prefill = target if _has_cached(stream, prefill) else prefill
        estimates.append(rom_recompute(prefill.instance, target.instance, prompt_tokens=stream.prompt_tokens))
        return estimates


def usable_pages(stream: Stream, target: Member) -> int:
    """Pages worth fetching: the last position of a history is always computed, because its logits are what is needed."""
    return (stream.prompt_tokens + stream.produced_tokens - 1) // target.page_size_tokens


def _cached_at(stream: Stream, target: Member) -> list[Holder]:
    """Prefill instances that have the front of the history cached, and can hand the whole of it off to a target that pulls
    nothing itself.
    """
    found = [
        holder
        for holder in stream.holders.values()
        if holder.pages
        and _has_cached(stream, holder.member)
        and holder.member is not target
        and target.takes_from(holder.member)
    ]
    if len(found) > SOURCES_MAX:
        found.sort(key=lambda holder: holder.pages, reverse=True)
        del found[SOURCES_MAX:]
    return found


def _has_cached(stream: Stream, prefill: Member) -> bool:
    """Whether to have a history computed there is to migrate it."""
    return prefill.caches and prefill.prefills and prefill.instance.id in stream.holders and not stream.bars(prefill)


def _worth(source: Source) -> tuple[int, float]:
    return source.pages, -source.page_s


def _asked_until(stream: Stream, holder: InstanceId, wanted: int, *, is_last: bool) -> int:
    """Where a run of this holder ends. An agent that is asked last is asked for all: it may have more than it has said."""
    checkpoint = stream.checkpoints.get(holder)
    if checkpoint is None:
        return min(stream.holders[holder].pages, wanted)
    return wanted if is_last else min(checkpoint.pages, wanted)
