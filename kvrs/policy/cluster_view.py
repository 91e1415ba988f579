"""What the policy believes about instances and links: facts from events, and its own book of what it has asked for.

Reports are as old as the last poll; the book knows at once what this proxy has just sent where. A queue is taken as
the larger of the two, because each misses some of what the other sees.
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
    running: set[StreamId] = field(default_factory=set)  # Streams whose current stage runs there.
    held: set[StreamId] = field(default_factory=set)  # Streams of which it retains pages.
    # What it can do, looked up once: every decision asks.
    prefills: bool = field(init=False)
    decodes: bool = field(init=False)
    pulls: bool = field(init=False)
    retains: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prefills = self.instance.role is not Role.DECODE
        self.decodes = self.instance.role is not Role.PREFILL
        self.pulls = Capability.PULL_PAGES in self.instance.capabilities
        self.retains = Capability.RETAIN in self.instance.capabilities

    @property
    def queue_s(self) -> float:
        return self.work_s if self.work_s > self.reported_queue_s else self.reported_queue_s

    @property
    def rank(self) -> tuple[int, InstanceId]:
        return self.streams, self.instance.id

    def book(self, seconds: float) -> None:
        self.work_s += seconds
        self.bookings += 1

    def unbook(self, seconds: float) -> None:
        self.bookings -= 1
        # An empty book is exactly zero: a rest of rounding would decide between idle instances.
        self.work_s = max(0.0, self.work_s - seconds) if self.bookings else 0.0


@dataclass(slots=True, eq=False)
class Link:
    bytes_per_s: float
    measured: bool = False
    in_flight_bytes: int = 0  # Asked for by recoveries of this proxy and not yet seen to have arrived.


class ClusterView:
    def __init__(self, assumed_link_bytes_per_s: float) -> None:
        self.members: dict[InstanceId, Member] = {}
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
        return member

    def remove(self, member: Member) -> None:
        del self.members[member.instance.id]
        self._by_node[member.instance.node].remove(member)
        if member.decodes:
            del self._decoders[self._place(member)]

    def is_up(self, member: Member) -> bool:
        return self.members.get(member.instance.id) is member

    def count_stream(self, member: Member, change: int) -> None:
        """Keep the order of the decode instances while one gains or loses a stream."""
        if not (member.decodes and self.is_up(member)):
            member.streams += change
            return
        del self._decoders[self._place(member)]
        member.streams += change
        insort(self._decoders, member, key=_rank)

    def decoders(self) -> list[Member]:
        """Least loaded first. To be read, not kept."""
        return self._decoders

    def prefillers(self) -> Iterator[Member]:
        return (member for member in self.members.values() if member.prefills)

    def on_node(self, node: NodeId) -> list[Member]:
        return self._by_node.get(node, [])

    def link(self, source: NodeId, target: NodeId) -> Link:
        found = self.links.get((source, target))
        if found is None:
            found = self.links[source, target] = Link(self._assumed_link_bytes_per_s)
        return found

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
                }
                for member in self.members.values()
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
