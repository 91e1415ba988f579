"""The prefill instances in the order in which a new stream is sent there, so that few are weighed
however many there are.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from operator import attrgetter

from kvrs.core.model.member import Member
from kvrs.ids import NodeId

_place = attrgetter("place")


class PrefillOrder:
    """Those that are not drained, sorted by predicted work, then by the streams of the least loaded
    decode instance beside them, then by id.

    What changes is noted by node, and put in its place when the order is asked for.
    """

    def __init__(self, by_node: Mapping[NodeId, Sequence[Member]]) -> None:
        self.members: list[Member] = []  # As the order was when it was last asked for.
        self._by_node = by_node
        self._changed: dict[NodeId, None] = {}
        # Decode instances that may be kept from some streams, each until it is found that it is
        # not.
        self._restricted: dict[Member, None] = {}

    def add(self, member: Member) -> None:
        member.is_placed = True
        insort(self.members, member, key=_place)
        self._changed[member.node] = None

    def remove(self, member: Member) -> None:
        member.is_placed = False
        del self.members[self._index(member)]

    def note_queue(self, member: Member, reported_s: float) -> None:
        """Any instance reports the wait of what comes there."""
        member.note_queue(reported_s)
        self._changed[member.node] = None

    def changed(self, node: NodeId) -> None:
        """Work, streams or pairs of instances there have changed."""
        self._changed[node] = None

    def restrict(self, member: Member) -> None:
        """It has asked for a pause, or is reserved for a stream."""
        self._restricted[member] = None

    @property
    def has_restricted(self) -> bool:
        """A stream may find that none of a node's decode instances takes it."""
        for member in [*self._restricted]:
            if member.quarantined_for is None and member.answers.busy_until_s is None:
                del self._restricted[member]
        return bool(self._restricted)

    def least_first(self) -> list[Member]:
        """To be read only, and before anything changes."""
        if self._changed:
            self._sort()
        return self.members

    def _sort(self) -> None:
        for node in self._changed:
            least: dict[int, int] = {}  # Instances of a node share lists of their pairs.
            for member in self._by_node.get(node, ()):
                if not member.is_placed:
                    continue
                pairs = member.own_decoders
                if (streams := least.get(id(pairs))) is None:
                    streams = min([each.streams for each in pairs], default=0)
                    least[id(pairs)] = streams
                place = member.queue_s, streams, member.id
                if place != member.place:
                    del self.members[self._index(member)]
                    member.place = place
                    insort(self.members, member, key=_place)
        self._changed.clear()

    def _index(self, member: Member) -> int:
        at = bisect_left(self.members, member.place, key=_place)
        assert self.members[at] is member, member
        return at
