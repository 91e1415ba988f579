"""The member table: one entry per known node, with this node."""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import msgspec

from kvrs.gossip.facts import Fact, FactKind, FactRecord
from kvrs.gossip.wire import KnownMember, MemberUpdate, Status, encoded_bytes
from kvrs.ids import NodeId

Random = Callable[[], float]  # Function that returns random numbers, uniform in [0, 1).


class Member:
    """Known state of one node: its newest update, the copy of its record, and the digest entry of
    both.
    """

    def __init__(self, update: MemberUpdate, since_s: float) -> None:
        self.id = update.id
        self.record: FactRecord | None = None
        self.set(update, since_s)

    def set(self, update: MemberUpdate, since_s: float) -> None:
        self.update, self.since_s = update, since_s
        self.update_bytes = encoded_bytes(update)
        self.state = self.epoch, self.incarnation, self.status = update.state
        self.address, self.suspectors = update.address, update.suspectors
        self._known: tuple[KnownMember, int] | None = None

    @property
    def reachable(self) -> bool:
        return self.status <= Status.SUSPECT

    def known(self) -> tuple[KnownMember, int]:
        """Return the member's digest entry and its size in bytes; computed once per change."""
        if self._known is None:
            record = self.record
            version, floor = (record.version, record.floor) if record else (0, 0)
            made = KnownMember(self.id, *self.state, version, floor)
            self._known = made, encoded_bytes(made)
        return self._known

    def record_changed(self) -> None:
        self._known = None


class Members:
    """Members by id, and the reachable ones in a list, so that one is drawn in constant time."""

    def __init__(self, me: Member, random: Random) -> None:
        self._random = random
        self.table: dict[NodeId, Member] = {me.id: me}
        # Ids of all members, sorted, because a digest covers a range of ids.
        self.ids: list[NodeId] = [me.id]
        self.peers: list[Member] = []  # Members that are alive or suspect, without this node.
        self._round: list[Member] = []  # Members that are still to be probed in the present round.

    def add(self, member: Member) -> None:
        self.table[member.id] = member
        insort(self.ids, member.id)
        if member.reachable:
            self.peers.append(member)
            # A new member is probed at a random place of the present round (SWIM, section 4.3).
            self._round.insert(int(self._random() * (len(self._round) + 1)), member)

    def remove(self, member: Member) -> None:
        assert not member.reachable
        del self.table[member.id]
        self.ids.remove(member.id)

    def set(self, member: Member, update: MemberUpdate, now_s: float) -> None:
        """Set a member's update, and add the member to the reachable ones or remove it."""
        was_reachable = member.reachable
        member.set(update, now_s)
        if member.reachable and not was_reachable:
            self.peers.append(member)
        elif was_reachable and not member.reachable:
            self.peers.remove(member)

    def random_peers(self, count: int, but: tuple[NodeId, ...] = ()) -> list[Member]:
        """Return up to `count` distinct random peers whose ids are not in `but`."""
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
        """Return the next member to probe; None: there are no peers. Each round probes all in a new
        random order (SWIM, section 4.3), so no member waits longer than two rounds.
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
        """Return the ids in (after, until]; an empty bound does not limit them."""
        first = bisect_right(self.ids, after) if after else 0
        last = bisect_right(self.ids, until) if until else len(self.ids)
        return self.ids[first:last]


F = TypeVar("F", bound=Fact)


class Report(msgspec.Struct, Generic[F], frozen=True):
    """A fact, and the time at which its owner wrote it, by this node's clock."""

    fact: F
    written_s: float


class Facts:
    """Facts in the records of all reachable nodes, by (publishing node, name)."""

    def __init__(self, members: Mapping[NodeId, Member]) -> None:
        self._members = members
        self.unread = 0  # Number of received values that could not be decoded.

    def of(self, kind: type[F]) -> dict[tuple[NodeId, str], Report[F]]:
        return {
            (node, name): Report(report.fact, report.written_s)
            for _, node, name, report in self.all()
            if isinstance(report.fact, kind)
        }

    def about(self, kind: FactKind, name: str) -> Iterator[tuple[NodeId, Fact]]:
        """Return each fact of this kind and name, with the node that published it."""
        for member in self._members.values():
            if member.record is not None and member.reachable:
                held = member.record.entries.get((kind, name))
                if held is not None and held.fact is not None:
                    yield member.id, held.fact

    def all(self) -> Iterator[tuple[FactKind, NodeId, str, Report[Fact]]]:
        """Return kind, publishing node, name and report of every fact."""
        for member in self._members.values():
            if member.record is None or not member.reachable:
                continue
            for (kind, name), held in member.record.entries.items():
                if held.fact is not None:
                    yield FactKind(kind), member.id, name, Report(held.fact, held.written_s)
