"""The policy's view of instances, agents and links: reported facts, and bookings of what this proxy
has sent where.

Reports are as old as the last poll; bookings count at once. A queue, and the bytes reserved at an
agent, are the larger of the two, because each misses part of what the other counts.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any

from kvrs.core.model import events as ev
from kvrs.core.model.health import UNANSWERED_S, AnswerHealth
from kvrs.core.model.reports import PredictedReforming
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import MEMORY, Capability, InstanceInfo, LoadReport, Role


@dataclass(slots=True, eq=False)
class Member:
    """One epoch of one instance; its next epoch is another member."""

    info: InstanceInfo
    full_prefill: PrefillTable  # With all its ranks.
    # KV really comes to it, or from it. False until a self-test has seen that, where there are any.
    moves_kv: bool = True
    restores: bool = True  # KV really comes to it from agents.
    # Instances with equal names go on exactly where another one was cut. Empty: not known.
    tokens: str = ""
    told: LoadReport | None = None  # Its last report that changed a decision.
    reported_queue_s: float = 0.0
    work_s: float = 0.0  # Predicted compute time of what was sent there and has no answer yet.
    queue_s: float = 0.0  # The larger of the two.
    bookings: int = 0
    # Streams that decode there or will after their prefill, those of all other proxies included.
    streams: int = 0
    others_reported: int = 0  # Streams of other proxies, by its last report.
    # Streams of which the current stage, or the only call, runs there.
    running: set[StreamId] = field(default_factory=set)
    held: set[StreamId] = field(default_factory=set)  # Streams of which it retains or caches pages.
    gpu_degraded: bool = False  # By the settings, for this state of its GPU it is to be drained.
    draining: bool = False  # The process has reported that it is about to end.
    drain_ordered: bool = False  # By an operator.
    reforming: PredictedReforming | None = None  # It computes nothing until it has other ranks.
    is_drained: bool = False  # For any of these it gets nothing new: others have its role.
    # Decoding with fewer ranks than it was configured with takes so much longer per token.
    slower_token_s: float = 0.0
    prefill_factor: float = 1.0  # Of its prefill table, for the same reason.
    # A suspected stream that runs there, or will, with no other that waits for its first token.
    quarantined_for: StreamId | None = None
    quarantined_until_s: float = -inf  # Till then also if there is no other instance of its role.
    health: AnswerHealth = field(default_factory=AnswerHealth)
    # What every decision uses of `info`, looked up once.
    id: InstanceId = field(init=False)
    node: NodeId = field(init=False)
    prefills: bool = field(init=False)
    decodes: bool = field(init=False)
    pulls: bool = field(init=False)
    retains: bool = field(init=False)
    caches: bool = field(init=False)
    splits: bool = field(init=False)
    checkpoints: bool = field(init=False)
    replays: bool = field(init=False)
    computes_prompts: bool = field(init=False)
    own_prefill: InstanceId | None = field(init=False)
    names: tuple[str, ...] = field(init=False)  # Of models, aliases and adapters that it serves.
    page_bytes: int = field(init=False)
    page_size_tokens: int = field(init=False)
    bytes_per_token: int = field(init=False)
    prefill: PrefillTable = field(init=False)  # With the ranks that it has.
    # The order of decode instances: by streams, then by id.
    rank: tuple[int, InstanceId] = field(init=False)
    # Decode instances of its node that are not drained and can have its hand-offs.
    own_decoders: list["Member"] = field(default_factory=list)
    is_ranked: bool = False  # Among the decode instances that are not drained.

    def __post_init__(self) -> None:
        self.prefill = self.full_prefill
        self.set_info(self.info)
        self.rank = self.streams, self.id

    def set_info(self, info: InstanceInfo) -> None:
        """The same process, with what it says of itself now."""
        capabilities, geometry = info.capabilities, info.geometry
        self.info, self.id, self.node = info, info.id, info.node
        self.prefills = info.role is not Role.DECODE
        self.decodes = info.role is not Role.PREFILL
        self.pulls = Capability.PULL_PAGES in capabilities
        self.retains = Capability.RETAIN in capabilities
        self.caches = Capability.PREFIX_CACHE in capabilities
        self.splits = self.pulls and Capability.SPLIT in capabilities
        self.checkpoints = Capability.CHECKPOINT in capabilities
        self.replays = Capability.REPLAY in capabilities
        self.computes_prompts = info.computes_prompts and info.role is Role.DECODE
        self.own_prefill, self.names = info.own_prefill, info.name_keys
        self.page_bytes = geometry.page_bytes
        self.page_size_tokens = geometry.page_size_tokens
        self.bytes_per_token = geometry.bytes_per_token

    @property
    def is_to_end(self) -> bool:
        """The instance is to be left for good, as far as is known."""
        return self.gpu_degraded or self.draining or self.drain_ordered

    @property
    def must_drain(self) -> bool:
        """Nothing new is to go there while another instance has its role."""
        return self.is_to_end or self.reforming is not None

    def has_lost_cells(self, stream: StreamId) -> bool:
        """It re-forms, and pages of the stream there are not whole until it has restored them."""
        return self.reforming is not None and self.reforming.pages_of(stream)[0] > 0

    def note_queue(self, reported_s: float) -> None:
        self.reported_queue_s, self.queue_s = reported_s, max(reported_s, self.work_s)

    def is_clear(self, now_s: float) -> bool:
        """Fast path: no health restriction applies, the instance is open for new requests and for
        recoveries, and not busy.
        """
        health = self.health
        return (
            health.until_s is None
            and health.busy_until_s is None
            and self.quarantined_for is None
            and not health.is_ejected
            and (
                not health.awaited
                or now_s - health.awaited_from_s <= UNANSWERED_S
                or now_s - health.answered_s <= UNANSWERED_S
            )
        )

    def set_pace(self, decode_factor: float, prefill_factor: float, token_s: float) -> None:
        """It takes so many times as long as with all its ranks, at `token_s` per token now or
        before.
        """
        self.slower_token_s = max(0.0, decode_factor - 1) * token_s
        if prefill_factor != self.prefill_factor:
            self.prefill_factor = prefill_factor
            self.prefill = self.full_prefill
            if prefill_factor != 1.0:
                self.prefill = self.full_prefill.scaled(prefill_factor)

    def takes_from(self, prefill: "Member") -> bool:
        """A prefill there can be handed off to this instance. A server that pulls no pages takes
        hand-offs from its own prefill instance only.
        """
        return self.pulls or self.own_prefill is None or self.own_prefill == prefill.id

    def continues(self, tokens: str) -> bool:
        """The instance goes on exactly with the output of one that computes `tokens`, as far as is
        known.
        """
        return not tokens or self.tokens in ("", tokens)


@dataclass(slots=True, eq=False)
class Agent:
    """One epoch of the agent of one node: a row of the load table of LUMEN section 4.2."""

    id: InstanceId
    node: NodeId
    epoch: int
    capacity_bytes: int
    host_to_device_bytes_per_s: float
    reported_bytes: int = 0  # Reserved by the streams of all proxies.
    reported_checkpoints: int = 0
    # For streams of this proxy, from the moment at which the place is chosen.
    booked_bytes: int = 0
    booked_of: Counter[NodeId] = field(default_factory=Counter)  # By the node that decodes.
    # Streams that have a checkpoint here, or are to have one.
    streams: set[StreamId] = field(default_factory=set)

    @property
    def reserved_bytes(self) -> int:
        return max(self.booked_bytes, self.reported_bytes)

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


class ClientWork:
    """Predicted compute time of what each client has sent and has no answer yet, and at which
    instances.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._bookings: dict[str, int] = {}

    def book(self, client: str, member: Member, seconds: float) -> None:
        member.work_s += seconds
        member.queue_s = max(member.work_s, member.reported_queue_s)
        member.bookings += 1
        self._seconds[client] = self._seconds.get(client, 0.0) + seconds
        self._bookings[client] = self._bookings.get(client, 0) + 1

    def unbook(self, client: str, member: Member, seconds: float) -> None:
        member.bookings -= 1
        # Without bookings exactly zero: a rounding error would decide between idle instances.
        member.work_s = max(0.0, member.work_s - seconds) if member.bookings else 0.0
        member.queue_s = max(member.work_s, member.reported_queue_s)
        self._bookings[client] -= 1
        if self._bookings[client]:
            self._seconds[client] -= seconds
        else:
            del self._bookings[client], self._seconds[client]

    def of(self, client: str) -> float:
        return self._seconds.get(client, 0.0)

    def clients_with(self, client: str) -> int:
        """How many clients there are, this one included."""
        return len(self._seconds) + (client not in self._seconds)


