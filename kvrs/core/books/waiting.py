"""Timers, transfer slots and the retry budget, for which streams without an attempt wait.

Timers: each stream has at most one alarm, and the driver gets one wake-up for the earliest alarm. A
new `WakeAt` is requested only if the earliest alarm comes before the last requested wake-up; a
superfluous wake-up does nothing.

Slots: at most `slots_max` recovery transfers run into one target at a time (seed KVRS, "Slot
Reservation"); other streams queue first in, first out. The book counts the slots of one proxy. If
the target's node has an agent, the agent arbitrates between proxies too (`at_agents.py`).

Retry budget: a token bucket keeps the retries of one proxy below a share of the starts, so that
survivors which fail under the load of retries do not cause ever more retries. The bucket holds one
token per open stream: all victims of one loss go on at once, and later failures at the refill rate.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvrs.core.model import actions as act
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import SlotRequest
from kvrs.sums import sum_in_order

# An alarm this close counts as due: event loops round to milliseconds, and would wake up early
# again and again.
SLACK_S = 0.005
SHORTEST_WAIT_S = 0.05  # Least wait for a slot whose transfer is overdue by its prediction.
RETRY_SHARE = 0.2  # Tokens (a share of one) that each new stream adds to the bucket.
RETRY_REFILL_S = 10.0  # Time in which an empty bucket fills up without new streams.
LEAST_RETRY_TOKENS = 100.0
# The share of the bucket that only streams which have begun may use.
_KEPT_RETRY_SHARE = 0.25


class Timers:
    def __init__(self) -> None:
        self.alarms_s: dict[StreamId, float] = {}
        # Alarms as (time, sequence number, stream), of which some were moved or cleared since.
        self.heap: list[tuple[float, int, StreamId]] = []
        self._count = 0  # The sequence number keeps alarms of equal times in the order of setting.
        self._requested_s: float | None = None

    def set(self, stream: StreamId, at_s: float) -> None:
        self.alarms_s[stream] = at_s
        self._count += 1
        heappush(self.heap, (at_s, self._count, stream))

    def woken(self, now_s: float) -> None:
        """Note the driver's wake-up; an early wake-up belongs to an older request."""
        if self._requested_s is not None and self._requested_s <= now_s + SLACK_S:
            self._requested_s = None

    def next_due(self, now_s: float) -> StreamId | None:
        """Remove the next due alarm and return its stream; None: no alarm is due."""
        if not self.heap or self.heap[0][0] > now_s + SLACK_S:
            return None
        earliest_s = self._earliest_s()
        if earliest_s is None or earliest_s > now_s + SLACK_S:
            return None
        stream = heappop(self.heap)[2]
        del self.alarms_s[stream]
        return stream

    def next_wake(self, now_s: float) -> act.WakeAt | None:
        """Return the wake-up to request for the earliest alarm; None: no request is needed."""
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
    """Return whether an alarm for `at_s` would be due now."""
    return at_s <= now_s + SLACK_S


@dataclass(slots=True)
class HeldSlot:
    target: InstanceId
    ends_s: float  # Predicted end of the transfer.
    duration_s: float
    ticket: int
    # The agent that was asked for the slot, and the request, which it may have granted even if no
    # answer came; None: no agent was asked.
    asked: tuple[InstanceId, SlotRequest] | None = None
    is_local: bool = False  # The proxy itself granted the slot, without the agent.


