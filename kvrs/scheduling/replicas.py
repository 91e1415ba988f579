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
        self._stream_of: dict[int, StreamId] = {}
        # Of each stream its pages as they came, also those that still arrive: True has no pin.
        self._pages: OrderedDict[StreamId, dict[int, bool]] = OrderedDict()
        self._idle = 0

    def __len__(self) -> int:
        return len(self._stream_of)

    def __contains__(self, page: int) -> bool:
        """The page is a replica without a pin."""
        stream = self._stream_of.get(page)
        return stream is not None and self._pages[stream][page]

    def __bool__(self) -> bool:
        """There is one without a pin."""
        return bool(self._idle)

    def bring(self, page: int, stream: StreamId) -> None:
        """The stream's next page arrives in this one, which has a pin until it has."""
        assert page not in self._stream_of
        self._stream_of[page] = stream
        self._pages.setdefault(stream, {})[page] = False
        self._pages.move_to_end(stream)

    def settle(self, page: int) -> bool:
        """The page has lost its last pin. Returns whether it is a replica."""
        if (stream := self._stream_of.get(page)) is None:
            return False
        self._pages[stream][page] = True
        self._idle += 1
        return True

    def leave(self, page: int) -> None:
        """The page is an own stream's, or did not arrive: no replica, if it was one."""
        if (stream := self._stream_of.pop(page, None)) is None:
            return
        pages = self._pages[stream]
        self._idle -= pages.pop(page)
        if not pages:
            del self._pages[stream]

    def victim(self, besides: StreamId | None = None) -> int | None:
        """Give up the page that is to go first, of a stream other than `besides`."""
        for stream, pages in self._pages.items():
            if stream == besides:
                continue
            # Those that still arrive are the last, and few.
            page = next((page for page in reversed(pages) if pages[page]), None)
            if page is not None:
                self.leave(page)
                self.dropped += 1
                self.lost[stream] = None
                return page
        return None

    def clear(self) -> list[int]:
        """No page is a replica any more; returns those without a pin."""
        idle = [page for pages in self._pages.values() for page in pages if pages[page]]
        self.lost |= dict.fromkeys(self._pages)
        self._pages.clear()
        self._stream_of.clear()
        self._idle = 0
        return idle

    def check(self) -> None:
        """Assert that the books agree."""
        assert all(self._pages.values()), "a stream without pages"
        listed = {page: stream for stream, pages in self._pages.items() for page in pages}
        assert listed == self._stream_of, "a replica of two streams, or of none"
        assert self._idle == sum(sum(pages.values()) for pages in self._pages.values())
        assert len(self) <= self.most, "more replicas than are allowed"
