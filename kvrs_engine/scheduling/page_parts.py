"""Pages whose cells arrive in parts from other instances, or are lent to other instances."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvrs.ids import StreamId
from kvrs.protocol.pages import Cell, Tag
from kvrs_engine.scheduling.damaged_pages import DamagedPages

Cells = frozenset[Cell]


class OwnedPages(Protocol):
    """`kvrs_engine.scheduling.pages.PageManager`."""

    damaged: DamagedPages

    @property
    def references(self) -> Sequence[int]: ...

    def pin(self, page: int, *, as_replica: bool = False) -> None: ...
    def release(self, pages: Sequence[int]) -> None: ...
    def allocate_replica(self, stream: StreamId) -> int | None: ...


class PageParts:
    """Handles partial and lent pages for the page manager. A page that lacks cells is a damaged
    page.
    """

    def __init__(
        self,
        pages: OwnedPages,
        tags: list[Tag | None],
        page_by_tag: dict[Tag, int],
        soft_pins: Sequence[int],
    ) -> None:
        """`tags` and `soft_pins` have an entry per page; `page_by_tag` has the whole pages."""
        self._pages, self._tags, self._page_by_tag = pages, tags, page_by_tag
        self._soft_pins = soft_pins
        self.lent: set[int] = set()  # Lent pages that keep their tag for their other cells.

    def has(self, tag: Tag, cells: Cells) -> bool:
        """Return whether a page of this tag has these cells."""
        if tag in self._page_by_tag:
            return True
        damaged = self._pages.damaged
        page = damaged.by_tag.get(tag)
        return page is not None and not cells & damaged.gone(page)

    def expect(self, stream: StreamId, tag: Tag, whole: Cells) -> int | None:
        """Pin a page for cells of this tag that arrive in parts: the damaged page of the tag, or a
        new replica page that lacks all cells (`whole`). None: no page is free.
        """
        if (page := self._pages.damaged.by_tag.get(tag)) is not None:
            self._pages.pin(page, as_replica=True)
        elif (page := self._pages.allocate_replica(stream)) is not None:
            self._tags[page] = tag
            self._pages.damaged.begin(page, whole)
        return page

    def brought(self, page: int, tag: Tag, cells: Cells) -> None:
        """Note that these cells of a hard-pinned page have arrived; a page without missing cells is
        then found by its tag.
        """
        damaged = self._pages.damaged
        assert self._pages.references[page] > 0, f"page {page} is written without a hard pin"
        if damaged.by_tag.get(tag) != page:
            return
        damaged.brought(page, cells)
        if damaged.gone(page):
            return
        damaged.end(page)
        if self._page_by_tag.setdefault(tag, page) != page:
            self._tags[page] = None  # An equal page was computed meanwhile.

    def leave(self, page: int, whole: Cells) -> None:
        """Release a page of `expect`; a page without any arrived cell is not kept."""
        damaged = self._pages.damaged
        if self._pages.references[page] == 1 and page in damaged and damaged.gone(page) == whole:
            damaged.spoil(page)
        self._pages.release([page])

    def lend(
        self, tag: Tag, cells: Cells, loans: Mapping[int, int] = {}, *, spare: bool = True
    ) -> tuple[int, bool] | None:
        """Pin and lend the page that has these cells of the tag; return the page, and whether it is
        in use here. None: no page has them.

        A page that is not in use lacks the lent cells from now on. `loans` is the number of pins by
        page that belong to loans of other cells; without `spare`, pages outside `loans` count as in
        use.
        """
        page, damaged = self._page_by_tag.get(tag), self._pages.damaged
        is_whole = page is not None
        if page is None:
            page = damaged.by_tag.get(tag)
        if page is None or not self.has(tag, cells):
            return None
        in_use = not (spare or page in loans) or not self.is_lent_only(page, loans.get(page, 0))
        self._pages.pin(page)
        if in_use:
            return page, True
        if not is_whole:
            damaged.lack(page, cells)
        else:
            del self._page_by_tag[tag]
            if tag in damaged.by_tag:  # Another page of the tag is already damaged.
                self._tags[page] = None
                return page, False
            damaged.begin(page, cells)
        self.lent.add(page)
        return page, False

    def is_lent_only(self, page: int, loans: int) -> bool:
        """Return whether the page has no pins other than those of `loans` loans."""
        return self._pages.references[page] == loans and not self._soft_pins[page]

    def lend_again(self, page: int, cells: Cells) -> None:
        """Pin a lent page once more and lend these cells too, whatever they contain."""
        self._pages.pin(page)
        if page in self._pages.damaged:
            self._pages.damaged.lack(page, cells)
