"""The member table: one entry per node that was ever heard of and is not forgotten, this node among them."""

from bisect import bisect_right, insort
from collections.abc import Callable

from kvrs.gossip.records import Record
from kvrs.gossip.wire import Known, Statement, Status, known_bytes, statement_bytes
from kvrs.ids import NodeId

Random = Callable[[], float]  # Uniform in [0, 1).


class Member:
    """What is held of one node. `statement` and `known` are made when they are needed and kept until something changes."""

    __slots__ = ("_known", "_statement", "address", "by", "epoch", "id", "incarnation", "since_s", "status", "stored")

    def __init__(self, statement: Statement, since_s: float) -> None:
        self.id = statement.id
        self.stored: Record | None = None
        self.set(statement, since_s)

    def set(self, statement: Statement, since_s: float) -> None:
        self.address = statement.address
        self.epoch = statement.epoch
        self.incarnation = statement.incarnation
        self.status = statement.status
        self.by = statement.by
        self.since_s = since_s
        self._statement: tuple[Statement, int] | None = None
        self._known: tuple[Known, int] | None = None

    def newer(self, epoch: int, incarnation: int, status: Status) -> bool:
        """Whether that is newer than what is held."""
        if epoch != self.epoch:
            return epoch > self.epoch
        if incarnation != self.incarnation:
            return incarnation > self.incarnation
        return status > self.status

    def newer_than(self, known: Known) -> bool:
        """Whether what is held is newer than that."""
        return (self.epoch, self.incarnation, self.status) > (known.epoch, known.incarnation, known.status)

    @property
    def reachable(self) -> bool:
        return self.status <= Status.SUSPECT

    def statement(self) -> tuple[Statement, int]:
        """And its size."""
        if self._statement is None:
            made = Statement(self.id, self.epoch, self.incarnation, self.status, self.address, self.by)
            self._statement = made, statement_bytes(made)
        return self._statement

    def known(self) -> tuple[Known, int]:
        """And its size."""
        if self._known is None:
            record = self.stored
            version, floor = (record.version, record.floor) if record else (0, 0)
            made = Known(self.id, self.epoch, self.incarnation, self.status, version, floor)
            self._known = made, known_bytes(made)
        return self._known

    def record_changed(self) -> None:
        self._known = None


class Members:
    """All of them by id, and those that can be talked to in a list, so that one is drawn in constant time."""

    def __init__(self, me: Member, random: Random) -> None:
        self._me = me.id
        self._random = random
        self.table: dict[NodeId, Member] = {me.id: me}
        self.ids: list[NodeId] = [me.id]  # Sorted: a digest covers a range.
        self.peers: list[Member] = []  # Alive or suspected, without this node.
        self._place: dict[NodeId, int] = {}
        self._round: list[Member] = []  # Whom this round of probes has still before it.

    def add(self, member: Member) -> None:
        self.table[member.id] = member
        insort(self.ids, member.id)
        self.sort_in(member)
        if member.reachable:
            # A newcomer is probed at a random place of the round that is under way (SWIM, section 4.3).
            self._round.insert(int(self._random() * (len(self._round) + 1)), member)

    def remove(self, member: Member) -> None:
        assert not member.reachable
        del self.table[member.id]
        self.ids.remove(member.id)

    def sort_in(self, member: Member) -> None:
        """After a change of status: whether it is among the peers."""
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
        """Up to `count` different ones, none of `but`."""
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
        """Round robin in an order that is drawn anew every round, so that nobody waits longer than two rounds."""
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
        """Ids in (after, until]; an empty bound is none."""
        first = bisect_right(self.ids, after) if after else 0
        last = bisect_right(self.ids, until) if until else len(self.ids)
        return self.ids[first:last]
