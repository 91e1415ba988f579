"""Slots as leases: at most `slots_max` recovery transfers into one target at a time, whatever the
number of proxies.

Pure: no clock, no socket. The agent of a node has the table of the instances there.

    requested --> granted (a token, until a time) --> released
        |                                        +--> expired: its owner is gone, and the transfer
        |                                             has to be fenced
        +-------> denied (a wait) --> requested again

Invariants: a target has at most `slots_max` leases; tokens only rise; a repeated request for the
same attempt gets the same lease; an attempt that has ended, or has a successor, gets none; a stream
has one lease or one queue entry, because it has one writer.

The queue: a denied attempt asks again after its wait. Until then others may have the slots that
become free; from then on these are reserved for the attempts at the head of the queue, which ask
again at least once a second. So no attempt is overtaken for ever, and slots are hardly idle for one
that is still waiting.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Slot, SlotAnswer, SlotCounts, SlotRequest, SlotUpdate

SHORTEST_WAIT_S = 0.05  # Shortest wait that a denial names, even if a slot should be free already.
# Time after its due request for which an attempt keeps its place in the queue.
QUEUE_TIMEOUT_S = 1.0
# Time for which an attempt's end is remembered: longer than a late message about it takes.
ENDED_KEEP_S = 60.0
_WEIGHT = 0.2  # Weight of the newest transfer's duration in the moving average of durations.
# Time without a call of `expire` after which this process counts as paused. Its leases are then
# prolonged by `_GRACE_S`, since renewals may be unread.
_STALL_S = 2.0
_GRACE_S = 2.0

Number = tuple[int, int]  # Owner epoch and number of an attempt; a larger pair is later.


def number_of(asked: SlotRequest) -> Number:
    return asked.owner_epoch, asked.attempt


@dataclass(slots=True)
class _Lease:
    asked: SlotRequest
    owner: str
    token: int
    since_s: float
    until_s: float


@dataclass(slots=True)
class _QueueEntry:
    """A denied attempt in the queue of one target."""

    # Time at which the attempt is to ask again. From then on no attempt behind it is served before
    # it.
    due_s: float
    until_s: float


@dataclass(slots=True)
class _Target:
    held: dict[StreamId, _Lease] = field(default_factory=dict)  # Leases by stream, oldest first.
    # Queue entries by stream, in the order of the first denial.
    queue: dict[StreamId, _QueueEntry] = field(default_factory=dict)
    # Moving average of transfers' durations; None: no transfer has ended yet.
    duration_s: float | None = None
    peak: int = 0
    granted: int = 0
    denied: int = 0
    expired: int = 0


class SlotTable:
    def __init__(self, slots_max: int, first_token: int = 1) -> None:
        """`first_token` is above every token of an earlier process."""
        self._slots_max = slots_max
        self._next_token = first_token
        self._targets: dict[InstanceId, _Target] = {}
        self._leased: dict[StreamId, InstanceId] = {}
        self._queued: dict[StreamId, InstanceId] = {}
        # Last ended attempt of each stream, and the time until which it is remembered.
        self._ended: OrderedDict[StreamId, tuple[Number, float]] = OrderedDict()
        # Transfers of streams' former owners, which the next `expire` returns to be fenced.
        self._superseded: list[SlotRequest] = []
        self._checked_s: float | None = None

    def apply(self, update: SlotUpdate, now_s: float) -> SlotAnswer:
        """Carry out a proxy's releases, renewals and requests, in this order, so that released
        slots can be granted.
        """
        owner, lease_s = update.owner, update.lease_s
        for asked in update.release:
            self.release(owner, asked, now_s)
        lost = [
            asked.stream for asked in update.renew if not self.renew(owner, asked, lease_s, now_s)
        ]
        return SlotAnswer(
            [self.acquire(owner, asked, lease_s, now_s) for asked in update.acquire], lost
        )

    def acquire(self, owner: str, asked: SlotRequest, lease_s: float, now_s: float) -> Slot:
        """Grant a lease and return its token, or return token 0 and the expected wait. An earlier
        attempt at the stream loses its lease.
        """
        lease = self._lease(asked.stream)
        if lease is not None and (lease.asked, lease.owner) == (asked, owner):
            lease.until_s = max(lease.until_s, now_s + lease_s)
            return Slot(lease.token)
        if self._has_ended(asked) or (
            lease is not None and number_of(lease.asked) >= number_of(asked)
        ):
            # The attempt has ended or has a successor, so its owner no longer reads the answer.
            return Slot(0, SHORTEST_WAIT_S)
        if lease is not None:
            self._end(lease, now_s)
            if lease.owner != owner:
                self._superseded.append(lease.asked)
        if self._queued.get(asked.stream) not in (None, asked.target):
            self._leave_queue(asked.stream)
        target = self._targets.setdefault(asked.target, _Target())
        self._drop_overdue(target, now_s)
        ahead = list(takewhile(lambda stream: stream != asked.stream, target.queue))
        if (
            len(target.held) + sum(target.queue[stream].due_s <= now_s for stream in ahead)
            >= self._slots_max
        ):
            return self._deny(asked, target, len(ahead), now_s)
        return Slot(self._grant(owner, asked, target, now_s, now_s + lease_s))

    def renew(self, owner: str, asked: SlotRequest, lease_s: float, now_s: float) -> bool:
        """Prolong a lease. A lease that an earlier agent process granted is unknown here, and is
        granted again if there is room. Returns False if the transfer has no lease.
        """
        lease = self._lease(asked.stream)
        if lease is not None:
            is_same = (lease.asked, lease.owner) == (asked, owner)
            if is_same:
                lease.until_s = max(lease.until_s, now_s + lease_s)
            return is_same
        target = self._targets.setdefault(asked.target, _Target())
        if self._has_ended(asked) or len(target.held) >= self._slots_max:
            return False
        self._grant(owner, asked, target, now_s, now_s + lease_s)
        return True

    def release(self, owner: str, asked: SlotRequest, now_s: float) -> None:
        """End the lease of an attempt. If it has none, note its end, because its request may still
        arrive.
        """
        lease = self._lease(asked.stream)
        if (
            lease is not None
            and lease.owner == owner
            and number_of(lease.asked) <= number_of(asked)
        ):
            self._end(lease, now_s)
            self._update_duration(self._targets[lease.asked.target], now_s - lease.since_s)
        self._remember(asked, now_s)
        if lease is None or lease.owner == owner:
            self._leave_queue(asked.stream)

    def expire(self, now_s: float) -> list[SlotRequest]:
        """End leases that were not renewed in time. Return their transfers, and those whose lease
        another owner's attempt has replaced: all must be fenced.
        """
        checked_s, self._checked_s = self._checked_s, now_s
        if checked_s is not None and now_s - checked_s > _STALL_S:
            for lease in self._leases():
                lease.until_s = max(lease.until_s, now_s + _GRACE_S)
        ended, self._superseded = self._superseded, []
        for lease in [lease for lease in self._leases() if lease.until_s <= now_s]:
            self._end(lease, now_s)
            self._targets[lease.asked.target].expired += 1
            ended.append(lease.asked)
        for target in self._targets.values():
            self._drop_overdue(target, now_s)
        while self._ended and next(iter(self._ended.values()))[1] <= now_s:
            self._ended.popitem(last=False)
        return ended

    def counts(self) -> dict[InstanceId, SlotCounts]:
        """Return the counts of every target for which a slot was ever requested."""
        return {
            name: SlotCounts(
                len(each.held), len(each.queue), each.peak, each.granted, each.denied, each.expired
            )
            for name, each in self._targets.items()
        }

    def availability(self, target: InstanceId, now_s: float) -> tuple[int, float]:
        """Return the number of free slots of a target, and the expected wait of a new request; 0.0
        if a slot is free.
        """
        found = self._targets.get(target)
        if found is None:
            return self._slots_max, 0.0
        free = max(0, self._slots_max - len(found.held) - len(found.queue))
        return free, 0.0 if free else self._expected_wait_s(found, len(found.queue), now_s)

    def check(self) -> None:
        """Assert the invariants of leases and queues. O(leases)."""
        assert self._leased == {
            stream: name for name, each in self._targets.items() for stream in each.held
        }
        assert self._queued == {
            stream: name for name, each in self._targets.items() for stream in each.queue
        }
        assert not self._leased.keys() & self._queued.keys()
        for target in self._targets.values():
            assert len(target.held) <= target.peak <= self._slots_max

    def _leases(self) -> Iterator[_Lease]:
        return (lease for target in self._targets.values() for lease in target.held.values())

    def _lease(self, stream: StreamId) -> _Lease | None:
        name = self._leased.get(stream)
        return None if name is None else self._targets[name].held[stream]

    def _grant(
        self, owner: str, asked: SlotRequest, target: _Target, now_s: float, until_s: float
    ) -> int:
        self._leave_queue(asked.stream)
        token, self._next_token = self._next_token, self._next_token + 1
        target.held[asked.stream] = _Lease(asked, owner, token, now_s, until_s)
        self._leased[asked.stream] = asked.target
        target.granted += 1
        target.peak = max(target.peak, len(target.held))
        return token

    def _deny(self, asked: SlotRequest, target: _Target, ahead: int, now_s: float) -> Slot:
        wait_s = self._expected_wait_s(target, ahead, now_s)
        target.denied += 1
        entry = target.queue.get(asked.stream)
        if entry is None:
            entry = target.queue[asked.stream] = _QueueEntry(now_s + wait_s, 0.0)
        else:
            # From the due time on the next free slot is reserved for the entry, and unused until it
            # asks again: it must ask soon.
            wait_s = min(wait_s, max(entry.due_s - now_s, QUEUE_TIMEOUT_S))
        entry.until_s = now_s + wait_s + QUEUE_TIMEOUT_S
        self._queued[asked.stream] = asked.target
        return Slot(0, wait_s)

    def _expected_wait_s(self, target: _Target, ahead: int, now_s: float) -> float:
        """Return the expected time until the oldest transfer ends and the `ahead` entries are
        served.
        """
        oldest = next(iter(target.held.values()), None)
        lasted_s = 0.0 if oldest is None else now_s - oldest.since_s
        # Before the first transfer has ended, a transfer is expected to last as long again as it
        # has lasted.
        duration_s = 2 * lasted_s if target.duration_s is None else target.duration_s
        return max(SHORTEST_WAIT_S, duration_s - lasted_s) + ahead * duration_s / self._slots_max

    def _drop_overdue(self, target: _Target, now_s: float) -> None:
        for stream in [stream for stream, entry in target.queue.items() if entry.until_s <= now_s]:
            self._leave_queue(stream)

    def _leave_queue(self, stream: StreamId) -> None:
        if (name := self._queued.pop(stream, None)) is not None:
            del self._targets[name].queue[stream]

    def _end(self, lease: _Lease, now_s: float) -> None:
        del self._targets[lease.asked.target].held[lease.asked.stream]
        del self._leased[lease.asked.stream]
        self._remember(lease.asked, now_s)

    def _remember(self, asked: SlotRequest, now_s: float) -> None:
        number, _ = self._ended.pop(asked.stream, ((0, 0), 0.0))
        self._ended[asked.stream] = max(number, number_of(asked)), now_s + ENDED_KEEP_S

    def _has_ended(self, asked: SlotRequest) -> bool:
        known = self._ended.get(asked.stream)
        return known is not None and number_of(asked) <= known[0]

    @staticmethod
    def _update_duration(target: _Target, lasted_s: float) -> None:
        duration_s = lasted_s if target.duration_s is None else target.duration_s
        target.duration_s = duration_s + _WEIGHT * (lasted_s - duration_s)
