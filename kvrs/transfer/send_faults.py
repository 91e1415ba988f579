"""Faults injected into what one process sends: pages that it serves and pages that it pushes.

Pure: `now_s` is an argument. No fault is ever set unless the configuration allows it.
"""

from dataclasses import dataclass
from math import inf

from kvrs.ids import NodeId


@dataclass(frozen=True, slots=True)
class LinkRate:
    bytes_per_s: float | None  # None: as fast as it goes; 0: the link is cut.
    until_s: float


class SendingFaults:
    """Links that are slowed down or cut, and pages in which a bit is flipped on their way."""

    def __init__(self) -> None:
        self._holds: dict[NodeId, LinkRate] = {}
        self._pages_to_corrupt = 0

    def hold(self, node: NodeId, bytes_per_s: float, until_s: float) -> None:
        """Send at most this much to a node; 0 cuts the link. Replaces an earlier hold of the same
        link.
        """
        self._holds[node] = LinkRate(bytes_per_s, until_s)

    def corrupt(self, pages: int) -> None:
        self._pages_to_corrupt += pages

    def clear(self) -> None:
        self._holds.clear()
        self._pages_to_corrupt = 0

    def is_idle(self, now_s: float) -> bool:
        """There is no fault at this moment."""
        return not self._pages_to_corrupt and all(
            hold.until_s <= now_s for hold in self._holds.values()
        )

    def rate(self, node: NodeId, usual_bytes_per_s: float | None, now_s: float) -> LinkRate:
        """The rate of the link at this moment, and its end: the fault's rate in place of the usual
        one.
        """
        hold = self._holds.get(node) if self._holds else None
        return (
            hold if hold is not None and now_s < hold.until_s else LinkRate(usual_bytes_per_s, inf)
        )

    def payload(self, page: memoryview) -> memoryview:
        """The bytes to send for a page whose checksum was taken: a copy with one bit flipped, while
        pages are to be corrupted.
        """
        if not self._pages_to_corrupt:
            return page
        self._pages_to_corrupt -= 1
        damaged = bytearray(page)
        damaged[len(damaged) // 2] ^= 1
        return memoryview(damaged)
