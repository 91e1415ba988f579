"""The policy's view of instances, agents and links: reported facts, and this proxy's own bookings.

Reports are as old as the last poll; bookings count at once. The queue of an instance and the
reserved bytes of an agent are the larger of report and booking, because each misses a part of the
other.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any

import msgspec

from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Member
from kvrs.core.model.prefixes import PrefixIndex, room_tokens
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import MEMORY, STORE

# Upper limit of `prompt_weight`: cost of a second of computing, in seconds of a queue.
_MOST_WEIGHT = 8.0

_place, _streams = attrgetter("place"), attrgetter("streams")


@dataclass(slots=True, eq=False)
class Link:
    bytes_per_s: float  # Lower bound of the rate, on which decisions count; or the assumed rate.
    measured: bool = False
    in_flight_bytes: int = 0  # Bytes of this proxy's transfers that have not finished.
    in_flight: int = 0  # Number of these transfers.
    mean_bytes_per_s: float = 0.0  # Mean rate, which predicts; 0: not known.

    def measure(self, bytes_per_s: float, mean_bytes_per_s: float = 0.0) -> None:
        if bytes_per_s > 0:
            self.bytes_per_s, self.measured = bytes_per_s, True
            self.mean_bytes_per_s = mean_bytes_per_s

    @property
    def counted_share(self) -> float:
        """Share of the mean rate on which decisions count; 1 if the mean is not known."""
        return self.bytes_per_s / self.mean_bytes_per_s if self.mean_bytes_per_s else 1.0


class PrefillOrder:
    """The prefill instances that are not drained, with the work that was sent to them, sorted by
    this work, then by the streams of the least loaded decode instance on their node, then by id.

    A change marks the node; marked nodes are sorted when the order is read.
    """

    def __init__(self, by_node: Mapping[NodeId, Sequence[Member]]) -> None:
        self.members: list[Member] = []  # Members, sorted as at the last call of `least_first`.
        self._by_node = by_node
        # Nodes whose instances have changed in work, streams or pairs.
        self.changed: dict[NodeId, None] = {}
        # Instances passed to `restrict`; `has_restricted` removes those that no pause holds back.
        self.restricted: dict[Member, None] = {}
        # Numbers of prompts without an answer at prefill instances: by this proxy's bookings, and
        # by the instances' reports.
        self._prompts = 0
        self._reported_prompts = 0

    def add(self, member: Member) -> None:
        member.is_placed = True
        insort(self.members, member, key=_place)
        self.changed[member.node] = None

    def remove(self, member: Member) -> None:
        member.is_placed = False
        del self.members[self._index(member)]

    def note_queue(self, member: Member, reported_s: float) -> None:
        """Note the queueing delay that an instance reports."""
        member.note_queue(reported_s)
        self.changed[member.node] = None

    def restrict(self, member: Member) -> None:
        """Note a decode instance that may refuse some streams during a pause."""
        self.restricted[member] = None

    def has_restricted(self) -> bool:
        """Return whether any decode instance may refuse some streams."""
        for member in [*self.restricted]:
            if member.answers.busy_until_s is None:
                del self.restricted[member]
        return bool(self.restricted)

    def book(self, member: Member, seconds: float, now_s: float, *, is_history: bool) -> None:
        """Note work that an instance gets."""
        if not member.bookings:
            member.head_since_s = now_s
        member.work_s += seconds
        if is_history:
            member.history_work_s += seconds
            member.ahead_s += seconds
        member.queue_s = max(member.work_s, member.reported_queue_s)
        self.changed[member.node] = None
        member.bookings += 1
        self._prompts += member.abilities.prefills

    def unbook(self, member: Member, seconds: float, now_s: float, *, is_history: bool) -> None:
        """Note that booked work is done, or given up."""
        member.bookings -= 1
        member.head_since_s = now_s
        if is_history:
            member.history_work_s = max(0.0, member.history_work_s - seconds)
        self._prompts -= member.abilities.prefills
        # Idle instances must have exactly zero: a rounding error would decide between them.
        member.work_s = max(0.0, member.work_s - seconds) if member.bookings else 0.0
        member.history_work_s = min(member.history_work_s, member.work_s)
        member.queue_s = max(member.work_s, member.reported_queue_s)
        self.changed[member.node] = None

    def note_prompts(self, member: Member, prompts: int) -> None:
        """Note the number of prompts that a prefill instance runs or queues by its report."""
        self._reported_prompts += prompts - member.reported_prompts
        member.reported_prompts = prompts

    def prompt_weight(self, prefillers: int) -> float:
        """Return the cost of a second of compute time, in seconds of a queue: 1 for the prompt
        itself, plus 1 for each prompt behind it, which is the number of prompts in flight per
        prefill instance.
        """
        prompts = max(self._prompts, self._reported_prompts)
        return min(_MOST_WEIGHT, 1 + prompts / max(1, prefillers))

    def least_first(self) -> list[Member]:
        """Return the sorted list; the caller must not change it, nor keep it over a change."""
        for node in self.changed:
            # Fewest streams in a list of own decode instances, by `id` of the list, which members
            # share.
            least: dict[int, int] = {}
            for member in self._by_node.get(node, ()):
                if not member.is_placed:
                    continue
                pairs = member.own_decoders
                if (streams := least.get(id(pairs))) is None:
                    streams = min(map(_streams, pairs), default=0)
                    least[id(pairs)] = streams
                place = member.queue_s, streams, member.id
                if place != member.place:
                    del self.members[self._index(member)]
                    member.place = place
                    insort(self.members, member, key=_place)
        self.changed.clear()
        return self.members

    def _index(self, member: Member) -> int:
        at = bisect_left(self.members, member.place, key=_place)
        assert self.members[at] is member, member
        return at


class ClusterView:
    def __init__(self, assumed_link_bytes_per_s: float) -> None:
        self.members: dict[InstanceId, Member] = {}
        self.agents: dict[InstanceId, Agent] = {}
        # All shared KV stores of engines, as one agent without a process.
        self.store = Agent(InstanceId(STORE), STORE)
        # Links by (source, target) node, created by `link`.
        self.links: dict[tuple[NodeId, NodeId], Link] = {}
        self.assumed_link = Link(assumed_link_bytes_per_s)
        self.now_s = 0.0  # Time of the current event.
        self.tokens_differ = False  # Two decode instances compute different tokens.
        self.has_doubted = False  # `Member.is_doubted` of any.
        self.formats_differ = False  # NIXL cannot carry hand-offs between some instances.
        # Decode instances that are not drained, sorted by rank: the least loaded first.
        self.decoders: list[Member] = []
        self.by_node: dict[NodeId, list[Member]] = {}
        # Decode instances among `decoders` on nodes where no prefill instance takes prompts.
        self.unpaired: set[Member] = set()
        self.prefill_order = PrefillOrder(self.by_node)
        # Prefill instances that are not drained; their order may be outdated.
        self.prefillers = self.prefill_order.members
        self.prefixes = PrefixIndex[Member](room_tokens)
        self.stored = PrefixIndex[Agent](attrgetter("room_tokens"))
        self._leaving: dict[InstanceId, Member] = {}  # Instances that must drain or are drained.

    def add(self, member: Member) -> Member:
        assert member.id not in self.members, member.id
        self.members[member.id] = member
        self.by_node.setdefault(member.node, []).append(member)
        if member.abilities.decodes:
            self._set_ranked(member, True)
        if member.abilities.prefills:
            self.prefill_order.add(member)
        self.formats_differ = _differ({each.info.hand_off_format for each in self.members.values()})
        self.update(member)
        return member

    def set_self_tested(self, member: Member, event: ev.InstanceUp | ev.SelfTested) -> None:
        member.moves_kv, member.tokens = event.moves_kv, event.tokens
        member.is_doubted = event.is_doubted
        member.generates = event.generates
        member.restores = event.moves_kv if event.restores is None else event.restores
        if not member.shared.has_tier and (store := event.store) is not None:
            member.set_rows(store.namespace, in_store=True)
            member.restores = store.restores
            member.shared = msgspec.structs.replace(member.shared, store_share=store.share)
        elif member.shared.in_store:
            member.set_rows("")
        self._compare_tokens()
        self.update(member)

    def remove(self, member: Member) -> None:
        self.prefill_order.note_prompts(member, 0)
        self.prefixes.lost(member)
        del self.members[member.id]
        self.by_node[member.node].remove(member)
        if member.is_ranked:
            self._set_ranked(member, False)
            self.unpaired.discard(member)
        if member.is_placed:
            self.prefill_order.remove(member)
        self.prefill_order.restricted.pop(member, None)
        self._leaving.pop(member.id, None)
        if member.tokens or member.is_doubted:
            self._compare_tokens()
        self.formats_differ = _differ({each.info.hand_off_format for each in self.members.values()})
        self._update(member.node)

    def update(self, changed: Member) -> None:
        """Update drains and pairs after a change of a member's facts or of its reasons to drain."""
        if changed.must_drain:
            self._leaving[changed.id] = changed
        self._update(changed.node)

    def _update(self, changed: NodeId) -> None:
        if self._leaving:
            self._update_drained()
        self._update_pairs(changed)

    @property
    def generates(self) -> str:
        """`Member.generates` of all decode instances; empty: it is not known, or they differ."""
        found = {member.generates for member in self.members.values() if member.abilities.decodes}
        return found.pop() if len(found) == 1 else ""

    def _compare_tokens(self) -> None:
        members = self.members.values()
        tokens = {member.tokens for member in members if member.abilities.decodes and member.tokens}
        self.tokens_differ = len(tokens) > 1
        self.has_doubted = any(member.is_doubted for member in members)

    def _update_drained(self) -> None:
        """Drain each instance that must drain, if healthy instances have its roles; if all are
        degraded, none is drained. For an instance that will end, a re-forming instance counts as
        healthy.
        """
        members = self.members.values()
        healthy = [each for each in members if not each.must_drain]
        lasting = [each for each in members if not each.is_to_end]
        for member in [*self._leaving.values()]:
            others = lasting if member.is_to_end else healthy
            is_drained = member.must_drain and have_roles_of(member, others)
            if is_drained != member.is_drained:
                member.is_drained = is_drained
                if member.abilities.decodes:
                    self._set_ranked(member, not is_drained)
                if is_drained and member.is_placed:
                    self.prefill_order.remove(member)
                elif not is_drained and member.abilities.prefills:
                    self.prefill_order.add(member)
                self._update_pairs(member.node)
            if not member.must_drain:
                del self._leaving[member.id]

    def _update_pairs(self, node: NodeId) -> None:
        there = self.by_node[node]
        decoders = [each for each in there if each.abilities.decodes and not each.is_drained]
        self.unpaired.difference_update(there)
        if not any(each.abilities.prefills and not each.is_drained for each in there):
            self.unpaired.update(decoders)
        are_free = not self.formats_differ and all(
            each.abilities.pulls or each.info.own_prefill is None for each in decoders
        )
        for prefill in there:
            if prefill.abilities.prefills:
                prefill.own_decoders = (
                    decoders
                    if are_free
                    else [member for member in decoders if member.takes_from(prefill)]
                )
        self.prefill_order.changed[node] = None

    def count_stream(self, member: Member, change: int) -> None:
        """Change the number of a member's streams by `change`, and keep the decode instances
        sorted.
        """
        decoders = self.decoders
        at = bisect_left(decoders, member.rank, key=_rank) if member.is_ranked else None
        assert at is None or decoders[at] is member, member
        member.streams += change
        member.rank = member.streams, member.id
        self.prefill_order.changed[member.node] = None
        if at is None:
            return
        beside = at + 1 if change > 0 else at - 1
        if 0 <= beside < len(decoders) and (decoders[beside].rank < member.rank) is (change > 0):
            del decoders[at]
            insort(decoders, member, key=_rank)

    def has_better(self, doubted: Member, name: str) -> bool:
        """Return whether instances whose weights are not doubted have the roles of this one, and
        serve this model name (empty: any); slow ones do.
        """
        others = [
            each
            for each in self.members.values()
            if not (each.is_doubted or each.is_drained or each.answers.is_ejected)
            and (not name or name in each.abilities.names)
        ]
        return have_roles_of(doubted, others)

    def share_slowness(self, member: Member) -> None:
        """Let instances with the same prefill table as this one, which have reported no slowness
        of their own, have the median of those that have.
        """
        label = member.times.full_table.label
        alike = [
            each
            for each in self.members.values()
            if each.times.observed is None and each.times.full_table.label == label
        ]
        if known := [each.times.slowness for each in alike if each.times.has_own_slowness]:
            for each in alike:
                if not each.times.has_own_slowness:
                    each.times.set_slowness(median(known))

    def look_ahead(self) -> None:
        """Count the work before histories that come now, at each instance (`Member.ahead_s`)."""
        for member in self.members.values():
            member.ahead_s = member.wait_of_history_s(self.now_s) if member.queue_s else 0.0

    def takes_start(self, member: Member) -> bool:
        """Return whether the instance's recent answers allow a new request."""
        health = member.answers
        if member.is_doubted or member.is_unwell or self.now_s < member.hung_until_s:
            return False
        # After its pause, a closed instance gets one probe at a time.
        if health.until_s is not None and (health.probe is not None or self.now_s < health.until_s):
            return False
        return not health.awaited or not health.is_overdue(self.now_s, member.reported_queue_s)

    def takes_recovery(self, member: Member) -> bool:
        """Return whether the instance's recent answers allow an interrupted stream, which is never
        a probe.
        """
        health = member.answers
        if health.is_ejected or self.now_s < member.hung_until_s:
            return False
        if health.until_s is not None and self.now_s < health.until_s:
            return False
        return not health.awaited or not health.is_overdue(self.now_s, member.reported_queue_s)

    def is_busy(self, member: Member) -> bool:
        """Return whether the instance is in a pause after a busy answer."""
        return member.answers.is_busy(self.now_s)

    def is_healthy(self, decode: Member) -> bool:
        """Return whether an interrupted stream should go on at the instance."""
        has_prefill = decode.info.own_prefill is None or self.has_prefill(decode)
        return has_prefill and (decode.is_clear(self.now_s) or self.takes_recovery(decode))

    def has_prefill(self, decode: Member) -> bool:
        """Return whether a prefill instance exists for the instance, which may accept hand-offs
        only from its own server's.
        """
        return (
            decode.info.own_prefill is None
            or decode.abilities.pulls
            or decode.info.own_prefill in self.members
        )

    def targets(self, name: str = "") -> list[Member]:
        """Return the healthy decode instances that serve this model name, least loaded first; if
        none is healthy, all that are not busy.
        """
        healthy: list[Member] = []
        possible: list[Member] = []
        for member in self.decoders:
            if (name and name not in member.abilities.names) or (
                member.info.own_prefill is not None and not self.has_prefill(member)
            ):
                continue
            if member.is_clear(self.now_s):
                healthy.append(member)
            elif self.is_busy(member):
                continue
            elif self.takes_recovery(member):
                healthy.append(member)
            possible.append(member)
        return healthy or possible

    def assume(self, assumed_link_bytes_per_s: float) -> None:
        """Change the assumed bandwidth of links that are not measured."""
        self.assumed_link = Link(assumed_link_bytes_per_s)
        for link in self.links.values():
            if not link.measured:
                link.bytes_per_s = assumed_link_bytes_per_s

    def link(self, source: NodeId, target: NodeId) -> Link:
        """Return the record of the link, which has the assumed rate until it is measured."""
        found = self.links.get((source, target))
        if found is None:
            found = self.links[source, target] = Link(self.assumed_link.bytes_per_s)
        return found

    def link_from(self, agent: Agent, target: NodeId) -> Link:
        """Return the link from an agent to a node's instances; within the agent's node, the copy
        from host memory once its rate was measured.
        """
        if agent.node == target and (memory := self.links.get((MEMORY, target))) is not None:
            return memory
        return self.link(agent.node, target)

    def restore_bytes_per_s(self, agent: Agent) -> float:
        """Return the rate from an agent's memory to the instances of its node: the measured rate,
        else the configured one.
        """
        memory = self.links.get((MEMORY, agent.node))
        return agent.host_to_device_bytes_per_s if memory is None else memory.bytes_per_s

    def bytes_per_s(self, source: NodeId, target: NodeId) -> float:
        return self.links.get((source, target), self.assumed_link).bytes_per_s

    def agent_on(self, node: NodeId) -> Agent | None:
        return next((agent for agent in self.agents.values() if agent.node == node), None)

    def queueing_delay_s(self, node: NodeId) -> float:
        """Return the queueing delay of a new stream at the node."""
        members = self.by_node.get(node, ())
        decoders = [member.queue_s for member in members if member.abilities.decodes]
        return min(decoders or [member.queue_s for member in members], default=0.0)

    def snapshot(self) -> dict[str, Any]:
        return {
            "instances": [
                {
                    "id": member.id,
                    "node": member.node,
                    "role": member.role.value,
                    "epoch": member.epoch,
                    "queue_s": member.queue_s,
                    "work_s": member.work_s,
                    "running": len(member.running),
                    "decode_streams": member.streams - member.others_reported,
                    "others_reported": member.others_reported,
                    "retained_streams": len(member.held),
                    "drained": member.is_drained,
                    "health": {
                        **member.answers.snapshot(self.now_s),
                        "hung_transfer_s": max(0.0, member.hung_until_s - self.now_s),
                    },
                }
                for member in self.members.values()
            ],
            "agents": [
                {
                    "id": agent.id,
                    "node": agent.node,
                    "epoch": agent.epoch,
                    "capacity_bytes": agent.capacity_bytes,
                    "reserved_bytes": agent.reserved_bytes,
                    "checkpoints": agent.checkpoints,
                    "booked_bytes": agent.booked_bytes,
                    "own_streams": len(agent.streams),
                }
                for agent in self.agents.values()
            ],
            "links": [
                {
                    "source": source,
                    "target": target,
                    "bytes_per_s": link.bytes_per_s,
                    "measured": link.measured,
                    "in_flight_bytes": link.in_flight_bytes,
                }
                for (source, target), link in self.links.items()
            ],
        }

    def _set_ranked(self, member: Member, is_ranked: bool) -> None:
        if is_ranked:
            insort(self.decoders, member, key=_rank)
        else:
            self.decoders.remove(member)
        member.is_ranked = is_ranked


_rank = attrgetter("rank")


def _differ(formats: set[str]) -> bool:
    """Return whether two known hand-off formats differ; an empty format is unknown."""
    return len(formats - {""}) > 1


def agent_of(view: ClusterView, holder: InstanceId) -> Agent | None:
    """Return the agent or the store of this id; None: the holder is an instance."""
    return view.store if holder == view.store.id else view.agents.get(holder)


def have_roles_of(member: Member, others: Sequence[Member]) -> bool:
    """Return whether the other instances together have the roles of the member."""
    return (not member.abilities.prefills or any(each.abilities.prefills for each in others)) and (
        not member.abilities.decodes or any(each.abilities.decodes for each in others)
    )
