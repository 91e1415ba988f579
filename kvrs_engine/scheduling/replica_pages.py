"""Replica pages: pages of other instances' streams in the own pool, and the order of their eviction
(KevlarFlow: replicas of a neighbour are evicted before the own cache).

The stream without new pages for longest loses its pages first, from the last page to the first, so
that the front of a history is left. A replica that an own stream uses becomes a page of the own
cache.
"""

from collections import OrderedDict

from kvrs.ids import StreamId


class ReplicaPages:
    """Records the replica pages and their streams, at most `most` pages; 0: no replicas."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.dropped = 0  # Number of evicted replicas since the start.
        self.lost: dict[StreamId, None] = {}  # Streams that have lost pages since the last report.
        self._stream_of: dict[int, StreamId] = {}
        # Pages of each stream in order of arrival; True: without a pin, False: still arriving.
        self._pages: OrderedDict[StreamId, dict[int, bool]] = OrderedDict()
        self._idle = 0

    def __len__(self) -> int:
        return len(self._stream_of)

    def __contains__(self, page: int) -> bool:
        """Return whether the page is a replica without a pin."""
        stream = self._stream_of.get(page)
        return stream is not None and self._pages[stream][page]

    @property
    def idle(self) -> int:
        """Number of replicas without a pin, which is all that have arrived."""
        return self._idle

    def __bool__(self) -> bool:
        """Return whether any replica has no pin."""
        return bool(self._idle)

    def bring(self, page: int, stream: StreamId) -> None:
        """Add a pinned page into which the stream's next page arrives."""
        assert page not in self._stream_of
        self._stream_of[page] = stream
        self._pages.setdefault(stream, {})[page] = False
        self._pages.move_to_end(stream)

    def settle(self, page: int) -> bool:
        """Note that the page has lost its last pin; return whether it is a replica."""
        if (stream := self._stream_of.get(page)) is None:
            return False
        self._pages[stream][page] = True
        self._idle += 1
        return True

    def unsettle(self, page: int) -> None:
        """Note that the page is pinned again, because more cells arrive."""
        if (stream := self._stream_of.get(page)) is not None:
            self._pages[stream][page] = False
            self._idle -= 1

    def leave(self, page: int) -> None:
        """Remove the page, if a replica: an own stream uses it, or it did not arrive."""
        if (stream := self._stream_of.pop(page, None)) is None:
            return
        pages = self._pages[stream]
        self._idle -= pages.pop(page)
        if not pages:
            del self._pages[stream]

    def victim(self, besides: StreamId | None = None) -> int | None:
        """Evict and return the first replica in order, except those of `besides`; None: no replica
        without a pin.
        """
        for stream, pages in self._pages.items():
            if stream == besides:
                continue
            # The last pages may still be arriving.
            page = next((page for page in reversed(pages) if pages[page]), None)
            if page is not None:
                self.leave(page)
                self.dropped += 1
                self.lost[stream] = None
                return page
        return None

    def clear(self) -> list[int]:
        """Remove all replicas; return the pages without a pin."""
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
