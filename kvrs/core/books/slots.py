"""Slots: at most `slots_max` recovery transfers into one target at a time (seed KVRS, "Slot
Reservation"), and the queue of streams for the next one.

First in, first out: a stream may take a slot only when one is left over for every stream before it.

This is one proxy's own book, and a first filter: where the target's node has an agent, the agent
arbitrates between proxies.
"""

from dataclasses import dataclass, field

import msgspec

from kvrs.core.books.timers import is_past
from kvrs.ids import InstanceId, StreamId

# The shortest wait: a transfer that is late by its prediction does not free its slot at once.
SHORTEST_WAIT_S = 0.05


class _Held(msgspec.Struct, frozen=True):
    ends_s: float  # As predicted.
    duration_s: float
    ticket: int


@dataclass(slots=True)
class _Target:
    held: dict[StreamId, _Held] = field(default_factory=dict)
    waiting: dict[StreamId, int] = field(default_factory=dict)  # Ticket numbers, in order.
    next_ticket: int = 0
    # Counted at the first look-up after a change, so that most look-ups are O(1):
    first_end_s: float = 0.0
    mean_duration_s: float = 0.0
    is_counted: bool = True
    # By the agent's last denial this proxy gets no more slots than these until then; 0: no denial.
    most: int = 0
    most_until_s: float = 0.0

    def room(self, slots_max: int, now_s: float) -> int:
        return slots_max if is_past(self.most_until_s, now_s) else min(self.most, slots_max)

    def ticket_of(self, stream: StreamId) -> int:
        """The ticket of its place in the queue, or a new one."""
        ticket = self.waiting.get(stream)
        if ticket is None:
            ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        return ticket

    def ahead_of(self, stream: StreamId) -> int:
        """The number of streams before this one; an upper bound when some have left the middle of
        the queue.
        """
        ticket = self.waiting.get(stream)
        if ticket is None:
            return len(self.waiting)
        return min(ticket - next(iter(self.waiting.values())), len(self.waiting) - 1)

    def count(self) -> None:
        self.is_counted = True
        self.first_end_s = min(each.ends_s for each in self.held.values())
        self.mean_duration_s = sum(each.duration_s for each in self.held.values()) / len(self.held)


class SlotBook:
    def __init__(self, slots_max: int) -> None:
        self._slots_max = slots_max
        self.targets: dict[InstanceId, _Target] = {}  # That a stream has come to, or waited for.
        self.held: dict[StreamId, InstanceId] = {}  # At which target each has a slot.
        self.awaited: dict[StreamId, InstanceId] = {}  # For a slot of which target each waits.

    def reload(self, slots_max: int) -> None:
        """Allow another number of transfers. Where more are held, they run to their end."""
        self._slots_max = slots_max

    def expected_wait_s(self, target: InstanceId, stream: StreamId, now_s: float) -> float:
        """0 when the stream may take a slot now; else until the first transfer ends, or the time
        that the agent's denial named, and its turn in the queue comes. `target`: one of `targets`.
        """
        book = self.targets[target]
        ahead = book.ahead_of(stream) if book.waiting else 0
        # Tested here, because calls make up the time of a decision.
        room = book.room(self._slots_max, now_s) if book.most_until_s else self._slots_max
        if len(book.held) + ahead < room:
            return 0.0
        if not book.is_counted:
            book.count()
        first_s = (book.first_end_s if room == self._slots_max else book.most_until_s) - now_s
        return (
            first_s if first_s > SHORTEST_WAIT_S else SHORTEST_WAIT_S
        ) + ahead * book.mean_duration_s / self._slots_max

    def acquire(
        self, target: InstanceId, stream: StreamId, now_s: float, predicted_s: float
    ) -> bool:
        """Take a slot for a transfer that is predicted to last this long, and leave the queue;
        False: denied.
        """
        assert stream not in self.held, stream
        book = self.targets.setdefault(target, _Target())
        ahead = book.ahead_of(stream) if book.waiting else 0
        if len(book.held) + ahead >= book.room(self._slots_max, now_s):
            return False
        ticket = book.ticket_of(stream)
        self.leave(stream)
        book.held[stream] = _Held(now_s + predicted_s, predicted_s, ticket)
        self.held[stream] = target
        book.is_counted = False
        return True

    def release(self, stream: StreamId) -> None:
        """Give back the slot that the stream has."""
        book = self.targets[self.held.pop(stream)]
        if len(book.held) > 1:
            book.is_counted = False
        elif not book.is_counted:
            book.count()  # What it had last says how long the next ones may take.
        del book.held[stream]

    def deny(self, stream: StreamId, until_s: float) -> None:
        """The target's agent has no slot for this proxy before then; the stream goes back to its
        place in the queue.
        """
        target = self.held[stream]
        book = self.targets[target]
        ticket = book.held[stream].ticket
        self.release(stream)
        book.most, book.most_until_s = len(book.held), until_s
        book.waiting = dict(
            sorted([*book.waiting.items(), (stream, ticket)], key=lambda waiting: waiting[1])
        )
        self.awaited[stream] = target

    def enqueue(self, target: InstanceId, stream: StreamId) -> None:
        """Wait for a slot at the target. A stream that waits there already keeps its place."""
        if self.awaited.get(stream) == target:
            return
        self.leave(stream)
        book = self.targets.setdefault(target, _Target())
        book.waiting[stream] = book.ticket_of(stream)
        self.awaited[stream] = target

    def leave(self, stream: StreamId) -> None:
        """Stop waiting, if the stream does."""
        target = self.awaited.pop(stream, None)
        if target is not None:
            del self.targets[target].waiting[stream]

    def next_served(self, now_s: float) -> StreamId | None:
        """A stream that waits while a slot is free for it."""
        for book in self.targets.values():
            if book.waiting and len(book.held) < book.room(self._slots_max, now_s):
                return next(iter(book.waiting))
        return None

    def waiting_for(self, target: InstanceId) -> list[StreamId]:
        return list(self.targets[target].waiting) if target in self.targets else []

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Slots held and streams waiting, of every target that has either."""
        return {
            target: {"held": len(book.held), "waiting": len(book.waiting), "max": self._slots_max}
            for target, book in self.targets.items()
            if book.held or book.waiting
        }
