"""Leases on retained pages, and the order in which they end."""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from kvrs.ids import StreamId


@dataclass(slots=True, eq=False)
class PageLease:
    key: StreamId
    pages: list[int]  # Intact leading pages; memory pressure removes pages from the end.
    tokens: int
    until_s: float


class LeaseEnds:
    """A heap of leases by their end, with lazy updates.

    Entries are (until_s, sequence number, lease). A renewal does not change the entry, so the time
    of an entry is a lower bound; the entry of a deleted lease stays until it is at the top.
    """

    def __init__(self, leases: Mapping[StreamId, PageLease]) -> None:
        self._leases = leases
        self._ends: list[tuple[float, int, PageLease]] = []
        self._entries_made = 0

    def add(self, lease: PageLease) -> None:
        heappush(self._ends, self._entry(lease))
        # Rebuild a heap of which more than half are entries of leases that ended early.
        if len(self._ends) > 2 * len(self._leases) + 64:
            self._ends = [self._entry(lease) for lease in self._leases.values()]
            heapify(self._ends)

    def first(self) -> PageLease | None:
        while self._ends:
            until_s, _, lease = self._ends[0]
            if self._leases.get(lease.key) is not lease:
                heappop(self._ends)
            elif lease.until_s != until_s:
                heapreplace(self._ends, self._entry(lease))
            else:
                return lease
        return None

    def check(self) -> None:
        alive = {id(lease) for _, _, lease in self._ends}
        assert all(id(lease) in alive for lease in self._leases.values()), (
            "a lease that would never end"
        )
        assert all(until_s <= lease.until_s for until_s, _, lease in self._ends)

    def _entry(self, lease: PageLease) -> tuple[float, int, PageLease]:
        self._entries_made += 1
        return lease.until_s, self._entries_made, lease
