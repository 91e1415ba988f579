"""Decisions of a proxy that ends: what it waits for, and when it hands over. Pure.

WAIT ──▶ ASK ──▶ HAND_OVER ──▶ CLOSE
          ▲          │
          └──────────┘ another peer is there, which seems to stay
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

# Time for which an ending proxy waits before it hands over: proxies that are told to end within
# this time then know it of each other.
TOGETHER_S = 0.5
# Longest time for copies of records that no peer has, after the last stream or the end of the
# drain.
COPIED_WITHIN_S = 2.0
# Number of requests to a peer that seems to stay: a peer that was paused may answer the first one
# before it has read its own signal to end.
_ASKED = 2


class EndStep(Enum):
    """Next step of a proxy that ends. After each step but the last the proxy decides again."""

    WAIT = auto()  # Peers may have been told to end at the same time.
    ASK = auto()  # Ask each peer once whether it stays.
    HAND_OVER = auto()  # Hand streams and records over to staying peers, while clients are served.
    CLOSE = auto()


class Left(NamedTuple):
    """Streams and records of a proxy that ends, and the peers that could take them."""

    streams: int  # Number of streams of clients that are served here.
    away: int  # Number of streams whose clients may be about to resume them here.
    # Number of records that no live peer has, and that would be lost with this process.
    uncopied: int
    has_peers: bool
    staying: frozenset[str]  # Peers that are not known to end.


class Ending:
    """Decides the end of one proxy. `told_s`: time at which it told its peers; `until_s`: end of
    `proxy.drain_s`.
    """

    def __init__(self, told_s: float, until_s: float) -> None:
        self._together_until_s = told_s + TOGETHER_S
        self._until_s = until_s
        # Last time at which a client was waited for; None: not decided yet.
        self._used_s: float | None = None
        self._asked: Mapping[str, int] = {}  # Requests to each peer since it was last away.

    def next_step(self, left: Left, now_s: float) -> EndStep:
        """Return the next step, by the streams, records and peers that are left now."""
        if self._used_s is None and left.has_peers and now_s < self._together_until_s:
            return EndStep.WAIT
        if self._used_s is None:
            self._used_s = now_s
        asked = {peer: self._asked.get(peer, 0) for peer in left.staying}
        if min(asked.values(), default=_ASKED) < _ASKED:
            self._asked = {peer: count + 1 for peer, count in asked.items()}
            return EndStep.ASK
        self._asked = asked
        if (left.streams or left.away) and now_s < self._until_s:
            self._used_s = now_s
            return EndStep.HAND_OVER
        is_copying = left.staying and left.uncopied and now_s < self._used_s + COPIED_WITHIN_S
        return EndStep.HAND_OVER if is_copying else EndStep.CLOSE
