"""Full pages of which cells are gone, or have not come yet."""

from collections.abc import Callable

from kvrs.protocol.parts import Cell
from kvrs.protocol.tags import Tag


class DamagedPages:
    """Pages that have lost cells, by their tags; part of the page manager."""

    def __init__(self, tags: list[Tag | None]) -> None:
        """`tags`: of all pages."""
        self.by_tag: dict[Tag, int] = {}
        self._tags = tags
        self._gone: dict[int, frozenset[Cell]] = {}
        # Those that went to an owner since the last loss.
        self._mended: set[int] = set()

    def __contains__(self, page: int) -> bool:
        return page in self._gone

    def __len__(self) -> int:
        return len(self._gone)

    def lose(self, gone: Callable[[int], frozenset[Cell]]) -> None:
        """Note the cells that are gone, for all pages in `by_tag`."""
        for page in self.by_tag.values():
            self._gone[page] = self._gone.get(page, frozenset()) | gone(page)
        self._mended.clear()

    def begin(self, page: int, gone: frozenset[Cell]) -> None:
        """A page with a tag lacks these cells, and is not found by the tag otherwise."""
        tag = self._tags[page]
        assert tag is not None, "a damaged page has a tag"
        assert tag not in self.by_tag, "one damaged page of a tag"
        self.by_tag[tag] = page
        self._gone[page] = gone

    def end(self, page: int) -> None:
        """It is whole."""
        tag = self._tags[page]
        assert tag is not None, "a damaged page has a tag"
        del self.by_tag[tag], self._gone[page]
        self._mended.discard(page)

    def is_mended(self, page: int) -> bool:
        """The page went to an owner since the last loss."""
        return page in self._mended

    def mend(self, page: int) -> frozenset[Cell]:
        """It goes to an owner; returns what it lacks."""
        self._mended.add(page)
        return self._gone[page]

    def gone(self, page: int) -> frozenset[Cell]:
        """Cells that a damaged page lacks."""
        return self._gone[page]

    def brought(self, page: int, cells: frozenset[Cell]) -> None:
        """These cells of a page were written, after the last time that it lost any."""
        if (gone := self._gone.get(page)) is not None:
            self._gone[page] = gone - cells

    def lack(self, page: int, cells: frozenset[Cell]) -> None:
        """These cells of a damaged page are gone too."""
        self._gone[page] |= cells

    def spoil(self, page: int) -> None:
        """Nothing is left of a page, if it was damaged: it is about to be written from its start,
        or is whole.
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
