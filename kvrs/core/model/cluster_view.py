"""The policy's view of instances, agents and links: reported facts, and bookings of what this proxy
has sent where.

Reports are as old as the last poll; bookings count at once. A queue, and the bytes reserved at an
agent, are the larger of the two, because each misses part of what the other counts.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any

from kvrs.core.model import events as ev
from kvrs.core.model.member import LONGEST_PAUSE_S, Health, Member
from kvrs.core.model.prefixes import PrefixIndex, room_tokens
from kvrs.core.model.sent_work import SentWork
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import MEMORY, STORE, AgentInfo, AgentReport
from kvrs.protocol.rows import NO_ROWS, RowsReport

_LOAD_PAUSE_S = 0.5

_place, _streams = attrgetter("place"), attrgetter("streams")


@dataclass(slots=True, eq=False)
class Agent:
    """The agent of one node: what its watch knows of it, and a row of the load table of LUMEN
    section 4.2. Nothing is booked there while it is not up.
    """

    id: InstanceId
    node: NodeId
    # As of the last `HolderUp`.
    epoch: int = 0
    capacity_bytes: int = 0
    host_to_device_bytes_per_s: float = 0.0
    reported_bytes: int = 0  # Reserved by the streams of all proxies.
    reported_checkpoints: int = 0
    # For streams of this proxy, from the moment at which the place is chosen.
    booked_bytes: int = 0
    booked_of: Counter[NodeId] = field(default_factory=Counter)  # By the node that decodes.
    # Streams that have a checkpoint here, or are to have one.
    streams: set[StreamId] = field(default_factory=set)
    rows: RowsReport = NO_ROWS
    # As its watch sees it.
    health: Health = Health.STARTING
    reason: str | None = None
    info: AgentInfo | None = None
    report: AgentReport | None = None  # The last one; none while it is not up.
    beat_s: float = -inf  # When its last heartbeat came.
    cache_bit: int = 0  # As of `Member`, in the index of what agents store.
    bytes_per_token: int = 0  # Of the KV that is stored; 0: not known.
    caches: bool = True
    # Loads of new prompts that it has not brought, in a row, and until when none is asked for.
    failed_loads: int = 0
    no_loads_until_s: float = -inf

    def begin(self, up: ev.HolderUp) -> "Agent":
        """A process of it has come up; what was booked at the one before is gone."""
        assert not self.streams, self.id
        assert not self.booked_bytes, self.id
        self.epoch, self.capacity_bytes = up.epoch, up.capacity_bytes
        self.host_to_device_bytes_per_s = up.host_to_device_bytes_per_s
        self.reported_bytes = self.reported_checkpoints = 0
        return self

    def lose(self, cause: str) -> None:
        """It is not used any more."""
        self.health, self.reason, self.report = Health.DOWN, cause, None

    def note_load(self, began_s: float, now_s: float, *, has_failed: bool) -> None:
        """It has brought the beginning of a new prompt, or not. It is asked again after a pause,
        which doubles with each failure but those of loads that had begun before it.
        """
        if not has_failed:
            self.failed_loads, self.no_loads_until_s = 0, -inf
        elif began_s >= self.no_loads_until_s:
            pause_s = _LOAD_PAUSE_S * 2.0 ** min(self.failed_loads, 16)
            self.no_loads_until_s = now_s + min(LONGEST_PAUSE_S, pause_s)
            self.failed_loads += 1

    @property
    def reserved_bytes(self) -> int:
        return max(self.booked_bytes, self.reported_bytes)

    @property
    def room_tokens(self) -> int:
        """Tokens of which it has room for the KV; 0: not known."""
        return self.capacity_bytes // self.bytes_per_token if self.bytes_per_token else 0

    @property
    def checkpoints(self) -> int:
        return max(len(self.streams), self.reported_checkpoints)

    def has_room(self, need_bytes: int) -> bool:
        return self.reserved_bytes + need_bytes <= self.capacity_bytes


@dataclass(slots=True, eq=False)
class Link:
    bytes_per_s: float
    measured: bool = False
    in_flight_bytes: int = 0  # Requested for this proxy's streams and not known to have arrived.

    def measure(self, bytes_per_s: float) -> None:
        if bytes_per_s > 0:
            self.bytes_per_s, self.measured = bytes_per_s, True


class PrefillOrder:
    """Those that are not drained, sorted by predicted work, then by the streams of the least loaded
    decode instance beside them, then by id.

    What changes is noted by node, and put in its place when the order is asked for.
    """

    def __init__(self, by_node: Mapping[NodeId, Sequence[Member]]) -> None:
        self.members: list[Member] = []  # As the order was when it was last asked for.
        self._by_node = by_node
        # Nodes of whose instances the work, the streams or the pairs have changed.
        self.changed: dict[NodeId, None] = {}
        # Decode instances that may be kept from some streams, each until it is found that it is
        # not.
        self.restricted: dict[Member, None] = {}

    def add(self, member: Member) -> None:
        member.is_placed = True
        insort(self.members, member, key=_place)
        self.changed[member.node] = None

    def remove(self, member: Member) -> None:
        member.is_placed = False
        del self.members[self._index(member)]

    def note_queue(self, member: Member, reported_s: float) -> None:
        """Any instance reports the wait of what comes there."""
        member.note_queue(reported_s)
        self.changed[member.node] = None

    def restrict(self, member: Member) -> None:
        """It has asked for a pause."""
        self.restricted[member] = None

    def has_restricted(self) -> bool:
        """A stream may find that none of a node's decode instances takes it."""
        for member in [*self.restricted]:
            if member.answers.busy_until_s is None:
                del self.restricted[member]
        return bool(self.restricted)

    def least_first(self) -> list[Member]:
        """To be read only, and before anything changes."""
        for node in self.changed:
            least: dict[int, int] = {}  # Instances of a node share lists of their pairs.
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
        self.store = Agent(InstanceId(STORE), STORE)  # Those of all engines that have one.
        # From the first to the second node, as far as they were asked for by `link`.
        self.links: dict[tuple[NodeId, NodeId], Link] = {}
        self.assumed_link = Link(assumed_link_bytes_per_s)
        self.now_s = 0.0  # Of the event that is being handled.
        # Some decode instances compute other tokens than others.
        self.tokens_differ = False
        # NIXL can carry no hand-off between some instances.
        self.formats_differ = False
        # Sorted by rank, so that the least loaded are found without a search.
        self.decoders: list[Member] = []  # That are not drained, the least loaded first.
        self.by_node: dict[NodeId, list[Member]] = {}
        self.prefill_order = PrefillOrder(self.by_node)
        self.prefillers = self.prefill_order.members  # That are not drained, in any order.
        self.work = SentWork(self.prefill_order.changed)
        self.prefixes = PrefixIndex[Member](room_tokens)
        self.stored = PrefixIndex[Agent](attrgetter("room_tokens"))
        self._leaving: dict[InstanceId, Member] = {}  # That must drain, or are drained.

    def add(self, member: Member) -> Member:
        assert member.id not in self.members, member.id
        self.members[member.id] = member
        self.by_node.setdefault(member.node, []).append(member)
        if member.decodes:
            self._set_ranked(member, True)
        if member.prefills:
            self.prefill_order.add(member)
        self.formats_differ = _differ(each.hand_off_format for each in self.members.values())
        self.update(member)
        return member

    def set_self_tested(self, member: Member, event: ev.InstanceUp | ev.SelfTested) -> None:
        member.moves_kv, member.tokens, member.weights = event.moves_kv, event.tokens, event.weights
        member.restores = event.moves_kv if event.restores is None else event.restores
        if not member.has_tier and (store := event.store) is not None:
            member.set_rows(store.namespace, in_store=True)
            member.restores, member.store_share = store.restores, store.share
        elif member.in_store:
            member.set_rows("")
        self._compare_tokens()
        self.update(member)

    def remove(self, member: Member) -> None:
        self.work.note_prompts(member, 0)
        self.prefixes.lost(member)
        del self.members[member.id]
        self.by_node[member.node].remove(member)
        if member.is_ranked:
            self._set_ranked(member, False)
        if member.is_placed:
            self.prefill_order.remove(member)
        self._leaving.pop(member.id, None)
        if member.tokens or member.weights:
            self._compare_tokens()
        self.formats_differ = _differ(each.hand_off_format for each in self.members.values())
        self._update(member.node)

    def update(self, changed: Member) -> None:
        """After a change of a member's facts, or of a reason to drain it."""
        if changed.must_drain:
            self._leaving[changed.id] = changed
        self._update(changed.node)

    def _update(self, changed: NodeId) -> None:
        if self._leaving:
            self._update_drained()
        self._update_pairs(changed)

    def _compare_tokens(self) -> None:
        members = self.members.values()
        tokens = {member.tokens for member in members if member.decodes and member.tokens}
        self.tokens_differ = len(tokens) > 1
        kinds = Counter(member.weights for member in members if member.decodes and member.weights)
        (most, count), *others = [*kinds.most_common(2), ("", 0)][:2]
        has_majority = not others or count > others[0][1]
        for member in members:
            is_minority = has_majority and bool(member.weights) and member.weights != most
            if is_minority != member.is_minority:
                member.is_minority = is_minority
                self.prefill_order.restrict(member)

    def _update_drained(self) -> None:
        """An instance is drained only if another healthy one has its role; if all are degraded,
        none is drained. One that is to end counts also one that re-forms as healthy: that will
        serve.
        """
        members = self.members.values()
        healthy = [each for each in members if not each.must_drain]
        lasting = [each for each in members if not each.is_to_end]
        for member in [*self._leaving.values()]:
            others = lasting if member.is_to_end else healthy
            is_drained = member.must_drain and have_roles_of(member, others)
            if is_drained != member.is_drained:
                member.is_drained = is_drained
                if member.decodes:
                    self._set_ranked(member, not is_drained)
                if is_drained and member.is_placed:
                    self.prefill_order.remove(member)
                elif not is_drained and member.prefills:
                    self.prefill_order.add(member)
                self._update_pairs(member.node)
            if not member.must_drain:
                del self._leaving[member.id]

    def _update_pairs(self, node: NodeId) -> None:
        there = self.by_node[node]
        decoders = [each for each in there if each.decodes and not each.is_drained]
        are_free = not self.formats_differ and all(
            each.pulls or each.own_prefill is None for each in decoders
        )
        for prefill in there:
            if prefill.prefills:
                prefill.own_decoders = (
                    decoders
                    if are_free
                    else [member for member in decoders if member.takes_from(prefill)]
                )
        self.prefill_order.changed[node] = None

    def count_stream(self, member: Member, change: int) -> None:
        """Keep the order of the decode instances while one gains or loses streams."""
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

    def takes_start(self, member: Member) -> bool:
        """The answers of the instance allow a new request."""
        health = member.answers
        if member.is_minority:
            return False
        # Open, or due for a probe and none runs.
        if health.until_s is not None and (health.probe is not None or self.now_s < health.until_s):
            return False
        return not health.awaited or not health.is_overdue(self.now_s, member.reported_queue_s)

    def takes_recovery(self, member: Member) -> bool:
        """The answers of the instance allow an interrupted stream, which is never a probe."""
        health = member.answers
        if health.is_ejected:
            return False
        if health.until_s is not None and self.now_s < health.until_s:
            return False
        return not health.awaited or not health.is_overdue(self.now_s, member.reported_queue_s)

    def is_busy(self, member: Member) -> bool:
        """The instance has asked for a pause that is not over: nothing goes there."""
        return member.answers.is_busy(self.now_s)

    def is_healthy(self, decode: Member) -> bool:
        """An interrupted stream should go on there."""
        has_prefill = decode.own_prefill is None or self.has_prefill(decode)
        return has_prefill and (decode.is_clear(self.now_s) or self.takes_recovery(decode))

    def has_prefill(self, decode: Member) -> bool:
        """A history can be computed for the instance: without its own server's prefill instance, an
        instance that takes no other hand-off has none.
        """
        return decode.own_prefill is None or decode.pulls or decode.own_prefill in self.members

    def targets(self, name: str = "") -> list[Member]:
        """Where a stream of this name can go on: the healthy decode instances that serve it, least
        loaded first. Where none answers well, all that are not busy.
        """
        healthy: list[Member] = []
        possible: list[Member] = []
        for member in self.decoders:
            if (name and name not in member.names) or (
                member.own_prefill is not None and not self.has_prefill(member)
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

    def reload(self, assumed_link_bytes_per_s: float) -> None:
        """Assume another bandwidth of the links that are not measured."""
        self.assumed_link = Link(assumed_link_bytes_per_s)
        for link in self.links.values():
            if not link.measured:
                link.bytes_per_s = assumed_link_bytes_per_s

    def link(self, source: NodeId, target: NodeId) -> Link:
        """The record of the link, with the assumed rate until it is measured."""
        found = self.links.get((source, target))
        if found is None:
            found = self.links[source, target] = Link(self.assumed_link.bytes_per_s)
        return found

    def link_from(self, agent: Agent, target: NodeId) -> Link:
        """The link on which instances of a node get an agent's pages: within the node its memory,
        once that was measured.
        """
        if agent.node == target and (memory := self.links.get((MEMORY, target))) is not None:
            return memory
        return self.link(agent.node, target)

    def restore_bytes_per_s(self, agent: Agent) -> float:
        """From an agent's memory into the instances of its node: as measured, or as set."""
        memory = self.links.get((MEMORY, agent.node))
        return agent.host_to_device_bytes_per_s if memory is None else memory.bytes_per_s

    def bytes_per_s(self, source: NodeId, target: NodeId) -> float:
        return self.links.get((source, target), self.assumed_link).bytes_per_s

    def agent_on(self, node: NodeId) -> Agent | None:
        return next((agent for agent in self.agents.values() if agent.node == node), None)

    def queueing_delay_s(self, node: NodeId) -> float:
        """The wait of a stream that came to this node now."""
        members = self.by_node.get(node, ())
        decoders = [member.queue_s for member in members if member.decodes]
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
                    "health": member.answers.snapshot(self.now_s),
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


def _differ(formats: Iterable[str]) -> bool:
    """Two of these formats of hand-offs are known and differ."""
    return len({*formats} - {""}) > 1


def agent_of(view: ClusterView, holder: InstanceId) -> Agent | None:
    """The agent, or the store, of this id; None: it is an instance."""
    return view.store if holder == view.store.id else view.agents.get(holder)


def have_roles_of(member: Member, others: Sequence[Member]) -> bool:
    """These instances together have the roles of one."""
    return (not member.prefills or any(each.prefills for each in others)) and (
        not member.decodes or any(each.decodes for each in others)
    )
