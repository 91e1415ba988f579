"""Pages of other instances' streams that a pool keeps for them, and the order in which it gives
them up (KevlarFlow: the replica of a neighbour, evicted before the own cache).

The stream that has brought nothing for longest loses its pages first, and each its last page first:
what is left of a history is always its front. A page that the own streams have used is a page of
the own cache, and no replica any more.
"""

from collections import OrderedDict

from kvrs.ids import StreamId


class ReplicaPages:
    """Which pages are replicas, and of which stream. At most `most` are kept; 0: none."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.dropped = 0  # Given up since the start.
        # Streams that have lost pages; whoever reports them takes them out.
        self.lost: dict[StreamId, None] = {}
        self._stream_of: dict[int, StreamId] = {}  # Pages that still arrive included.
        # Of each stream the pages without a pin, in their order.
        self._idle: OrderedDict[StreamId, dict[int, None]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stream_of)

    def __contains__(self, page: int) -> bool:
        """The page is a replica without a pin."""
        stream = self._stream_of.get(page)
        return stream is not None and page in self._idle.get(stream, ())

    @property
    def has_victim(self) -> bool:
        return bool(self._idle)

    def bring(self, page: int, stream: StreamId) -> None:
        """The stream's next page arrives in this one, which has a pin until it has."""
        assert page not in self._stream_of
        self._stream_of[page] = stream
        if stream in self._idle:
            self._idle.move_to_end(stream)

    def settle(self, page: int) -> bool:
        """The page has lost its last pin. Returns whether it is a replica."""
        if (stream := self._stream_of.get(page)) is None:
            return False
        self._idle.setdefault(stream, {})[page] = None
        return True

    def leave(self, page: int) -> None:
        """The page is an own stream's, or did not arrive: no replica, if it was one."""
        if (stream := self._stream_of.pop(page, None)) is not None:
            self._take_out(page, stream)

    def victim(self, besides: StreamId | None = None) -> int | None:
        """Give up the page that is to go first, of a stream other than `besides`."""
        stream = next((each for each in self._idle if each != besides), None)
        if stream is None:
            return None
        page = next(reversed(self._idle[stream]))
        self.leave(page)
        self.dropped += 1
        self.lost[stream] = None
        return page

    def clear(self) -> list[int]:
        """No page is a replica any more; returns those without a pin."""
        idle = [page for pages in self._idle.values() for page in pages]
        self.lost |= dict.fromkeys(self._idle)
        self._idle.clear()
        self._stream_of.clear()
        return idle

    def _take_out(self, page: int, stream: StreamId) -> None:
        if (pages := self._idle.get(stream)) is not None:
            pages.pop(page, None)
            if not pages:
                del self._idle[stream]

    def check(self, idle: set[int]) -> None:
        """Assert that the books agree, and that these are all replicas without a pin."""
        assert all(self._idle.values()), "a stream without pages"
        listed = [page for pages in self._idle.values() for page in pages]
        assert len(listed) == len(set(listed)), "a page is twice a replica"
        assert set(listed) == idle, "replicas without a pin do not add up"
        for stream, pages in self._idle.items():
            assert all(self._stream_of[page] == stream for page in pages)
        assert len(self) <= max(self.most, 0), "more replicas than are allowed"
