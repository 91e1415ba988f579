"""Faults injected into the pages that a process serves and pushes.

Pure: `now_s` is an argument. No fault is ever set unless the configuration allows it.
"""

from dataclasses import dataclass
from math import inf

from kvrs.ids import NodeId


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
