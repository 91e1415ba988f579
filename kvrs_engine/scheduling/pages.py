"""Ownership of KV pages, and the prefix cache over their tags.

Paged KV as in PagedAttention (vLLM, SOSP 2023): pages have reference counts, are found by the hash
of their prefix, and are evicted least recently released first. Leases on retained pages are an
addition.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvrs.ids import StreamId
from kvrs.protocol.pages import Cell, Tag
from kvrs.release_order import ReleaseOrder, shared
from kvrs_engine.scheduling.damaged_pages import DamagedPages
from kvrs_engine.scheduling.page_leases import LeaseEnds, PageLease
from kvrs_engine.scheduling.page_parts import PageParts
from kvrs_engine.scheduling.replica_pages import ReplicaPages

# A page is in exactly one state. References are hard pins (of a sequence that computes, of a
# transfer to a peer); soft pins are leases, which memory pressure can end.
#
#   state         references   leases   tag    kept in        allocated
#   free               0          0     none   _free          first
#   replica            0          0     yes    replicas       second, see replica_pages.py
#   cached             0          0     yes    _cached        third, least recently released first
#   damaged            0          0     yes    _cached        as cached
#   soft-pinned        0         >= 1   any    _leases[...]   last: tail of the first to expire
#   hard-pinned      >= 1        any    any    (its owners)   never
#
#   from          event                                  to
#   free          allocate                               hard-pinned
#   replica       allocate (its tag is forgotten)        hard-pinned
#   replica       match, pin, lend (a replica no more)   hard-pinned
#   replica       expect                                 hard-pinned
#   cached        allocate (its tag is forgotten)        hard-pinned
#   cached        match, pin, lend                       hard-pinned
#   cached        lose                                   damaged
#   damaged       mend, expect, lend                     hard-pinned
#   soft-pinned   match, pin                             hard-pinned
#   hard-pinned   last reference gone, leased            soft-pinned
#   hard-pinned   last reference gone, of a replica      replica
#   hard-pinned   last reference gone, else tagged       cached
#   hard-pinned   last reference gone, else              free
#   soft-pinned   last lease ends, or gives the page up  cached if tagged, else free
#
# A soft-pinned page without a tag is the partial last page of a hand-off, found by its lease only.
# A damaged page lacks cells: it is found by `mend` only, until it is registered again, spoiled, or
# complete. It may be a partially arrived replica, a lent page, or hard-pinned. One owner at a time
# restores it; earlier owners may only read it, or write the content that its tag names.

# Lease on the pages of a stream that was moved from a draining instance: its next attempt fetches
# them at once or never.
MOVED_KEPT_S = 5.0


class PageRecords(Protocol):
    """Records whole pages for the next process; implemented by
    `kvrs.transfer.anchors.PageLedger`.
    """

    def record(self, page: int, tag: Tag, parent: Tag) -> None: ...

    def clear(self, page: int) -> None: ...


class PageManager:
    """Manages the pages of one pool. Every operation takes O(1) time per page, and those on leases
    O(log leases) more.
    """

    def __init__(
        self, pages: int, page_size_tokens: int, records: PageRecords | None = None
    ) -> None:
        self.pages = pages
        self.page_size_tokens = page_size_tokens
        self._records = records
        self.references = array("I", [0]) * pages
        self._soft_pins = array("I", [0]) * pages  # Number of leases on the page.
        self._tags: list[Tag | None] = [None] * pages
        # Base of the sequence that filled the page. Pages of different bases have the cells of
        # spread heads on different ranks, so a sequence uses pages of one base.
        self.bases = array("I", [0]) * pages
        self._page_by_tag: dict[Tag, int] = {}
        self.damaged = DamagedPages(self._tags)
        self._free = array("I", range(pages - 1, -1, -1))
        self.replicas = ReplicaPages()
        self._cached = ReleaseOrder()
        self._hard_pinned = 0
        self._leases: dict[StreamId, PageLease] = {}
        self._ends = LeaseEnds(self._leases)
        self.parts = PageParts(self, self._tags, self._page_by_tag, self._soft_pins)

    @property
    def free_pages(self) -> int:
        """Number of pages without a hard pin, which `allocate` could return."""
        return self.pages - self._hard_pinned

    @property
    def leased_pages(self) -> int:
        """Number of pages that only a lease keeps."""
        return self.free_pages - len(self._free) - self.replicas.idle - len(self._cached)

    def holds(self, tag: Tag) -> bool:
        """Return whether a whole page has the tag."""
        return tag in self._page_by_tag

    # Hard pins.

    def match(self, tags: Iterable[Tag]) -> list[int]:
        """Pin and return the pages of the longest prefix of `tags` that is held with one base."""
        found: list[int] = []
        for tag in tags:
            page = self._page_by_tag.get(tag)
            if page is None or (found and self.bases[page] != self.bases[found[0]]):
                break
            self.pin(page)
            found.append(page)
        return found

    def allocate(
        self, count: int, base: int = 0, spare_left: int | None = None
    ) -> list[int] | None:
        """Return `count` empty pages with a hard pin each, or None, changing nothing. With
        `spare_left` no page is evicted, and this number of free pages must be left.
        """
        if count > self.free_pages:
            return None
        if spare_left is not None and len(self._free) < count + spare_left:
            return None
        if 0 < count <= len(self._free):
            pages = [*map(shared, self._free[: -count - 1 : -1])]
            del self._free[-count:]
        else:
            pages = [shared(self._take()) for _ in range(count)]
        for page in pages:
            self.references[page], self.bases[page] = 1, base
        self._hard_pinned += count
        return pages

    def allocate_replica(self, stream: StreamId) -> int | None:
        """Return a page with a hard pin for a replica of the stream's page; None: no page is free.

        The page is a free one, else the oldest cached one; at the limit of replicas, another
        stream's replica.
        """
        replicas = self.replicas
        if len(replicas) >= replicas.most:
            if (page := replicas.victim(besides=stream)) is None:
                return None
            self._forget(page)
        elif self._free:
            page = self._free.pop()
        elif self._cached:
            page = self._forget(self._cached.pop_first())
        else:
            return None
        page = shared(page)
        self.references[page], self.bases[page] = 1, 0
        self._hard_pinned += 1
        replicas.bring(page, stream)
        return page

    def register(self, page: int, tag: Tag, parent: Tag | None = None) -> int:
        """Register a full, computed page under its tag; `parent` is the previous page's tag.

        Returns the page to use: an equal page with the same base if one was registered before, and
        then `page` stays private to its owner, as it does if the registered page has another base.
        """
        assert self.references[page] > 0, f"page {page} is registered without a hard pin"
        if page in self.damaged:
            assert self.damaged.is_mended(page), f"page {page} lacks cells"
            self.damaged.spoil(page)
        found = self._page_by_tag.setdefault(tag, page)
        if self.bases[found] != self.bases[page]:
            return page
        if found == page:
            assert self._tags[page] in (None, tag), f"page {page} changed its content"
            if self._records is not None and self._tags[page] is None:
                assert parent is not None, "a record needs the page before"
                self._records.record(page, tag, parent)
            self._tags[page] = tag
        return found

    def adopt(self, pages: Sequence[tuple[int, Tag]]) -> None:
        """Add whole pages of an earlier process to the cache of a new manager, least recently used
        first.
        """
        assert len(self._free) == self.pages, "pages are in use"
        for page, tag in pages:
            assert tag not in self._page_by_tag
            self._tags[page] = tag
            self._page_by_tag[tag] = page
            self._cached.add(page)
        self._free = array("I", (page for page in self._free if self._tags[page] is None))

    def pin(self, page: int, *, as_replica: bool = False) -> None:
        """Add a reference to a page that is not free; `as_replica`: a replica stays a replica."""
        if self.references[page] == 0:
            assert self._tags[page] is not None or self._soft_pins[page], (
                f"page {page} is free: there is nothing in it to pin"
            )
            self._hard_pinned += 1
            self._cached.discard(page)
            if as_replica:
                self.replicas.unsettle(page)
        if not as_replica:
            self.replicas.leave(page)
        self.references[page] += 1

    def disown(self, pages: Sequence[int]) -> None:
        """Remove the tags of hard-pinned pages whose content is wrong. Sequences that hold such a
        page keep it.
        """
        for page in pages:
            assert self.references[page] > 0, f"page {page} is disowned without a hard pin"
            if page not in self.damaged:
                self._forget(page)

    def release(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page, from the last to the first, so that eviction takes the
        tail of a history first.
        """
        references, lent = self.references, self.parts.lent
        for page in reversed(pages):
            left = references[page] - 1
            assert left >= 0, f"page {page} is released once too often"
            references[page] = left
            if not left:
                self._hard_pinned -= 1
                lent.discard(page)
                self._settle(page)

    # Leases.

    def retain(self, key: StreamId, pages: Sequence[int], tokens: int, until_s: float) -> None:
        """Lease `pages`, which have a history's first `tokens` tokens; the lease replaces an older
        lease of the same key.
        """
        assert len(pages) == -(-tokens // self.page_size_tokens) > 0, (
            f"{tokens} tokens do not fill {len(pages)} pages"
        )
        for page in pages:
            assert self.references[page] or self._soft_pins[page] or self._tags[page] is not None, (
                f"page {page} is free"
            )
            self._soft_pins[page] += 1
            self._cached.discard(page)
            self.replicas.leave(page)
        self.unretain([key])
        lease = PageLease(key, list(pages), tokens, until_s)
        self._leases[key] = lease
        self._ends.add(lease)

    def retained_page(self, key: StreamId, index: int) -> int | None:
        """Return the retained page at the index; None: not retained, or evicted."""
        lease = self._leases.get(key)
        return lease.pages[index] if lease is not None and 0 <= index < len(lease.pages) else None

    def retained_tokens(self, key: StreamId) -> int:
        """Return the number of intact leading tokens of a retained history."""
        lease = self._leases.get(key)
        return (
            min(lease.tokens, len(lease.pages) * self.page_size_tokens) if lease is not None else 0
        )

    def renew(self, keys: Iterable[StreamId], until_s: float) -> list[StreamId]:
        """Extend leases to `until_s`; return the keys without a lease."""
        unknown = []
        for key in keys:
            lease = self._leases.get(key)
            if lease is None:
                unknown.append(key)
            else:
                lease.until_s = max(lease.until_s, until_s)
        return unknown

    def unretain(self, keys: Iterable[StreamId]) -> None:
        """End leases; unknown keys are ignored, because their leases may have ended before."""
        for key in keys:
            lease = self._leases.pop(key, None)
            if lease is not None:
                for page in reversed(lease.pages):
                    self._settle(page, soft_pins=1)

    def expire(self, now_s: float) -> None:
        """End every lease that has expired."""
        while (lease := self._ends.first()) is not None and lease.until_s <= now_s:
            self.unretain([lease.key])

    def reset_cache(self) -> None:
        """Empty every page without a hard pin."""
        self.unretain(list(self._leases))
        self._cached.update(self.replicas.clear())
        while self._cached:
            self._free.append(self._forget(self._cached.pop_first()))

    # Lost cells.

    def lose(self, gone: Callable[[int], frozenset[Cell]]) -> None:
        """Mark pages that have lost cells as damaged, and end all leases. `gone` returns the lost
        cells of a page. Damaged pages can be restored by `mend`.
        """
        self.unretain(list(self._leases))
        self._cached.update(self.replicas.clear())
        for tag, page in [*self._page_by_tag.items()]:
            if not gone(page):
                continue
            del self._page_by_tag[tag]
            if self._records is not None:
                self._records.clear(page)
            before = self.damaged.by_tag.get(tag)
            if before is not None:  # An older damaged page, replaced by this one since.
                self.damaged.spoil(before)
                if before in self._cached:
                    self._cached.discard(before)
                    self._free.append(before)
            self.damaged.by_tag[tag] = page
        self.damaged.lose(gone)

    def mend(self, tag: Tag, base: int = 0) -> tuple[int, frozenset[Cell]] | None:
        """Pin the damaged page of this tag and base; return the page and its missing cells. None:
        there is no such page, or another owner restores it.
        """
        page = self.damaged.by_tag.get(tag)
        if page is None or page in self.parts.lent or self.bases[page] != base:
            return None
        if self.damaged.is_mended(page) and self.references[page]:
            return None
        self.pin(page)
        return page, self.damaged.mend(page)

    # Transitions.

    def _settle(self, page: int, soft_pins: int = 0) -> None:
        """Update the state of a page after it has lost a reference or `soft_pins` soft pins."""
        self._soft_pins[page] -= soft_pins
        if self.references[page] or self._soft_pins[page]:
            return
        if self._tags[page] is None:
            self.replicas.leave(page)
            self._free.append(page)
        elif not self.replicas.settle(page):
            self._cached.add(page)

    def _take(self) -> int:
        while not (self._free or self.replicas or self._cached):
            # The first lease to expire loses its last page. A page with a hard pin frees nothing
            # and still loses its soft pin: else the pages before it could not be taken.
            lease = self._ends.first()
            assert lease is not None, "free_pages counts a page that is in no list"
            last = lease.pages.pop()
            if not lease.pages:
                del self._leases[lease.key]
            self._settle(last, soft_pins=1)
        if self._free:
            return self._free.pop()
        page = self.replicas.victim()
        return self._forget(self._cached.pop_first() if page is None else page)

    def _forget(self, page: int) -> int:
        """Remove the tag of a page that is in no list."""
        self.damaged.spoil(page)
        tag = self._tags[page]
        if tag is None:
            return page
        self._tags[page] = None
        del self._page_by_tag[tag]
        if self._records is not None:
            self._records.clear(page)
        return page

    def check(self) -> None:
        """Assert that every page is in exactly one state and that all counters agree. O(pages)."""
        free, cached, soft_pins = set(self._free), set(self._cached), [0] * self.pages
        assert len(free) == len(self._free), "a page is twice in the free list"
        for lease in self._leases.values():
            assert lease.pages, "a lease on nothing"
            for page in lease.pages:
                soft_pins[page] += 1
        assert soft_pins == self._soft_pins.tolist(), "soft pins do not add up"
        assert self._hard_pinned == sum(1 for count in self.references if count), (
            "hard pins do not add up"
        )
        for page, tag in enumerate(self._tags):
            unpinned = not self.references[page] and not soft_pins[page]
            assert (page in free) == (unpinned and tag is None), f"page {page}: free list is wrong"
            assert (page in cached) + (page in self.replicas) == (unpinned and tag is not None), (
                f"page {page}: cache list is wrong"
            )
            by_tag = self.damaged.by_tag if page in self.damaged else self._page_by_tag
            assert tag is None or by_tag[tag] == page, f"page {page}: tag is wrong"
        assert len(self._page_by_tag) + len(self.damaged) == sum(
            1 for tag in self._tags if tag is not None
        ), "a tag leads nowhere"
        self.replicas.check()
        self.damaged.check()
        self._ends.check()
