"""Full pages that lack cells, because cells were lost or have not arrived yet."""

from collections.abc import Callable

from kvrs.protocol.pages import Cell, Tag


class DamagedPages:
    """The damaged pages by tag; part of the page manager."""

    def __init__(self, tags: list[Tag | None]) -> None:
        """`tags` is the page manager's list of tags by page."""
        self.by_tag: dict[Tag, int] = {}
        self._tags = tags
        self._gone: dict[int, frozenset[Cell]] = {}
        self._mended: set[int] = set()  # Pages that have gone to an owner since the last loss.

    def __contains__(self, page: int) -> bool:
        return page in self._gone

    def __len__(self) -> int:
        return len(self._gone)

    def lose(self, gone: Callable[[int], frozenset[Cell]]) -> None:
        """Note the lost cells of all pages in `by_tag`; `gone` returns the cells of a page."""
        for page in self.by_tag.values():
            self._gone[page] = self._gone.get(page, frozenset()) | gone(page)
        self._mended.clear()

    def begin(self, page: int, gone: frozenset[Cell]) -> None:
        """Add a tagged page that lacks these cells; the page manager does not find it by tag."""
        tag = self._tags[page]
        assert tag is not None, "a damaged page has a tag"
        assert tag not in self.by_tag, "one damaged page of a tag"
        self.by_tag[tag] = page
        self._gone[page] = gone

    def end(self, page: int) -> None:
        """Remove a page that has become whole."""
        tag = self._tags[page]
        assert tag is not None, "a damaged page has a tag"
        del self.by_tag[tag], self._gone[page]
        self._mended.discard(page)

    def is_mended(self, page: int) -> bool:
        """Return whether the page has gone to an owner since the last loss."""
        return page in self._mended

    def mend(self, page: int) -> frozenset[Cell]:
        """Give the page to an owner, which restores it; return the missing cells."""
        self._mended.add(page)
        return self._gone[page]

    def gone(self, page: int) -> frozenset[Cell]:
        """Return the missing cells of a damaged page."""
        return self._gone[page]

    def brought(self, page: int, cells: frozenset[Cell]) -> None:
        """Note that these cells of a page were written."""
        if (gone := self._gone.get(page)) is not None:
            self._gone[page] = gone - cells

    def lack(self, page: int, cells: frozenset[Cell]) -> None:
        """Note that a damaged page lacks these cells too."""
        self._gone[page] |= cells

    def spoil(self, page: int) -> None:
        """Remove a page and its tag, if damaged: the page is about to be written from its start, or
        is whole.
        """
        if self._gone.pop(page, None) is None:
            return
        tag = self._tags[page]
        assert tag is not None, "a damaged page has a tag"
        del self.by_tag[tag]
        self._tags[page] = None
        self._mended.discard(page)

    def check(self) -> None:
        assert sorted(self.by_tag.values()) == sorted(self._gone)
        assert self._mended <= self._gone.keys()
