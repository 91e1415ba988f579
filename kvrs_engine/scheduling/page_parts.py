"""Pages of which cells come from others one after the other, or are lent to others."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvrs.ids import StreamId
from kvrs.protocol.parts import Cell
from kvrs.protocol.tags import Tag
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
    """Part of the page manager. What lacks cells is a damaged page."""

    def __init__(
        self,
        pages: OwnedPages,
        tags: list[Tag | None],
        page_by_tag: dict[Tag, int],
        soft_pins: Sequence[int],
    ) -> None:
        """`tags`, `soft_pins`: of all pages; `page_by_tag`: those that are whole."""
        self._pages, self._tags, self._page_by_tag = pages, tags, page_by_tag
        self._soft_pins = soft_pins
        self.lent: set[int] = set()  # Pages of loans that keep their tag, for the other cells.

    def has(self, tag: Tag, cells: Cells) -> bool:
        """A page of that tag has these cells."""
        if tag in self._page_by_tag:
            return True
        damaged = self._pages.damaged
        page = damaged.by_tag.get(tag)
        return page is not None and not cells & damaged.gone(page)

    def expect(self, stream: StreamId, tag: Tag, whole: Cells) -> int | None:
        """A page with one more hard pin, into which cells of that tag come one after the other: a
        damaged one, or one as `allocate_replica` gives that lacks the `whole`. None: there is none.
        """
        if (page := self._pages.damaged.by_tag.get(tag)) is not None:
            self._pages.pin(page, as_replica=True)
        elif (page := self._pages.allocate_replica(stream)) is not None:
            self._tags[page] = tag
            self._pages.damaged.begin(page, whole)
        return page

    def brought(self, page: int, tag: Tag, cells: Cells) -> None:
        """These cells of a page with a hard pin have come; once a damaged page lacks none it is
        found by its tag.
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
            self._tags[page] = None  # An equal one was computed meanwhile.

    def leave(self, page: int, whole: Cells) -> None:
        """One reference less to a page of `expect`; nothing is kept of one of which nothing
        came.
        """
        damaged = self._pages.damaged
        if self._pages.references[page] == 1 and page in damaged and damaged.gone(page) == whole:
            damaged.spoil(page)
        self._pages.release([page])

    def lend(
        self, tag: Tag, cells: Cells, loans: Mapping[int, int] = {}, *, spare: bool = True
    ) -> tuple[int, bool] | None:
        """The page that has these cells of that tag, with one more hard pin, and whether it is in
        use here: if not, it lacks them from now on. None: there is none. `loans`: how many pins of
        pages are those of loans, of other cells; without `spare` all others count as in use.
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
            if tag in damaged.by_tag:  # Another page, which is less whole.
                self._tags[page] = None
                return page, False
            damaged.begin(page, cells)
        self.lent.add(page)
        return page, False

    def is_lent_only(self, page: int, loans: int) -> bool:
        """It has no pin but those of so many loans, or none."""
        return self._pages.references[page] == loans and not self._soft_pins[page]

    def lend_again(self, page: int, cells: Cells) -> None:
        """One more hard pin to a page of a loan of other cells: these are lent too, whatever is in
        them.
        """
        self._pages.pin(page)
        if page in self._pages.damaged:
            self._pages.damaged.lack(page, cells)
