"""Rate limit and strict priority of a link: which transfer sends its next chunk, and when.

Pure: `now_s` is an argument. A token bucket in its virtual scheduling form (GCRA, ITU-T I.371):
the state is the time up to which the link is used, and a chunk of b bytes at rate r advances it by
b / r. All connections of a link ask for one small chunk at a time. The next sender is chosen as
late as possible, when a real link would have carried its chunk, so that a hand-off overtakes a
checkpoint at the next chunk and transfers of a class alternate:

    used up      |=== handoff a ===|=== handoff b ===|      now
    the link's time ------------------------------------------|----->
                                                     |<- chunk ->|
                                                                 next turn: the first of the
                                                                 highest class that waits then

Faults injected into the pages that a process serves and pushes.

Pure: `now_s` is an argument. No fault is ever set unless the configuration allows it.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

from kvrs.ids import NodeId
from kvrs.protocol.pages import TrafficClass


@dataclass(frozen=True, slots=True)
class LinkRate:
    bytes_per_s: float | None  # Most bytes per second on the link; None: unlimited; 0: cut.
    until_s: float


class SendingFaults:
    """Injected faults of sends: slowed or cut links, and a number of pages whose copies have a bit
    flipped.
    """

    def __init__(self) -> None:
        self._holds: dict[NodeId, LinkRate] = {}
        self._pages_to_corrupt = 0

    def hold(self, node: NodeId, bytes_per_s: float, until_s: float) -> None:
        """Limit the rate to a node; 0 cuts the link. Replaces an earlier limit of the link."""
        self._holds[node] = LinkRate(bytes_per_s, until_s)

    def corrupt(self, pages: int) -> None:
        self._pages_to_corrupt += pages

    def clear(self) -> None:
        self._holds.clear()
        self._pages_to_corrupt = 0

    def is_idle(self, now_s: float) -> bool:
        """Return whether no fault is active at `now_s`."""
        return not self._pages_to_corrupt and all(
            hold.until_s <= now_s for hold in self._holds.values()
        )

    def rate(self, node: NodeId, usual_bytes_per_s: float | None, now_s: float) -> LinkRate:
        """Return the link's present rate, and the time until which it holds: an active fault's rate
        replaces the usual one.
        """
        hold = self._holds.get(node) if self._holds else None
        return (
            hold if hold is not None and now_s < hold.until_s else LinkRate(usual_bytes_per_s, inf)
        )

    def payload(self, page: memoryview) -> memoryview:
        """Return the bytes to send for a checksummed page: a copy with one bit flipped while pages
        are to be corrupted, else the page.
        """
        if not self._pages_to_corrupt:
            return page
        self._pages_to_corrupt -= 1
        damaged = bytearray(page)
        damaged[len(damaged) // 2] ^= 1
        return memoryview(damaged)


# Largest lateness of a turn whose missed bytes are still made up for: GCRA's tolerance, which
# bounds a burst. It exceeds the usual lateness of a timer.
_CATCH_UP_S = 0.02

_CHUNK_S = 0.005
_MIN_CHUNK_BYTES = 64
_MAX_CHUNK_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class Turn:
    """A transfer's place in the queue for sending; it may send once `granted_bytes` is not 0."""

    traffic: TrafficClass
    wanted_bytes: int
    granted_bytes: int = 0


