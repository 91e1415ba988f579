"""Dissemination of member updates: pushed to a few peers at once, then piggybacked on other packets
a bounded number of times (SWIM, section 4.1).
"""

from math import ceil, log10

from kvrs.gossip.members import Member
from kvrs.gossip.wire import MemberUpdate, Status
from kvrs.ids import NodeId

# Rounds in which a new update is pushed. Nodes that these miss get it by piggybacking, and then by
# anti-entropy.
_PUSHES = 2


class _Broadcast:
    __slots__ = ("member", "pushes", "sent")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.sent = 0
        self.pushes = _PUSHES


class BroadcastQueue:
    """At most one update per member, always of its present state."""

    def __init__(self, retransmit_mult: int) -> None:
        self._mult = retransmit_mult
        self._limit = retransmit_mult
        self._all: dict[NodeId, _Broadcast] = {}
        self.to_push = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, member: Member, members: int) -> None:
        old = self._all.pop(member.id, None)
        self.to_push += 1 if old is None or old.pushes == 0 else 0
        self._limit = self._mult * max(1, ceil(log10(members + 1)))
        self._all[member.id] = _Broadcast(member)

    def piggyback(self, to: Member | None, room: int) -> tuple[MemberUpdate, ...]:
        """Updates to add to a packet for this member. One about the member itself goes first,
        unless it is alive, so that it can refute (Lifeguard, Buddy System).
        """
        updates = list[MemberUpdate]()
        if to is not None and to.status is not Status.ALIVE:
            update, size = to.update()
            updates.append(update)
            room -= size
        if not self._all:
            return tuple(updates)
        for broadcast in self._freshest():
            update, size = broadcast.member.update()
            if size > room:
                break
            if broadcast.member is not to:
                updates.append(update)
                room -= size
            broadcast.sent += 1
            if broadcast.sent >= self._limit and broadcast.pushes == 0:
                del self._all[broadcast.member.id]
        return tuple(updates)

    def updates_to_push(self, room: int) -> tuple[MemberUpdate, ...]:
        """Updates of one push; what does not fit waits for the next."""
        updates = list[MemberUpdate]()
        for broadcast in [broadcast for broadcast in self._freshest() if broadcast.pushes]:
            update, size = broadcast.member.update()
            if size > room:
                break
            updates.append(update)
            room -= size
            broadcast.pushes -= 1
            if broadcast.pushes == 0:
                self.to_push -= 1
                if broadcast.sent >= self._limit:
                    del self._all[broadcast.member.id]
        return tuple(updates)

    def forget(self, member: Member) -> None:
        old = self._all.pop(member.id, None)
        self.to_push -= 1 if old is not None and old.pushes else 0

    def _freshest(self) -> list[_Broadcast]:
        broadcasts = list(self._all.values())
        if len(broadcasts) > 1:
            broadcasts.sort(key=lambda broadcast: broadcast.sent)
        return broadcasts
