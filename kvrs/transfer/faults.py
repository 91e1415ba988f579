"""Faults on purpose, in what one instance sends: its page server asks here before every piece.

Pure: `now_s` is an argument. Nothing is ever set here unless the configuration allows faults.
"""

from dataclasses import dataclass

from kvrs.ids import NodeId
from kvrs.transfer.limiter import RateLimiter


@dataclass(frozen=True, slots=True)
class _Hold:
    limiter: RateLimiter | None  # None: the link is cut.
    until_s: float


class SendingFaults:
    """Links that are slower than they should be, or cut; and pages that lose a bit on their way."""

    def __init__(self) -> None:
        self._holds: dict[NodeId, _Hold] = {}
        self._pages_to_corrupt = 0

    def hold(self, node: NodeId, bytes_per_s: float, until_s: float) -> None:
        """Send at most this much to a node; 0 cuts the link. Replaces an earlier hold of the same link."""
        self._holds[node] = _Hold(RateLimiter(bytes_per_s) if bytes_per_s else None, until_s)

    def corrupt(self, pages: int) -> None:
        self._pages_to_corrupt += pages

    def clear(self) -> None:
        self._holds.clear()
        self._pages_to_corrupt = 0

    def limiter(self, node: NodeId, usual: RateLimiter | None, now_s: float) -> RateLimiter | None:
        """What paces the link right now: the fault's limiter in place of the usual one, while there is a fault."""
        hold = self._current(node, now_s)
        return usual if hold is None else hold.limiter

    def cut_for_s(self, node: NodeId, now_s: float) -> float:
        """How long the link stays cut; 0 when it is not."""
        hold = self._current(node, now_s)
        return hold.until_s - now_s if hold is not None and hold.limiter is None else 0.0

    def payload(self, page: memoryview) -> memoryview:
        """What goes over the wire for a page whose checksum was taken: a copy with one bit flipped, while pages are to be hit."""
        if not self._pages_to_corrupt:
            return page
        self._pages_to_corrupt -= 1
        damaged = bytearray(page)
        damaged[len(damaged) // 2] ^= 1
        return memoryview(damaged)

    def _current(self, node: NodeId, now_s: float) -> _Hold | None:
        hold = self._holds.get(node) if self._holds else None
        return hold if hold is not None and now_s < hold.until_s else None
