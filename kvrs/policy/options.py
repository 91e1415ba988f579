"""The options of one victim, weighed with what the policy's books say, and the plan that carries one out."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrs.policy.actions import Plan
from kvrs.policy.cluster_view import ClusterView, Member
from kvrs.policy.config import PolicyName, PolicySettings
from kvrs.policy.costs import Estimate, Option, estimate_migrate, estimate_recompute, rom_migrate, rom_recompute
from kvrs.policy.routing import prefill_for
from kvrs.policy.slots import SlotBook
from kvrs.policy.streams import Holder, Stream

_ROM = PolicyName.ROM  # See costs.py: looked up once.


@dataclass(frozen=True, slots=True)
class Options:
    view: ClusterView
    slots: SlotBook
    settings: PolicySettings

    def weigh(self, stream: Stream, targets: Sequence[Member], now_s: float) -> list[Estimate]:
        """What can be done for the stream at each target, and what it is predicted to cost."""
        if self.settings.name is _ROM:
            # The seed compares the two ways at one target, the best remote node; its costs cannot tell targets apart.
            return self._weigh_rom(stream, targets[0], now_s)
        estimates: list[Estimate] = []
        for target in targets:
            if (holder := self._source(stream, target, now_s)) is not None:
                estimates.append(self._migrate(stream, holder, target, now_s))
            estimates.append(self._recompute(stream, target))
        return estimates

    def plan(self, stream: Stream, estimate: Estimate, now_s: float) -> Plan:
        """How to carry out an estimate that `weigh` has just given."""
        target = self.view.members[estimate.target]
        if estimate.option is Option.RECOMPUTE:
            prefill = prefill_for(self.view, target, stream)
            return Plan(decode=estimate.target, prefill=None if prefill is target else prefill.instance.id)
        holder = self._source(stream, target, now_s)
        assert holder is not None, estimate
        source = holder.member.instance
        return Plan(estimate.target, None, source.id, usable_pages(stream, holder), source.epoch)

    def _source(self, stream: Stream, target: Member, now_s: float) -> Holder | None:
        """The holder from which the stream's KV reaches the target soonest; None: there is nothing or no way to fetch."""
        if not target.pulls:
            return None
        best: Holder | None = None
        for holder in stream.holders.values():
            if holder.member.instance.geometry != target.instance.geometry or usable_pages(stream, holder) == 0:
                continue
            # Nearly every stream has one holder, and needs no comparison.
            if best is None or self._arrives_s(stream, holder, target, now_s) < self._arrives_s(stream, best, target, now_s):
                best = holder
        return best

    def _arrives_s(self, stream: Stream, holder: Holder, target: Member, now_s: float) -> float:
        return self._migrate(stream, holder, target, now_s).total_s

    def _migrate(self, stream: Stream, holder: Holder, target: Member, now_s: float) -> Estimate:
        instance = target.instance
        link = self.view.link(holder.member.instance.node, instance.node)
        return estimate_migrate(
            instance,
            history_tokens=stream.prompt_tokens + stream.produced_tokens,
            pages=usable_pages(stream, holder),
            bytes_per_s=link.bytes_per_s,
            bytes_ahead=link.in_flight_bytes,
            slot_wait_s=self.slots.expected_wait_s(instance.id, stream.id, now_s),
            queue_s=target.queue_s,
            handshake_s=self.settings.handshake_s,
        )

    def _recompute(self, stream: Stream, target: Member) -> Estimate:
        prefill = prefill_for(self.view, target, stream)
        return estimate_recompute(
            prefill.instance,
            target.instance,
            history_tokens=stream.prompt_tokens + stream.produced_tokens,
            bytes_per_s=self.view.link(prefill.instance.node, target.instance.node).bytes_per_s,
            queue_s=prefill.queue_s,
            handshake_s=self.settings.handshake_s,
        )

    def _weigh_rom(self, stream: Stream, target: Member, now_s: float) -> list[Estimate]:
        estimates: list[Estimate] = []
        if (holder := self._source(stream, target, now_s)) is not None:
            link = self.view.link(holder.member.instance.node, target.instance.node)
            estimates.append(rom_migrate(target.instance, prompt_tokens=stream.prompt_tokens, bytes_per_s=link.bytes_per_s))
        prefill = prefill_for(self.view, target, stream)
        estimates.append(rom_recompute(prefill.instance, target.instance, prompt_tokens=stream.prompt_tokens))
        return estimates


def usable_pages(stream: Stream, holder: Holder) -> int:
    """Pages worth fetching: the last position of a history is always computed, because its logits are what is needed."""
    wanted = (stream.prompt_tokens + stream.produced_tokens - 1) // holder.member.instance.geometry.page_size_tokens
    return holder.pages if holder.pages < wanted else wanted
