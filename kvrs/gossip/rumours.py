"""News of members: pushed to a few at once, then riding along on whatever is sent anyway, a bounded number of times."""

from math import ceil, log10

from kvrs.gossip.members import Member
from kvrs.gossip.wire import Statement, Status
from kvrs.ids import NodeId

_PUSHES = 2  # Rounds in which fresh news is pushed; what they miss is found by riding along, and then by comparing digests.


class _Rumour:
    __slots__ = ("member", "pushes", "sent")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.sent = 0
        self.pushes = _PUSHES


class Rumours:
    """At most one per member, always of what is held of it now: an older word is never worth sending."""

    def __init__(self, retransmit_mult: int) -> None:
        self._mult = retransmit_mult
        self._limit = retransmit_mult
        self._all: dict[NodeId, _Rumour] = {}
        self.to_push = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, member: Member, members: int) -> None:
        old = self._all.pop(member.id, None)
        self.to_push += 1 if old is None or old.pushes == 0 else 0
        self._limit = self._mult * max(1, ceil(log10(members + 1)))
        self._all[member.id] = _Rumour(member)

    def riding(self, to: Member | None, room: int) -> tuple[Statement, ...]:
        """What goes along to that member: if it is not held alive, that before all else, so that it can refute (buddy system)."""
        news = list[Statement]()
        if to is not None and to.status is not Status.ALIVE:
            statement, size = to.statement()
            news.append(statement)
            room -= size
        if not self._all:
            return tuple(news)
        for rumour in self._freshest():
            statement, size = rumour.member.statement()
            if size > room:
                break
            if rumour.member is not to:
                news.append(statement)
                room -= size
            rumour.sent += 1
            if rumour.sent >= self._limit and rumour.pushes == 0:
                del self._all[rumour.member.id]
        return tuple(news)

    def pushing(self, room: int) -> tuple[Statement, ...]:
        """One round's news; what finds no room waits for the next."""
        news = list[Statement]()
        for rumour in [rumour for rumour in self._freshest() if rumour.pushes]:
            statement, size = rumour.member.statement()
            if size > room:
                break
            news.append(statement)
            room -= size
            rumour.pushes -= 1
            if rumour.pushes == 0:
                self.to_push -= 1
                if rumour.sent >= self._limit:
                    del self._all[rumour.member.id]
        return tuple(news)

    def forget(self, member: Member) -> None:
        old = self._all.pop(member.id, None)
        self.to_push -= 1 if old is not None and old.pushes else 0

    def _freshest(self) -> list[_Rumour]:
        rumours = list(self._all.values())
        if len(rumours) > 1:
            rumours.sort(key=lambda rumour: rumour.sent)
        return rumours
