"""The books of what a stream without an attempt waits for.

Timers: one alarm per stream, and one wake-up that is requested from the driver for the earliest of
them. A new `WakeAt` is requested only when the earliest alarm comes before the wake-up requested
last; a driver may keep one timer or many, and a superfluous wake-up does nothing.

Slots: at most `slots_max` recovery transfers into one target at a time (seed KVRS, "Slot
Reservation"), and the queue of streams for the next one. First in, first out: a stream may take a
slot only when one is left over for every stream before it. This is one proxy's own book, and a
first filter: where the target's node has an agent, the agent arbitrates between proxies, and
`agent_slots.py` notes here what it has been asked for.

Retry budget: a token bucket that keeps the retries of one proxy below a share of starts. Attempts
that follow a failure load the survivors of it; where these fail under that load, each failure asks
for more. A bucket that holds one token per open stream lets all victims of a loss go on at once,
and what fails again after that at the rate of the refill.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvrs.core.model import actions as act
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import SlotRequest
from kvrs.sums import sum_in_order

# Event loops round to milliseconds; an alarm that is this near counts as due, or it would be
# requested again and again.
SLACK_S = 0.005
# The shortest wait: a transfer that is late by its prediction does not free its slot at once.
SHORTEST_WAIT_S = 0.05
# Tokens for each new stream: a fifth of the starts may be tried again.
RETRY_SHARE = 0.2
# The bucket holds a token for each open stream, and refills within so many seconds on its own.
RETRY_REFILL_S = 10.0
LEAST_RETRY_TOKENS = 100.0
# The last part of the bucket is kept for streams that have begun.
_KEPT_RETRY_SHARE = 0.25


class Timers:
    def __init__(self) -> None:
        self.alarms_s: dict[StreamId, float] = {}  # Of each stream that has one.
        # May hold alarms that were moved or cleared since.
        self.heap: list[tuple[float, int, StreamId]] = []
        self._count = 0  # Equal times are due in the order in which they were set.
        self._requested_s: float | None = None

    def set(self, stream: StreamId, at_s: float) -> None:
        self.alarms_s[stream] = at_s
        self._count += 1
        heappush(self.heap, (at_s, self._count, stream))

    def woken(self, now_s: float) -> None:
        """The driver's wake-up: the requested one if its time has come, else an older one that no
        longer matters.
        """
        if self._requested_s is not None and self._requested_s <= now_s + SLACK_S:
            self._requested_s = None

    def next_due(self, now_s: float) -> StreamId | None:
        """Take the next alarm that is due; None: no more are."""
        if not self.heap or self.heap[0][0] > now_s + SLACK_S:
            return None
        earliest_s = self._earliest_s()
        if earliest_s is None or earliest_s > now_s + SLACK_S:
            return None
        stream = heappop(self.heap)[2]
        del self.alarms_s[stream]
        return stream

    def next_wake(self, now_s: float) -> act.WakeAt | None:
        """The request to the driver without which the earliest alarm would be missed."""
        earliest_s = self._earliest_s()
        if earliest_s is None:
            return None
        requested_s = self._requested_s
        if requested_s is not None and now_s <= requested_s + SLACK_S and requested_s <= earliest_s:
            return None
        self._requested_s = earliest_s
        return act.WakeAt(earliest_s)

    def _earliest_s(self) -> float | None:
        while self.heap:
            at_s, _, stream = self.heap[0]
            if self.alarms_s.get(stream) == at_s:
                return at_s
            heappop(self.heap)
        return None


def is_past(at_s: float, now_s: float) -> bool:
    """An alarm for this time would be due now."""
    return at_s <= now_s + SLACK_S


@dataclass(slots=True)
class HeldSlot:
    target: InstanceId
    ends_s: float  # As predicted.
    duration_s: float
    ticket: int
    # Which agent may have granted what to the attempt, whether or not its answer came.
    asked: tuple[InstanceId, SlotRequest] | None = None
    is_local: bool = False  # Granted by this proxy, because the agent could not be asked.


@dataclass(slots=True)
class _Target:
    held: dict[StreamId, HeldSlot] = field(default_factory=dict)
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
        durations_s = [each.duration_s for each in self.held.values()]
        self.mean_duration_s = sum_in_order(durations_s) / len(durations_s)


class SlotBook:
    def __init__(self, slots_max: int) -> None:
        self._slots_max = slots_max
        # Targets that a stream has come to, or waited for.
        self._targets: dict[InstanceId, _Target] = {}
        self.is_used = False  # Some stream has had a slot; none waits for one before.
        self.held: dict[StreamId, HeldSlot] = {}
        self.awaited: dict[StreamId, InstanceId] = {}  # For a slot of which target each waits.
        # Called for each slot given back that an agent may have granted.
        self.released: Callable[[InstanceId, SlotRequest], None] = lambda agent, asked: None

    def reload(self, slots_max: int) -> None:
        """Allow another number of transfers. Where more are held, they run to their end."""
        self._slots_max = slots_max

    def expected_wait_s(self, target: InstanceId, stream: StreamId, now_s: float) -> float:
        """0 when the stream may take a slot now; else until the first transfer ends, or the time
        that the agent's denial named, and its turn in the queue comes.
        """
        book = self._targets.get(target)
        if book is None:
            return 0.0
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
        book = self._targets.setdefault(target, _Target())
        ahead = book.ahead_of(stream) if book.waiting else 0
        if len(book.held) + ahead >= book.room(self._slots_max, now_s):
            return False
        ticket = book.ticket_of(stream)
        self.leave(stream)
        self.is_used = True
        held = HeldSlot(target, now_s + predicted_s, predicted_s, ticket)
        self.held[stream] = book.held[stream] = held
        book.is_counted = False
        return True

    def release(self, stream: StreamId) -> None:
        """Give back the slot that the stream has."""
        held = self.held.pop(stream)
        book = self._targets[held.target]
        if len(book.held) > 1:
            book.is_counted = False
        elif not book.is_counted:
            book.count()  # What it had last says how long the next ones may take.
        del book.held[stream]
        if held.asked is not None:
            self.released(*held.asked)

    def deny(self, stream: StreamId, until_s: float) -> None:
        """The target's agent has no slot for this proxy before then; the stream goes back to its
        place in the queue.
        """
        held = self.held[stream]
        book = self._targets[held.target]
        self.release(stream)
        book.most, book.most_until_s = len(book.held), until_s
        book.waiting = dict(
            sorted([*book.waiting.items(), (stream, held.ticket)], key=lambda waiting: waiting[1])
        )
        self.awaited[stream] = held.target

    def enqueue(self, target: InstanceId, stream: StreamId) -> None:
        """Wait for a slot at the target. A stream that waits there already keeps its place."""
        if self.awaited.get(stream) == target:
            return
        self.leave(stream)
        book = self._targets.setdefault(target, _Target())
        book.waiting[stream] = book.ticket_of(stream)
        self.awaited[stream] = target

    def leave(self, stream: StreamId) -> None:
        """Stop waiting, if the stream does."""
        target = self.awaited.pop(stream, None)
        if target is not None:
            del self._targets[target].waiting[stream]

    def next_served(self, now_s: float) -> StreamId | None:
        """A stream that waits while a slot is free for it."""
        for book in self._targets.values():
            if book.waiting and len(book.held) < book.room(self._slots_max, now_s):
                return next(iter(book.waiting))
        return None

    def held_at(self, target: InstanceId) -> Collection[HeldSlot]:
        return self._targets[target].held.values() if target in self._targets else ()

    def waiting_for(self, target: InstanceId) -> list[StreamId]:
        return list(self._targets[target].waiting) if target in self._targets else []

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Slots held and streams waiting, of every target that has either."""
        return {
            target: {"held": len(book.held), "waiting": len(book.waiting), "max": self._slots_max}
            for target, book in self._targets.items()
            if book.held or book.waiting
        }


