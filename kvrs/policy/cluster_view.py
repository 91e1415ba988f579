"""What the policy believes about instances, agents and links: facts from events, and its own book of what it has asked for.

Reports are as old as the last poll; the book knows at once what this proxy has just sent where. A queue, and what
is reserved at an agent, is taken as the larger of the two, because each misses some of what the other sees.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.policy.costs import Instance
from kvrs.protocol.instance import Capability, Role


@dataclass(slots=True, eq=False)
class Member:
    """One life of one instance; its next epoch is another member."""

    instance: Instance
    reported_queue_s: float = 0.0
    work_s: float = 0.0  # Predicted computing of what was sent there and has not answered yet.
    bookings: int = 0
    streams: int = 0  # Streams that decode there or will after their prefill.
    running: set[StreamId] = field(default_factory=set)  # Streams whose current stage, or whose only call, runs there.
    held: set[StreamId] = field(default_factory=set)  # Streams of which it retains or caches pages.
    is_ailing: bool = False  # Its GPU is, and the settings say that it is to be left.
    is_leaving: bool = False  # This process is about to end.
    is_drained: bool = False  # So it gets nothing new: there are others.
    # What it can do, looked up once: every decision asks.
    prefills: bool = field(init=False)
    decodes: bool = field(init=False)
    pulls: bool = field(init=False)
    retains: bool = field(init=False)
    caches: bool = field(init=False)
    splits: bool = field(init=False)
    checkpoints: bool = field(init=False)
    own_prefill: InstanceId | None = field(init=False)
    page_bytes: int = field(init=False)
    page_size_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.prefills = self.instance.role is not Role.DECODE
        self.decodes = self.instance.role is not Role.PREFILL
        self.pulls = Capability.PULL_PAGES in self.instance.capabilities
        self.retains = Capability.RETAIN in self.instance.capabilities
        self.caches = Capability.PREFIX_CACHE in self.instance.capabilities
        self.splits = self.pulls and Capability.SPLIT in self.instance.capabilities
        self.checkpoints = Capability.CHECKPOINT in self.instance.capabilities
        self.own_prefill = self.instance.own_prefill
        self.page_bytes = self.instance.geometry.page_bytes
        self.page_size_tokens = self.instance.geometry.page_size_tokens

    @property
    def queue_s(self) -> float:
        return self.work_s if self.work_s > self.reported_queue_s else self.reported_queue_s

    @property
    def rank(self) -> tuple[int, InstanceId]:
        return self.streams, self.instance.id

    def takes_from(self, prefill: "Member") -> bool:
        """Whether a prefill there can be handed off to this one. A server that pulls no pages has only its own prefill."""
        return self.pulls or self.own_prefill is None or self.own_prefill == prefill.instance.id

    def book(self, seconds: float) -> None:
        self.work_s += seconds
        self.bookings += 1

    def unbook(self, seconds: float) -> None:
        self.bookings -= 1
        # An empty book is exactly zero: a rest of rounding would decide between idle instances.
        self.work_s = max(0.0, self.work_s - seconds) if self.bookings else 0.0


@dataclass(slots=True, eq=False)
class Agent:
    """One life of the agent of one node: a row of the load table of seed LUMEN, section 4.2."""

    id: InstanceId
    node: NodeId
    epoch: int
    capacity_bytes: int
    host_to_device_bytes_per_s: float
    reported_bytes: int = 0  # Reserved by the streams of all proxies.
    reported_checkpoints: int = 0
    booked_bytes: int = 0  # For streams of this proxy, from the moment at which the place is chosen.
    streams: set[StreamId] = field(default_factory=set)  # That have a checkpoint here, or are to have one.

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
    in_flight_bytes: int = 0  # Asked for on behalf of this proxy's streams and not yet seen to have arrived.


class ClusterView:
    def __init__(self, assumed_link_bytes_per_s: float) -> None:
        self.members: dict[InstanceId, Member] = {}
        self.agents: dict[InstanceId, Agent] = {}
        self.links: dict[tuple[NodeId, NodeId], Link] = {}
        self._assumed_link_bytes_per_s = assumed_link_bytes_per_s
        self._decoders: list[Member] = []  # Sorted by rank, so the least loaded are found without looking at all.
        self._by_node: dict[NodeId, list[Member]] = {}

    def add(self, instance: Instance) -> Member:
        member = Member(instance)
        assert instance.id not in self.members, instance.id
        self.members[instance.id] = member
        self._by_node.setdefault(instance.node, []).append(member)
        if member.decodes:
            insort(self._decoders, member, key=_rank)
        self._drain()
        return member

    def remove(self, member: Member) -> None:
        del self.members[member.instance.id]
        self._by_node[member.instance.node].remove(member)
        if member.decodes and not member.is_drained:
            del self._decoders[self._place(member)]
        self._drain()

    def set_ailing(self, member: Member, is_ailing: bool) -> None:
        member.is_ailing = is_ailing
        self._drain()

    def set_leaving(self, member: Member) -> None:
        member.is_leaving = True
        self._drain()

    def _drain(self) -> None:
        """Nobody is left who cannot be replaced: where all ail, all serve."""
        ailing = [member for member in self.members.values() if member.is_ailing or member.is_leaving or member.is_drained]
        if not ailing:
            return
        well = [member for member in self.members.values() if not member.is_ailing and not member.is_leaving]
        prefill, decode = any(member.prefills for member in well), any(member.decodes for member in well)
        for member in ailing:
            is_left = member.is_ailing or member.is_leaving
            is_drained = is_left and (prefill or not member.prefills) and (decode or not member.decodes)
            if is_drained != member.is_drained and member.decodes:
                if is_drained:
                    del self._decoders[self._place(member)]
                else:
                    insort(self._decoders, member, key=_rank)
            member.is_drained = is_drained

    def is_up(self, member: Member) -> bool:
        return self.members.get(member.instance.id) is member

    def count_stream(self, member: Member, change: int) -> None:
        """Keep the order of the decode instances while one gains or loses a stream."""
        if not member.decodes or member.is_drained or not self.is_up(member):
            member.streams += change
            return
        del self._decoders[self._place(member)]
        member.streams += change
        insort(self._decoders, member, key=_rank)

    def decoders(self) -> list[Member]:
        """Those that are not drained, least loaded first. To be read, not kept."""
        return self._decoders

    def is_whole(self, decode: Member) -> bool:
        """Whether anybody can compute a history for it. What has only the prefill of its own server has nobody without that."""
        return decode.own_prefill is None or decode.pulls or decode.own_prefill in self.members

    def targets(self) -> list[Member]:
        """Where a stream can go on: the decode instances that are whole, least loaded first."""
        return [member for member in self._decoders if member.own_prefill is None or self.is_whole(member)]

    def prefillers(self) -> Iterator[Member]:
        return (member for member in self.members.values() if member.prefills and not member.is_drained)

    def on_node(self, node: NodeId) -> list[Member]:
        return self._by_node.get(node, [])

    def link(self, source: NodeId, target: NodeId) -> Link:
        found = self.links.get((source, target))
        if found is None:
            found = self.links[source, target] = Link(self._assumed_link_bytes_per_s)
        return found

    def bytes_per_s(self, source: NodeId, target: NodeId) -> float:
        found = self.links.get((source, target))
        return self._assumed_link_bytes_per_s if found is None else found.bytes_per_s

    def agent_on(self, node: NodeId) -> Agent | None:
        return next((agent for agent in self.agents.values() if agent.node == node), None)

    def queueing_delay_s(self, node: NodeId) -> float:
        """What a stream that came to this node now would wait."""
        members = self.on_node(node)
        decoders = [member.queue_s for member in members if member.decodes]
        return min(decoders or [member.queue_s for member in members], default=0.0)

    def snapshot(self) -> dict[str, Any]:
        return {
            "instances": [
                {
                    "id": member.instance.id,
                    "node": member.instance.node,
                    "role": member.instance.role.value,
                    "epoch": member.instance.epoch,
                    "queue_s": member.queue_s,
                    "work_s": member.work_s,
                    "running": len(member.running),
                    "decode_streams": member.streams,
                    "retained_streams": len(member.held),
                    "drained": member.is_drained,
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

    def _place(self, member: Member) -> int:
        place = bisect_left(self._decoders, member.rank, key=_rank)
        assert self._decoders[place] is member, member
        return place


def _rank(member: Member) -> tuple[int, InstanceId]:
    return member.rank
