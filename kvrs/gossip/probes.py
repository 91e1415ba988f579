"""Probes in progress, and pings on behalf of other nodes (SWIM, section 3.1).

One interval, with a silent target and three relays:

0            1/3                            2/3                                     1
Ping ------- Ping, PingReq to 3 relays ---- Ping (stream), PingReq to 3 others ---- failed
"""

from collections import deque
from math import inf

from kvrs.ids import NodeId

WAVES = 3
_MAX_RELAYED = 1024  # At a time; the oldest is dropped.


class Probe:
    __slots__ = ("due_s", "epoch", "gap_s", "nacks", "relays", "seq", "target", "waves")

    def __init__(self, target: NodeId, epoch: int, seq: int, gap_s: float) -> None:
        self.target = target
        self.epoch = epoch
        self.seq = seq
        self.gap_s = gap_s
        self.due_s = 0.0
        self.waves = 0
        self.relays: tuple[NodeId, ...] = ()
        self.nacks: set[NodeId] = set()  # Relays that answered without an ack of the target.


class Probes:
    """Probes by sequence number and by target; at most one per target."""

    def __init__(self) -> None:
        self._by_seq: dict[int, Probe] = {}
        self._targets: dict[NodeId, Probe] = {}
        self.due_s = inf

    def __contains__(self, target: NodeId) -> bool:
        return target in self._targets

    def __len__(self) -> int:
        return len(self._by_seq)

    def add(self, probe: Probe) -> None:
        self._by_seq[probe.seq] = self._targets[probe.target] = probe

    def get(self, seq: int) -> Probe | None:
        return self._by_seq.get(seq)

    def wait(self, probe: Probe, until_s: float) -> None:
        probe.due_s = until_s
        self.due_s = min(self.due_s, until_s)

    def end(self, probe: Probe) -> None:
        del self._by_seq[probe.seq], self._targets[probe.target]
        if probe.due_s <= self.due_s:
            self._find_due()

    def end_of(self, target: NodeId) -> None:
        probe = self._targets.get(target)
        if probe is not None:
            self.end(probe)

    def clear(self) -> None:
        self._by_seq.clear()
        self._targets.clear()
        self.due_s = inf

    def due(self, now_s: float) -> list[Probe]:
        """Probes whose next wave or failure is due; the caller lets each wait again or ends it."""
        found = [probe for probe in self._by_seq.values() if probe.due_s <= now_s]
        for probe in found:
            probe.due_s = inf
        self._find_due()
        return found

    def _find_due(self) -> None:
        self.due_s = min((probe.due_s for probe in self._by_seq.values()), default=inf)


class RelayedPings:
    """Pings on behalf of other nodes: the requester, its sequence number, and when it gets a
    nack.
    """

    def __init__(self) -> None:
        self._requests: dict[int, tuple[NodeId, NodeId, int]] = {}
        self._nacks: deque[tuple[float, int]] = deque()

    @property
    def due_s(self) -> float:
        return self._nacks[0][0] if self._nacks else inf

    def add(
        self, seq: int, target: NodeId, requester: NodeId, requester_seq: int, nack_s: float
    ) -> None:
        self._requests[seq] = target, requester, requester_seq
        self._nacks.append((nack_s, seq))
        if len(self._nacks) > _MAX_RELAYED:
            self._requests.pop(self._nacks.popleft()[1], None)

    def acked(self, seq: int, target: NodeId) -> tuple[NodeId, int] | None:
        """The requester and its sequence number; None: the ack answers no relayed ping."""
        found = self._requests.get(seq)
        if found is None or found[0] != target:
            return None
        del self._requests[seq]
        if not self._requests:
            self._nacks.clear()
        return found[1:]

    def expired(self, now_s: float) -> list[tuple[NodeId, int]]:
        """Requesters, with their sequence numbers, that get a nack now."""
        expired = []
        while self._nacks and self._nacks[0][0] <= now_s:
            found = self._requests.pop(self._nacks.popleft()[1], None)
            if found is not None:
                expired.append(found[1:])
        return expired

    def clear(self) -> None:
        self._requests.clear()
        self._nacks.clear()
