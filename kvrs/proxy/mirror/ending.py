"""The decisions of a proxy that ends: whether it waits, and for what. Pure.

WAIT ──▶ ASK ──▶ HAND_OVER ──▶ CLOSE
          ▲          │
          └──────────┘ another peer is there, which seems to stay
"""

from enum import Enum, auto
from typing import NamedTuple

# Proxies that are told to end within so long know it of each other before they hand anything over.
TOGETHER_S = 0.5
# Records that no peer has are copied for so long after the last stream, or the end of the drain.
COPIED_WITHIN_S = 2.0


class EndStep(Enum):
    """The next step of a proxy that ends. Behind each but the last it decides again."""

    WAIT = auto()  # Peers may have been told to end at the same moment.
    ASK = auto()  # Each peer, whether it stays.
    HAND_OVER = auto()  # Streams and records to peers that stay, while clients are served.
    CLOSE = auto()


class Left(NamedTuple):
    """The streams and records of a proxy that ends, and the peers that could take them."""

    streams: int  # Of clients that are served here.
    away: int  # Streams of clients that may be about to resume them here.
    uncopied: int  # Records that no live peer has: they would be lost with this process.
    has_peers: bool
    staying: frozenset[str]  # The peers that go on, as far as is known.


class Ending:
    """The end of one proxy: `told_s` is when it told its peers, `until_s` the end of
    `proxy.drain_s`.
    """

    def __init__(self, told_s: float, until_s: float) -> None:
        self._together_until_s = told_s + TOGETHER_S
        self._until_s = until_s
        self._used_s: float | None = None  # When a client was last waited for.
        self._asked: frozenset[str] = frozenset()

    def next_step(self, left: Left, now_s: float) -> EndStep:
        """Return the step for what is left at this moment."""
        if self._used_s is None and left.has_peers and now_s < self._together_until_s:
            return EndStep.WAIT
        if self._used_s is None:
            self._used_s = now_s
        unasked, self._asked = left.staying - self._asked, left.staying
        if unasked:
            return EndStep.ASK
        if (left.streams or left.away) and now_s < self._until_s:
            self._used_s = now_s
            return EndStep.HAND_OVER
        is_copying = left.staying and left.uncopied and now_s < self._used_s + COPIED_WITHIN_S
        return EndStep.HAND_OVER if is_copying else EndStep.CLOSE
