"""Probes that are under way, and pings made on behalf of others.

one interval, with a silent target and three relays:

0            1/3                        2/3                                 1
Ping ------- Ping, Ask to 3 relays ---- Ping (stream), Ask to 3 others ---- failed
"""

from collections import deque
from math import inf

from kvrs.ids import NodeId

WAVES = 3
_RELAYED_MAX = 1024  # Pings on behalf of others at a time; the oldest gives way.


class Probe:
    __slots__ = ("asked", "due_s", "epoch", "gap_s", "nacks", "seq", "target", "waves")

    def __init__(self, target: NodeId, epoch: int, seq: int, gap_s: float) -> None:
        self.target = target
        self.epoch = epoch
        self.seq = seq
        self.gap_s = gap_s
        self.due_s = 0.0
        self.waves = 0
        self.asked: tuple[NodeId, ...] = ()
        self.nacks: set[NodeId] = set()  # Who of them answered that it heard nothing.


class Probes:
    """By sequence number and by target: a member is probed once at a time."""

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
        """Those whose next wave, or verdict, is due; the caller lets each wait again or ends it."""
        found = [probe for probe in self._by_seq.values() if probe.due_s <= now_s]
        for probe in found:
            probe.due_s = inf
        self._find_due()
        return found

    def _find_due(self) -> None:
        self.due_s = min((probe.due_s for probe in self._by_seq.values()), default=inf)


class Relayed:
    """Pings on behalf of others: who wants to know, under which number, and when he is told that nothing came."""

    def __init__(self) -> None:
        self._all: dict[int, tuple[NodeId, NodeId, int]] = {}
        self._nacks: deque[tuple[float, int]] = deque()

    @property
    def due_s(self) -> float:
        return self._nacks[0][0] if self._nacks else inf

    def add(self, seq: int, target: NodeId, asker: NodeId, asker_seq: int, nack_s: float) -> None:
        self._all[seq] = target, asker, asker_seq
        self._nacks.append((nack_s, seq))
        if len(self._nacks) > _RELAYED_MAX:
            self._all.pop(self._nacks.popleft()[1], None)

    def answered(self, seq: int, target: NodeId) -> tuple[NodeId, int] | None:
        """Who asked for this answer, if it is one that was asked for."""
        found = self._all.get(seq)
        if found is None or found[0] != target:
            return None
        del self._all[seq]
        if not self._all:
            self._nacks.clear()
        return found[1:]

    def unanswered(self, now_s: float) -> list[tuple[NodeId, int]]:
        """Those whose time is over."""
        over = []
        while self._nacks and self._nacks[0][0] <= now_s:
            found = self._all.pop(self._nacks.popleft()[1], None)
            if found is not None:
                over.append(found[1:])
        return over

    def clear(self) -> None:
        self._all.clear()
        self._nacks.clear()