class RetryBudget:
    def __init__(self) -> None:
        self.used = 0.0  # Tokens that are not refilled yet; more than there are: given in advance.
        self._refilled_s = 0.0
        self.delayed = 0  # Attempts that had to wait for a token.

    def started(self, open_streams: int, now_s: float) -> None:
        """A new stream has its first attempt."""
        self._refill(_capacity(open_streams), now_s)
        self.used = max(0.0, self.used - RETRY_SHARE)

    def take(self, open_streams: int, now_s: float) -> float:
        """The token of an attempt of a stream that has begun: how long until it may be used. Tokens
        are given out in advance, in the order in which they are asked for.
        """
        capacity = _capacity(open_streams)
        self._refill(capacity, now_s)
        self.used += 1.0
        wait_s = max(0.0, self.used - capacity) * RETRY_REFILL_S / capacity
        self.delayed += wait_s > 0
        return wait_s

    def take_spare(self, open_streams: int, now_s: float) -> bool:
        """The token of an attempt of a stream that has not begun, if there are enough for the
        others.
        """
        capacity = _capacity(open_streams)
        self._refill(capacity, now_s)
        if self.used + 1.0 > (1 - _KEPT_RETRY_SHARE) * capacity:
            self.delayed += 1
            return False
        self.used += 1.0
        return True

    def snapshot(self, open_streams: int) -> dict[str, float]:
        """Plain data for people."""
        return {
            "used": self.used,
            "capacity": _capacity(open_streams),
            "delayed": self.delayed,
        }

    def _refill(self, capacity: float, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._refilled_s)
        self.used = max(0.0, self.used - capacity * passed_s / RETRY_REFILL_S)
        self._refilled_s = now_s


def _capacity(open_streams: int) -> float:
    return max(LEAST_RETRY_TOKENS, open_streams)