class LinkTurns:
    """The turns of one link, shared by all its transfers. Without a rate every turn is granted at
    once, except that checkpoints wait while a hand-off or a recovery is open.
    """

    def __init__(self) -> None:
        self._bytes_per_s: float | None = None  # Rate limit; None: unlimited; 0: cut.
        self._used_until_s = float("-inf")
        self._waiting: dict[TrafficClass, deque[Turn]] = {
            traffic: deque() for traffic in TrafficClass
        }
        self._open = dict.fromkeys(TrafficClass, 0)

    @property
    def has_waiting(self) -> bool:
        return any(self._waiting.values())

    @property
    def is_cut(self) -> bool:
        return self._bytes_per_s == 0

    def set_rate(self, bytes_per_s: float | None, now_s: float) -> None:
        """Set the link's rate from now on; None: unlimited; 0: cut."""
        if bytes_per_s != self._bytes_per_s:
            # The state begins anew: credit and debt at the old rate would not be those at the new
            # one.
            self._bytes_per_s, self._used_until_s = bytes_per_s, now_s

    def begin(self, traffic: TrafficClass) -> None:
        """Note that a transfer of this class begins; it may ask for turns until `end` is called for
        it.
        """
        self._open[traffic] += 1

    def end(self, traffic: TrafficClass) -> None:
        self._open[traffic] -= 1
        assert self._open[traffic] >= 0

    def ask(self, traffic: TrafficClass, wanted_bytes: int, now_s: float) -> Turn:
        """Queue for the right to send up to `wanted_bytes`; the caller then calls `grant`."""
        assert wanted_bytes > 0
        # An idle link earns no credit, which would let probes and short transfers exceed the limit.
        # A link whose senders are late by less than the tolerance was not idle.
        if not self.has_waiting and now_s - self._used_until_s > _CATCH_UP_S:
            self._used_until_s = now_s
        turn = Turn(traffic, wanted_bytes)
        self._waiting[traffic].append(turn)
        return turn

    def withdraw(self, turn: Turn) -> None:
        """Remove an ungranted turn."""
        self._waiting[turn.traffic].remove(turn)

    def grant(self, now_s: float) -> list[Turn]:
        """Grant all turns that are due, in the order in which they may send; each for at least one
        byte and at most what it wanted.

        In any span of T seconds at most `(T + 0.02) * bytes_per_s` bytes and one chunk are granted.
        """
        if self._bytes_per_s is None:
            return self._grant_freely()
        granted: list[Turn] = []
        while (due_s := self.next_s()) is not None and due_s <= now_s:
            # Bytes missed by a late grant are made up for in equal shares of the class's waiting
            # transfers: otherwise the first would always get all.
            self._used_until_s += max(0.0, now_s - due_s - _CATCH_UP_S)
            queue = self._first_queue()
            late_bytes = int((now_s - self._used_until_s) * self._bytes_per_s / len(queue))
            turn = queue.popleft()
            turn.granted_bytes = min(turn.wanted_bytes, max(late_bytes, self._chunk_bytes()))
            self._used_until_s += turn.granted_bytes / self._bytes_per_s
            granted.append(turn)
        return granted

    def next_s(self) -> float | None:
        """Return the time at which the next turn is due; None: no transfer waits, or the link is
        cut or unlimited.
        """
        if not self._bytes_per_s or not (queue := self._first_queue()):
            return None
        return (
            self._used_until_s + min(queue[0].wanted_bytes, self._chunk_bytes()) / self._bytes_per_s
        )

    def grant_keepalive(self, turn: Turn, now_s: float) -> bool:
        """Grant one byte out of turn, at the expense of later ones, as a keepalive for a peer whose
        transfer waits.

        Returns False, without effect, where the link is cut or already used beyond `now_s`.
        """
        if self.is_cut or self._used_until_s > now_s:
            return False
        self.withdraw(turn)
        turn.granted_bytes = 1
        if self._bytes_per_s is not None:
            self._used_until_s += 1 / self._bytes_per_s
        return True

    def _grant_freely(self) -> list[Turn]:
        granted = [*self._waiting[TrafficClass.RECOVERY], *self._waiting[TrafficClass.HANDOFF]]
        self._waiting[TrafficClass.HANDOFF].clear()
        self._waiting[TrafficClass.RECOVERY].clear()
        for turn in granted:
            turn.granted_bytes = turn.wanted_bytes
        if self._open[TrafficClass.HANDOFF] + self._open[TrafficClass.RECOVERY] == 0:
            checkpoints = self._waiting[TrafficClass.CHECKPOINT]
            for turn in checkpoints:
                # Grant a piece at a time, so that a higher class does not wait for gigabytes.
                turn.granted_bytes = min(turn.wanted_bytes, _MAX_CHUNK_BYTES)
            granted += checkpoints
            checkpoints.clear()
        return granted

    def _first_queue(self) -> deque[Turn]:
        """Return the queue of the highest class with a waiting transfer, or an empty queue."""
        return next(
            (queue for queue in self._waiting.values() if queue),
            self._waiting[TrafficClass.CHECKPOINT],
        )

    def _chunk_bytes(self) -> int:
        """Return the most bytes of a turn that is not late: few, so that transfers alternate and
        the rate is even.
        """
        assert self._bytes_per_s
        return int(min(max(self._bytes_per_s * _CHUNK_S, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES))
