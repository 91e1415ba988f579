"""Slots as leases: at most `slots_max` recovery transfers into one target at a time, however many proxies ask.

Pure: no clock, no socket. The agent of a node keeps the table of the instances there.

    asked --> granted (a token, until a time) --> released
      |                                       +-> expired: its owner is gone, and the transfer is to be ended
      +-----> denied (a wait) --> asked again

Laws: a target has at most `slots_max` leases; tokens only rise; who asks twice for the same attempt gets the same lease; what
has ended, or has a successor, gets none any more; a stream has one lease or one place in line, because it has one writer.

The line: who was denied comes again when it was told to. Until then others may have what comes free; from then on, whatever
comes free is kept for those who were first. So nobody is overtaken for ever, and hardly a slot is idle for somebody who sleeps.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Slot, SlotAsked, SlotCounts

SHORTEST_WAIT_S = 0.05  # The least that a denial says: a transfer that is late does not end at this very moment.
PATIENCE_S = 1.0  # Who is later than that has gone another way, and loses its place in line.
REMEMBERED_S = 60.0  # Messages of an attempt that has ended are not later than that.
_WEIGHT = 0.2  # Of the last transfer in the usual duration of one.
# Nobody has looked for so long: this process did not run, and what renews the leases is still to be read.
_STALL_S = 2.0
_GRACE_S = 2.0

Number = tuple[int, int]  # (owner_epoch, attempt)


def number_of(asked: SlotAsked) -> Number:
    return asked.owner_epoch, asked.attempt


@dataclass(slots=True)
class _Lease:
    asked: SlotAsked
    owner: str
    token: int
    since_s: float
    until_s: float


@dataclass(slots=True)
class _Place:
    """In the line of one target."""

    due_s: float  # When it was told to come again. From then on nobody behind it is served before it.
    until_s: float


@dataclass(slots=True)
class _Target:
    held: dict[StreamId, _Lease] = field(default_factory=dict)  # The oldest first.
    line: dict[StreamId, _Place] = field(default_factory=dict)  # In the order of the first denial.
    usual_s: float | None = None  # How long a transfer takes; None: none has ended yet.
    most: int = 0
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
        self._lined_up: dict[StreamId, InstanceId] = {}
        # The last attempt that has ended, and until when that is remembered.
        self._over: OrderedDict[StreamId, tuple[Number, float]] = OrderedDict()
        self._superseded: list[SlotAsked] = []  # Other owners' transfers, to be ended.
        self._looked_s: float | None = None

    def acquire(self, owner: str, asked: SlotAsked, lease_s: float, now_s: float) -> Slot:
        """A lease for this attempt, or token 0 and the expected wait. Ends the leases of lower attempts at the stream."""
        lease = self._lease(asked.stream)
        if lease is not None and (lease.asked, lease.owner) == (asked, owner):
            lease.until_s = max(lease.until_s, now_s + lease_s)
            return Slot(lease.token)
        if self._is_over(asked) or (lease is not None and number_of(lease.asked) >= number_of(asked)):
            return Slot(0, SHORTEST_WAIT_S)  # It comes too late, so nobody reads this.
        if lease is not None:
            self._end(lease, now_s)
            if lease.owner != owner:
                self._superseded.append(lease.asked)
        if self._lined_up.get(asked.stream) not in (None, asked.target):
            self._leave_line(asked.stream)
        target = self._targets.setdefault(asked.target, _Target())
        self._tidy(target, now_s)
        ahead = list(takewhile(lambda stream: stream != asked.stream, target.line))
        if len(target.held) + sum(target.line[stream].due_s <= now_s for stream in ahead) >= self._slots_max:
            return self._deny(asked, target, len(ahead), now_s)
        return Slot(self._grant(owner, asked, target, now_s, now_s + lease_s))

    def renew(self, owner: str, asked: SlotAsked, lease_s: float, now_s: float) -> bool:
        """Whether the transfer still has a slot. One that this process has never heard of gets one, where there is room: it
        runs, and was granted by an earlier process.
        """
        lease = self._lease(asked.stream)
        if lease is not None:
            is_same = (lease.asked, lease.owner) == (asked, owner)
            if is_same:
                lease.until_s = max(lease.until_s, now_s + lease_s)
            return is_same
        target = self._targets.setdefault(asked.target, _Target())
        if self._is_over(asked) or len(target.held) >= self._slots_max:
            return False
        self._grant(owner, asked, target, now_s, now_s + lease_s)
        return True

    def release(self, owner: str, asked: SlotAsked, now_s: float) -> None:
        """The attempt needs no slot any more, also if it has none yet: what it asked for may come later than this."""
        lease = self._lease(asked.stream)
        if lease is not None and lease.owner == owner and number_of(lease.asked) <= number_of(asked):
            self._end(lease, now_s)
            self._learn(self._targets[lease.asked.target], now_s - lease.since_s)
        self._remember(asked, now_s)
        if lease is None or lease.owner == owner:
            self._leave_line(asked.stream)

    def expire(self, now_s: float) -> list[SlotAsked]:
        """End the leases that nobody renewed. Returns them, and those that other owners have taken over: their transfers are to
        be ended at their targets.
        """
        looked_s, self._looked_s = self._looked_s, now_s
        if looked_s is not None and now_s - looked_s > _STALL_S:
            for lease in self._leases():
                lease.until_s = max(lease.until_s, now_s + _GRACE_S)
        ended, self._superseded = self._superseded, []
        for lease in [lease for lease in self._leases() if lease.until_s <= now_s]:
            self._end(lease, now_s)
            self._targets[lease.asked.target].expired += 1
            ended.append(lease.asked)
        for target in self._targets.values():
            self._tidy(target, now_s)
        while self._over and next(iter(self._over.values()))[1] <= now_s:
            self._over.popitem(last=False)
        return ended

    def counts(self) -> dict[InstanceId, SlotCounts]:
        """Of every target that was ever asked for."""
        return {
            name: SlotCounts(len(each.held), len(each.line), each.most, each.granted, each.denied, each.expired)
            for name, each in self._targets.items()
        }

    def outlook(self, target: InstanceId, now_s: float) -> tuple[int, float]:
        """How many slots are free, and how long one who comes now waits for one."""
        found = self._targets.get(target)
        if found is None:
            return self._slots_max, 0.0
        free = max(0, self._slots_max - len(found.held) - len(found.line))
        return free, 0.0 if free else self._expected_wait_s(found, len(found.line), now_s)

    def check(self) -> None:
        """Assert that the books agree. O(leases)."""
        assert self._leased == {stream: name for name, each in self._targets.items() for stream in each.held}
        assert self._lined_up == {stream: name for name, each in self._targets.items() for stream in each.line}
        assert not self._leased.keys() & self._lined_up.keys()
        for target in self._targets.values():
            assert len(target.held) <= target.most <= self._slots_max

    def _leases(self) -> Iterator[_Lease]:
        return (lease for target in self._targets.values() for lease in target.held.values())

    def _lease(self, stream: StreamId) -> _Lease | None:
        name = self._leased.get(stream)
        return None if name is None else self._targets[name].held[stream]

    def _grant(self, owner: str, asked: SlotAsked, target: _Target, now_s: float, until_s: float) -> int:
        self._leave_line(asked.stream)
        token, self._next_token = self._next_token, self._next_token + 1
        target.held[asked.stream] = _Lease(asked, owner, token, now_s, until_s)
        self._leased[asked.stream] = asked.target
        target.granted += 1
        target.most = max(target.most, len(target.held))
        return token

    def _deny(self, asked: SlotAsked, target: _Target, ahead: int, now_s: float) -> Slot:
        wait_s = self._expected_wait_s(target, ahead, now_s)
        target.denied += 1
        place = target.line.setdefault(asked.stream, _Place(now_s + wait_s, 0.0))
        place.until_s = now_s + wait_s + PATIENCE_S
        self._lined_up[asked.stream] = asked.target
        return Slot(0, wait_s)

    def _expected_wait_s(self, target: _Target, ahead: int, now_s: float) -> float:
        """Until the oldest transfer ends, and those ahead have had their turns."""
        oldest = next(iter(target.held.values()), None)
        lasted_s = 0.0 if oldest is None else now_s - oldest.since_s
        # As long as none has ended, one that has lasted so long may last as long again.
        usual_s = 2 * lasted_s if target.usual_s is None else target.usual_s
        return max(SHORTEST_WAIT_S, usual_s - lasted_s) + ahead * usual_s / self._slots_max

    def _tidy(self, target: _Target, now_s: float) -> None:
        for stream in [stream for stream, place in target.line.items() if place.until_s <= now_s]:
            self._leave_line(stream)

    def _leave_line(self, stream: StreamId) -> None:
        if (name := self._lined_up.pop(stream, None)) is not None:
            del self._targets[name].line[stream]

    def _end(self, lease: _Lease, now_s: float) -> None:
        del self._targets[lease.asked.target].held[lease.asked.stream]
        del self._leased[lease.asked.stream]
        self._remember(lease.asked, now_s)

    def _remember(self, asked: SlotAsked, now_s: float) -> None:
        number, _ = self._over.pop(asked.stream, ((0, 0), 0.0))
        self._over[asked.stream] = max(number, number_of(asked)), now_s + REMEMBERED_S

    def _is_over(self, asked: SlotAsked) -> bool:
        known = self._over.get(asked.stream)
        return known is not None and number_of(asked) <= known[0]

    @staticmethod
    def _learn(target: _Target, lasted_s: float) -> None:
        usual_s = lasted_s if target.usual_s is None else target.usual_s
        target.usual_s = usual_s + _WEIGHT * (lasted_s - usual_s)