class ClusterView:
    def __init__(self, assumed_link_bytes_per_s: float) -> None:
        self.work = ClientWork()
        self.members: dict[InstanceId, Member] = {}
        self.agents: dict[InstanceId, Agent] = {}
        self.links: dict[tuple[NodeId, NodeId], Link] = {}
        self.now_s = 0.0  # Of the event that is being handled.
        self._assumed_link_bytes_per_s = assumed_link_bytes_per_s
        # Some decode instances compute other tokens than others.
        self.tokens_differ = False
        # Sorted by rank, so that the least loaded are found without a search.
        self.decoders: list[Member] = []  # That are not drained, the least loaded first.
        self.prefillers: list[Member] = []  # That are not drained.
        self.by_node: dict[NodeId, list[Member]] = {}
        self._leaving: dict[InstanceId, Member] = {}  # That must drain, or are drained.

    def add(self, info: InstanceInfo, prefill: PrefillTable | None = None) -> Member:
        """`prefill`: its table; None: that which it has measured itself."""
        assert info.id not in self.members, info.id
        table = prefill or PrefillTable.from_measured(info.prefill)
        member = self.members[info.id] = Member(info, table)
        self.by_node.setdefault(info.node, []).append(member)
        if member.decodes:
            self._set_ranked(member, True)
        self.update(member)
        return member

    def set_self_tested(self, member: Member, event: ev.InstanceUp | ev.SelfTested) -> None:
        member.moves_kv, member.tokens = event.moves_kv, event.tokens
        member.restores = event.moves_kv if event.restores is None else event.restores
        self._compare_tokens()
        self.update(member)

    def remove(self, member: Member) -> None:
        del self.members[member.id]
        self.by_node[member.node].remove(member)
        if member.is_ranked:
            self._set_ranked(member, False)
        self._leaving.pop(member.id, None)
        if member.tokens:
            self._compare_tokens()
        self._update(member.node)

    def update(self, changed: Member) -> None:
        """After a change of a member's facts, or of a reason to drain it."""
        if changed.must_drain:
            self._leaving[changed.id] = changed
        self._update(changed.node)

    def _update(self, changed: NodeId) -> None:
        if self._leaving:
            self._update_drained()
        members = self.members.values()
        self.prefillers = [each for each in members if each.prefills and not each.is_drained]
        self._update_pairs(changed)

    def _compare_tokens(self) -> None:
        members = self.members.values()
        kinds = {member.tokens for member in members if member.decodes and member.tokens}
        self.tokens_differ = len(kinds) > 1

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
                self._update_pairs(member.node)
            if not member.must_drain:
                del self._leaving[member.id]

    def _update_pairs(self, node: NodeId) -> None:
        there = self.by_node[node]
        for prefill in there:
            if prefill.prefills:
                prefill.own_decoders = [
                    member
                    for member in there
                    if member.decodes and not member.is_drained and member.takes_from(prefill)
                ]

    def count_stream(self, member: Member, change: int) -> None:
        """Keep the order of the decode instances while one gains or loses streams."""
        decoders = self.decoders
        at = bisect_left(decoders, member.rank, key=_rank) if member.is_ranked else None
        assert at is None or decoders[at] is member, member
        member.streams += change
        member.rank = member.streams, member.id
        if at is None:
            return
        beside = at + 1 if change > 0 else at - 1
        if 0 <= beside < len(decoders) and (decoders[beside].rank < member.rank) is (change > 0):
            del decoders[at]
            insort(decoders, member, key=_rank)

    def takes_start(self, member: Member) -> bool:
        """The answers of the instance allow a new request."""
        health = member.health
        if member.quarantined_for is not None:
            return False
        # Open, or due for a probe and none runs.
        if health.until_s is not None and (health.probe is not None or self.now_s < health.until_s):
            return False
        return not health.awaited or not health.is_overdue(self.now_s, member.reported_queue_s)

    def takes_recovery(self, member: Member) -> bool:
        """The answers of the instance allow an interrupted stream, which is never a probe."""
        health = member.health
        if member.quarantined_for is not None or health.is_ejected:
            return False
        if health.until_s is not None and self.now_s < health.until_s:
            return False
        return not health.awaited or not health.is_overdue(self.now_s, member.reported_queue_s)

    def is_busy(self, member: Member) -> bool:
        """The instance has asked for a pause that is not over: nothing goes there."""
        return member.health.is_busy(self.now_s)

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
        self._assumed_link_bytes_per_s = assumed_link_bytes_per_s
        for link in self.links.values():
            if not link.measured:
                link.bytes_per_s = assumed_link_bytes_per_s

    def link(self, source: NodeId, target: NodeId) -> Link:
        found = self.links.get((source, target))
        if found is None:
            found = self.links[source, target] = Link(self._assumed_link_bytes_per_s)
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
        found = self.links.get((source, target))
        return self._assumed_link_bytes_per_s if found is None else found.bytes_per_s

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
                    "role": member.info.role.value,
                    "epoch": member.info.epoch,
                    "queue_s": member.queue_s,
                    "work_s": member.work_s,
                    "running": len(member.running),
                    "decode_streams": member.streams - member.others_reported,
                    "others_reported": member.others_reported,
                    "retained_streams": len(member.held),
                    "drained": member.is_drained,
                    "quarantined_for": member.quarantined_for,
                    "health": member.health.snapshot(self.now_s),
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


def have_roles_of(member: Member, others: Sequence[Member]) -> bool:
    """These instances together have the roles of one."""
    return (not member.prefills or any(each.prefills for each in others)) and (
        not member.decodes or any(each.decodes for each in others)
    )