@dataclass(slots=True)
class _Target:
    held: dict[StreamId, HeldSlot] = field(default_factory=dict)
    # Tickets of queued streams, lowest first.
    waiting: dict[StreamId, int] = field(default_factory=dict)
    next_ticket: int = 0
    # First end and mean duration of held transfers are computed at the first look-up after a change
    # (`is_counted` is false until then): most look-ups are O(1).
    first_end_s: float = 0.0
    mean_duration_s: float = 0.0
    is_counted: bool = True
    # The agent's last denial: at most `most` slots until `most_until_s`; 0: no denial.
    most: int = 0
    most_until_s: float = 0.0

    def room(self, slots_max: int, now_s: float) -> int:
        return slots_max if is_past(self.most_until_s, now_s) else min(self.most, slots_max)

    def ticket_of(self, stream: StreamId) -> int:
        """Return the stream's ticket in the queue; a stream that is not queued gets the next
        number.
        """
        ticket = self.waiting.get(stream)
        if ticket is None:
            ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        return ticket

    def ahead_of(self, stream: StreamId) -> int:
        """Return an upper bound of the number of streams that are before this stream in the queue;
        streams that left the middle of the queue are counted.
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
        self.slots_max = slots_max
        self._targets: dict[InstanceId, _Target] = {}
        self.is_used = False  # A slot was taken at least once; before, no stream waits for one.
        self.held: dict[StreamId, HeldSlot] = {}
        self.awaited: dict[StreamId, InstanceId] = {}  # The target of each queued stream.
        # Released slots that an agent may have granted, to be told to it, with that agent.
        self.released: list[tuple[InstanceId, SlotRequest]] = []

    def expected_wait_s(self, target: InstanceId, stream: StreamId, now_s: float) -> float:
        """Return the expected time until the stream gets a slot at the target; 0: it may take one.

        Otherwise the stream waits for the end of the first transfer, or of the agent's denial, and
        for the streams before it in the queue.
        """
        book = self._targets.get(target)
        if book is None:
            return 0.0
        ahead = book.ahead_of(stream) if book.waiting else 0
        # The test saves the call: calls dominate the time of a decision.
        room = book.room(self.slots_max, now_s) if book.most_until_s else self.slots_max
        if len(book.held) + ahead < room:
            return 0.0
        if not book.is_counted:
            book.count()
        first_s = (book.first_end_s if room == self.slots_max else book.most_until_s) - now_s
        return (
            first_s if first_s > SHORTEST_WAIT_S else SHORTEST_WAIT_S
        ) + ahead * book.mean_duration_s / self.slots_max

    def acquire(
        self, target: InstanceId, stream: StreamId, now_s: float, predicted_s: float
    ) -> bool:
        """Take a slot for a transfer that is predicted to last `predicted_s`, and leave the queue;
        return False if no slot is free.
        """
        assert stream not in self.held, stream
        book = self._targets.setdefault(target, _Target())
        ahead = book.ahead_of(stream) if book.waiting else 0
        if len(book.held) + ahead >= book.room(self.slots_max, now_s):
            return False
        ticket = book.ticket_of(stream)
        self.leave(stream)
        self.is_used = True
        held = HeldSlot(target, now_s + predicted_s, predicted_s, ticket)
        self.held[stream] = book.held[stream] = held
        book.is_counted = False
        return True

    def release(self, stream: StreamId) -> None:
        """Give the stream's slot back."""
        held = self.held.pop(stream)
        book = self._targets[held.target]
        if len(book.held) > 1:
            book.is_counted = False
        elif not book.is_counted:
            # The book keeps the duration of the last transfer, which predicts later ones.
            book.count()
        del book.held[stream]
        if held.asked is not None:
            self.released.append(held.asked)

    def deny(self, stream: StreamId, until_s: float) -> None:
        """Put the stream back in its place in the queue: the target's agent has no slot for this
        proxy before `until_s`.
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
        """Queue the stream at the target. A stream that is already queued there keeps its place."""
        if self.awaited.get(stream) == target:
            return
        self.leave(stream)
        book = self._targets.setdefault(target, _Target())
        book.waiting[stream] = book.ticket_of(stream)
        self.awaited[stream] = target

    def leave(self, stream: StreamId) -> None:
        """Remove the stream from the queue, if it is queued."""
        target = self.awaited.pop(stream, None)
        if target is not None:
            del self._targets[target].waiting[stream]

    def next_served(self, now_s: float) -> StreamId | None:
        """Return a queued stream for which a slot is free; None: there is none."""
        for book in self._targets.values():
            if book.waiting and len(book.held) < book.room(self.slots_max, now_s):
                return next(iter(book.waiting))
        return None

    def held_at(self, target: InstanceId) -> Collection[HeldSlot]:
        return self._targets[target].held.values() if target in self._targets else ()

    def waiting_for(self, target: InstanceId) -> list[StreamId]:
        return list(self._targets[target].waiting) if target in self._targets else []

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return the number of held slots and queued streams per target."""
        return {
            target: {"held": len(book.held), "waiting": len(book.waiting), "max": self.slots_max}
            for target, book in self._targets.items()
            if book.held or book.waiting
        }


class RetryBudget:
    def __init__(self) -> None:
        # Tokens taken and not refilled; those beyond the capacity were given out in advance.
        self.used = 0.0
        self._refilled_s = 0.0
        self.delayed = 0  # Number of attempts that had to wait for a token.

    def started(self, open_streams: int, now_s: float) -> None:
        """Add `RETRY_SHARE` of a token, because a new stream has begun its first attempt."""
        self._refill(_capacity(open_streams), now_s)
        self.used = max(0.0, self.used - RETRY_SHARE)

    def take(self, open_streams: int, now_s: float) -> float:
        """Take a token for a stream that has begun; return the time until the token may be used.

        Tokens are given out in advance, in the order of the calls.
        """
        capacity = _capacity(open_streams)
        self._refill(capacity, now_s)
        self.used += 1.0
        wait_s = max(0.0, self.used - capacity) * RETRY_REFILL_S / capacity
        self.delayed += wait_s > 0
        return wait_s

    def take_spare(self, open_streams: int, now_s: float) -> bool:
        """Take a token for a stream that has not begun; return False, taking none, if only the
        share of begun streams is left.
        """
        capacity = _capacity(open_streams)
        self._refill(capacity, now_s)
        if self.used + 1.0 > (1 - _KEPT_RETRY_SHARE) * capacity:
            self.delayed += 1
            return False
        self.used += 1.0
        return True

    def snapshot(self, open_streams: int) -> dict[str, float]:
        """Return the state as plain data, for display."""
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
