"""Whose turn it is on a link, and when: classes of traffic in strict order, within the link's rate.

Pure: `now_s` is an argument. A token bucket in the form of a schedule (GCRA): what is remembered is the moment up to which the
time of the link is used. All connections of a link ask for one small chunk at a time. Which of them sends is decided as late
as it can be, when a real link would have carried the chunk, so that a hand-off overtakes a checkpoint at the next chunk and
those of a class take turns:

    used up      |=== handoff a ===|=== handoff b ===|      now
    the link's time ------------------------------------------|------------->
                                                     |<- chunk ->| next turn: the first of the highest class that waits then
"""

from collections import deque
from dataclasses import dataclass

from kvrs.protocol.frames import TrafficClass

# How late a sender may be served and still catch up. More than a timer's usual lateness; it is also the largest burst.
_CATCH_UP_S = 0.02

_CHUNK_S = 0.005
_MIN_CHUNK_BYTES = 64
_MAX_CHUNK_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class Turn:
    """Somebody wants to send; has its turn when `granted_bytes` is not 0 any more."""

    traffic: TrafficClass
    wanted_bytes: int
    granted_bytes: int = 0


class LinkTurns:
    """One per link, shared by all that is sent over it. Without a rate everybody has its turn at once, except that checkpoints
    wait while a hand-off or a recovery is open.
    """

    def __init__(self) -> None:
        self._bytes_per_s: float | None = None  # None: as fast as it goes; 0: not at all.
        self._used_until_s = float("-inf")
        self._waiting: dict[TrafficClass, deque[Turn]] = {traffic: deque() for traffic in TrafficClass}
        self._open = dict.fromkeys(TrafficClass, 0)

    @property
    def somebody_waits(self) -> bool:
        return any(self._waiting.values())

    @property
    def is_cut(self) -> bool:
        return self._bytes_per_s == 0

    def set_rate(self, bytes_per_s: float | None, now_s: float) -> None:
        """From now on the link carries this much; None: no limit; 0: it is cut."""
        if bytes_per_s != self._bytes_per_s:
            # Nothing that was saved up or owed at another rate counts.
            self._bytes_per_s, self._used_until_s = bytes_per_s, now_s

    def begin(self, traffic: TrafficClass) -> None:
        """A transfer of this class begins, which will ask for turns until its `end`."""
        self._open[traffic] += 1

    def end(self, traffic: TrafficClass) -> None:
        self._open[traffic] -= 1
        assert self._open[traffic] >= 0

    def ask(self, traffic: TrafficClass, wanted_bytes: int, now_s: float) -> Turn:
        """Stand in line for the right to send up to so much; call `grant` next."""
        assert wanted_bytes > 0
        # A link that was idle owes nothing: credit would let probes and short transfers see more than the limit.
        # Senders that come a little late did not leave it idle, they overslept.
        if not self.somebody_waits and now_s - self._used_until_s > _CATCH_UP_S:
            self._used_until_s = now_s
        turn = Turn(traffic, wanted_bytes)
        self._waiting[traffic].append(turn)
        return turn

    def withdraw(self, turn: Turn) -> None:
        """It does not want to send any more, before its turn came."""
        self._waiting[turn.traffic].remove(turn)

    def grant(self, now_s: float) -> list[Turn]:
        """Those whose turn it is, in the order in which they may send; each for at least one byte and at most what it wanted.

        In any span of T seconds at most `(T + 0.02) * bytes_per_s` bytes and one chunk are granted.
        """
        if self._bytes_per_s is None:
            return self._grant_freely()
        granted: list[Turn] = []
        while (due_s := self.next_s()) is not None and due_s <= now_s:
            # Who serves a little late makes up for it, and spreads that over all of the class: else the first always got it.
            self._used_until_s += max(0.0, now_s - due_s - _CATCH_UP_S)
            line = self._line()
            late_bytes = int((now_s - self._used_until_s) * self._bytes_per_s / len(line))
            turn = line.popleft()
            turn.granted_bytes = min(turn.wanted_bytes, max(late_bytes, self._chunk_bytes()))
            self._used_until_s += turn.granted_bytes / self._bytes_per_s
            granted.append(turn)
        return granted

    def next_s(self) -> float | None:
        """When the next turn is due; None when time alone brings none."""
        if not self._bytes_per_s or not (line := self._line()):
            return None
        return self._used_until_s + min(line[0].wanted_bytes, self._chunk_bytes()) / self._bytes_per_s

    def grant_sign_of_life(self, turn: Turn, now_s: float) -> bool:
        """Grant one byte out of turn, which the link then owes: to a peer that is kept waiting it shows that this end is there.

        False, and nothing, where the link is cut or owes as it is.
        """
        if self.is_cut or self._used_until_s > now_s:
            return False
        self.withdraw(turn)
        turn.granted_bytes = 1
        if self._bytes_per_s is not None:
            self._used_until_s += 1 / self._bytes_per_s
        return True

    def _grant_freely(self) -> list[Turn]:
        granted = [*self._waiting[TrafficClass.HANDOFF], *self._waiting[TrafficClass.RECOVERY]]
        self._waiting[TrafficClass.HANDOFF].clear()
        self._waiting[TrafficClass.RECOVERY].clear()
        for turn in granted:
            turn.granted_bytes = turn.wanted_bytes
        if self._open[TrafficClass.HANDOFF] + self._open[TrafficClass.RECOVERY] == 0:
            checkpoints = self._waiting[TrafficClass.CHECKPOINT]
            for turn in checkpoints:
                # A piece at a time, so that what comes up meanwhile does not wait for gigabytes.
                turn.granted_bytes = min(turn.wanted_bytes, _MAX_CHUNK_BYTES)
            granted += checkpoints
            checkpoints.clear()
        return granted

    def _line(self) -> deque[Turn]:
        """Those of the highest class that waits."""
        return next((line for line in self._waiting.values() if line), self._waiting[TrafficClass.CHECKPOINT])

    def _chunk_bytes(self) -> int:
        """How much one turn is: little, so that others get theirs and the rate is even."""
        assert self._bytes_per_s
        return int(min(max(self._bytes_per_s * _CHUNK_S, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES))
