"""The member table: one entry per known node, with this node."""

from bisect import bisect_right, insort
from collections.abc import Callable

from kvrs.gossip.records import FactRecord
from kvrs.gossip.wire import KnownMember, MemberUpdate, Status, known_member_bytes, update_bytes
from kvrs.ids import NodeId

Random = Callable[[], float]  # Uniform in [0, 1).


class Member:
    """State of one node. `update` and `known` are built on demand and cached until a change."""

    __slots__ = (
        "_known",
        "_update",
        "address",
        "epoch",
        "id",
        "incarnation",
        "since_s",
        "status",
        "stored",
        "suspectors",
    )

    def __init__(self, update: MemberUpdate, since_s: float) -> None:
        self.id = update.id
        self.stored: FactRecord | None = None
        self.set(update, since_s)

    def set(self, update: MemberUpdate, since_s: float) -> None:
        self.address = update.address
        self.epoch = update.epoch
        self.incarnation = update.incarnation
        self.status = update.status
        self.suspectors = update.suspectors
        self.since_s = since_s
        self._update: tuple[MemberUpdate, int] | None = None
        self._known: tuple[KnownMember, int] | None = None

    def is_superseded_by(self, epoch: int, incarnation: int, status: Status) -> bool:
        """The given state is newer than this member's."""
        if epoch != self.epoch:
            return epoch > self.epoch
        if incarnation != self.incarnation:
            return incarnation > self.incarnation
        return status > self.status

    def is_newer_than(self, known: KnownMember) -> bool:
        """The state of this member is newer than the digest entry."""
        return (self.epoch, self.incarnation, self.status) > (
            known.epoch,
            known.incarnation,
            known.status,
        )

    @property
    def reachable(self) -> bool:
        return self.status <= Status.SUSPECT

    def update(self) -> tuple[MemberUpdate, int]:
        """The state as an update, and its size in bytes."""
        if self._update is None:
            made = MemberUpdate(
                self.id, self.epoch, self.incarnation, self.status, self.address, self.suspectors
            )
            self._update = made, update_bytes(made)
        return self._update

    def known(self) -> tuple[KnownMember, int]:
        """The digest entry, and its size in bytes."""
        if self._known is None:
            record = self.stored
            version, floor = (record.version, record.floor) if record else (0, 0)
            made = KnownMember(self.id, self.epoch, self.incarnation, self.status, version, floor)
            self._known = made, known_member_bytes(made)
        return self._known

    def record_changed(self) -> None:
        self._known = None


class Members:
    """Members by id, and the reachable ones in a list, so that one is drawn in constant time."""

    def __init__(self, me: Member, random: Random) -> None:
        self._me = me.id
        self._random = random
        self.table: dict[NodeId, Member] = {me.id: me}
        self.ids: list[NodeId] = [me.id]  # Sorted: a digest covers a range.
        self.peers: list[Member] = []  # Alive or suspected, without this node.
        self._place: dict[NodeId, int] = {}
        self._round: list[Member] = []  # Members that are still to be probed in this round.

    def add(self, member: Member) -> None:
        self.table[member.id] = member
        insort(self.ids, member.id)
        self.on_status(member)
        if member.reachable:
            # A new member is probed at a random place of the present round (SWIM, section 4.3).
            self._round.insert(int(self._random() * (len(self._round) + 1)), member)

    def remove(self, member: Member) -> None:
        assert not member.reachable
        del self.table[member.id]
        self.ids.remove(member.id)

    def on_status(self, member: Member) -> None:
        """Add the member to the peers or remove it, after a change of its status."""
        place = self._place.get(member.id)
        if member.reachable and place is None:
            self._place[member.id] = len(self.peers)
            self.peers.append(member)
        elif not member.reachable and place is not None:
            last = self.peers.pop()
            del self._place[member.id]
            if last is not member:
                self.peers[place] = last
                self._place[last.id] = place

    def random_peers(self, count: int, but: tuple[NodeId, ...] = ()) -> list[Member]:
        """Up to `count` distinct peers, none of `but`."""
        found = list[Member]()
        peers, random = self.peers, self._random
        if len(peers) <= count + len(but):
            return [member for member in peers if member.id not in but][:count]
        while len(found) < count:
            member = peers[int(random() * len(peers))]
            if member.id not in but and member not in found:
                found.append(member)
        return found

    def next_to_probe(self) -> Member | None:
        """The next target: round robin in an order that is drawn anew every round (SWIM, section
        4.3), so that no member waits longer than two rounds.
        """
        while True:
            while self._round:
                member = self._round.pop()
                if member.reachable and self.table.get(member.id) is member:
                    return member
            if not self.peers:
                return None
            self._round = self.peers.copy()
            for i in range(len(self._round) - 1, 0, -1):
                j = int(self._random() * (i + 1))
                self._round[i], self._round[j] = self._round[j], self._round[i]

    def between(self, after: str, until: str) -> list[NodeId]:
        """Ids in (after, until]; an empty bound is open."""
        first = bisect_right(self.ids, after) if after else 0
        last = bisect_right(self.ids, until) if until else len(self.ids)
        return self.ids[first:last]
