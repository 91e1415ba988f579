"""Pages of which cells come one after the other from others, or are lent: which are found, and by
what.
"""

from collections.abc import Iterable
from random import Random

import pytest

from kvrs.ids import StreamId
from kvrs.protocol.pages import Cell, HeldPages, StoreCode, Tag, page_tags, root_tag
from kvrs_engine.scheduling.page_parts import Cells
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.replicas import ReplicaBook, ReplicaRun

PAGES = 12
STAGES: list[Cells] = [frozenset({(0, 0), (0, 1)}), frozenset({(1, 0), (1, 1)})]
FIRST, SECOND = STAGES
WHOLE = FIRST | SECOND
A, B = StreamId("a"), StreamId("b")


def tags(family: str, count: int) -> list[Tag]:
    return page_tags(root_tag(family), range(4 * count), 4)


def book_of(pages: PageManager, share: float = 0.5) -> ReplicaBook:
    return ReplicaBook(pages, share, lambda: 0.0, WHOLE)


def bring(
    book: ReplicaBook,
    own: list[Tag],
    cells: Cells,
    span: range,
    *,
    stream: StreamId = A,
    filled: Iterable[int] | None = None,
    most: int | None = None,
) -> HeldPages:
    """The parts of a span, of which those arrive; None: all that is taken."""
    run = book.begin(stream, span.start, own[span.start : span.stop], cells, most)
    for index, page in enumerate(run.taken):
        if page is not None and (filled is None or index in filled):
            book.arrived(run, index)
    return book.end(run)


@pytest.fixture
def pages() -> PageManager:
    return PageManager(PAGES, 4)


def test_a_page_is_found_once_all_its_parts_have_come(pages: PageManager) -> None:
    book, own = book_of(pages), tags("a", 4)
    book.offer(A, own, FIRST)
    assert bring(book, own, FIRST, range(3)) == HeldPages(StoreCode.OK, 3)
    assert (pages.match(own), book.held(A), len(pages.replicas)) == (
        [],
        HeldPages(StoreCode.OK, 0),
        3,
    )
    assert bring(book, own, SECOND, range(2)).pages == 2
    assert book.held(A).pages == 2
    assert bring(book, own, FIRST, range(3, 4)).pages == 4
    assert bring(book, own, SECOND, range(2, 4)).pages == 4
    pages.check()
    assert len(pages.match(own)) == 4
    assert len(pages.replicas) == 0


def test_parts_that_arrive_together_share_a_page(pages: PageManager) -> None:
    """Those that do not arrive leave nothing; nor does a page of which nothing has come."""
    book, own = book_of(pages), tags("a", 2)
    first, second = (book.begin(A, 0, own, cells) for cells in STAGES)
    assert first.taken == second.taken
    book.arrived(first, 0)
    book.end(second)
    assert book.end(first).pages == 1
    assert (len(pages.replicas), pages.free_pages) == (1, PAGES)
    assert not pages.parts.has(own[0], SECOND)
    pages.check()


def test_nothing_is_taken_behind_a_gap_or_beyond_a_limit(pages: PageManager) -> None:
    book, own = book_of(pages), tags("a", 6)
    assert bring(book, own, FIRST, range(2, 4)).pages == 0
    assert bring(book, own, FIRST, range(4), most=3).pages == 3
    assert bring(book, own, FIRST, range(3, 5), filled=[1]).pages == 3
    assert bring(book, own, SECOND, range(1, 2)).pages == 0
    pages.check()


def test_what_was_given_up_is_noticed_with_the_next_part(pages: PageManager) -> None:
    """Not only when a report is made."""
    book, own = book_of(pages), tags("a", 6)
    bring(book, own, FIRST, range(4))
    taken = pages.allocate(PAGES - 2)
    assert taken is not None
    pages.release(taken)
    assert bring(book, own, FIRST, range(4, 5)).pages == 2


def test_a_part_takes_no_page_of_a_stream_or_a_lease(pages: PageManager) -> None:
    """Nor more than the share; where all is in use, what comes is dropped."""
    book, own = book_of(pages), tags("a", 8)
    held = pages.allocate(PAGES - 3)
    assert held is not None
    pages.retain(B, held[:2], 8, until_s=9.0)
    pages.release(held[:2])
    assert bring(book, own, FIRST, range(8)).pages == 3
    assert pages.retained_tokens(B) == 8
    pages.release(held[2:])
    assert bring(book, own, FIRST, range(3, 8)).pages == PAGES // 2
    pages.check()


def test_a_part_that_is_lent_is_not_found_and_the_others_are(pages: PageManager) -> None:
    """Nor does an own stream get the page before the loan is over; then the part may come again."""
    book, own = book_of(pages), tags("a", 2)
    for cells in STAGES:
        bring(book, own, cells, range(2))
    lent = pages.parts.lend(own[0], SECOND)
    assert lent is not None
    page, in_use = lent
    assert not in_use
    assert pages.match(own) == []
    assert (pages.parts.has(own[0], FIRST), pages.parts.has(own[0], SECOND)) == (True, False)
    assert pages.parts.lend(own[0], SECOND) is None
    assert pages.parts.lend(own[0], FIRST) == (page, True)
    assert pages.mend(own[0]) is None
    pages.lose(lambda _: frozenset({(0, 0)}))
    assert pages.mend(own[0]) is None
    pages.check()
    pages.release([page, page])
    assert pages.mend(own[0]) is not None


def test_a_page_in_use_is_not_taken_from_its_owner(pages: PageManager) -> None:
    own = tags("a", 1)
    found = pages.allocate(1)
    assert found is not None
    pages.register(found[0], own[0])
    assert pages.parts.lend(own[0], FIRST) == (found[0], True)
    pages.retain(B, found, 4, until_s=9.0)
    pages.release([*found, *found])
    assert pages.parts.lend(own[0], FIRST) == (found[0], True)
    assert pages.match(own) == found
    pages.check()


def test_a_part_of_a_tag_that_was_computed_meanwhile_is_dropped(pages: PageManager) -> None:
    book, own = book_of(pages), tags("a", 1)
    run = book.begin(A, 0, own, FIRST)
    computed = pages.allocate(1)
    assert computed is not None
    assert pages.register(computed[0], own[0]) == computed[0]
    book.arrived(run, 0)
    book.end(run)
    assert bring(book, own, SECOND, range(1)).pages == 1
    assert pages.match(own) == computed
    pages.check()


class Interleaved:
    """Streams, parts, loans and losses in any order, beside what is written into each page."""

    def __init__(self, seed: int) -> None:
        self.random, self.pages = Random(seed), PageManager(PAGES, 4)
        self.book = book_of(self.pages)
        self.tags = {stream: tags(stream, 5) for stream in (A, B)}
        self.held: list[int] = []
        self.lent: list[int] = []
        self.runs: list[ReplicaRun] = []
        self.written: dict[int, set[tuple[Tag, Cell]]] = {page: set() for page in range(PAGES)}

    def step(self) -> None:
        stream, cells = self.random.choice([A, B]), self.random.choice(STAGES)
        steps = [self.begin, self.end, self.allocate, self.match, self.lend, self.release]
        self.random.choice([*steps, self.take_back, self.lose])(stream, cells)
        self.pages.check()

    def begin(self, stream: StreamId, cells: Cells) -> None:
        first = self.random.randrange(4)
        own = self.tags[stream][first : first + 2]
        self.runs.append(self.book.begin(stream, first, own, cells))

    def end(self, stream: StreamId, cells: Cells) -> None:
        if not self.runs:
            return
        run = self.runs.pop(self.random.randrange(len(self.runs)))
        for index, page in enumerate(run.taken):
            if page is not None and self.random.random() < 0.8:
                assert run.cells is not None
                self.written[page] |= {(run.tags[index], cell) for cell in run.cells}
                self.book.arrived(run, index)
        self.book.end(run)

    def allocate(self, stream: StreamId, cells: Cells) -> None:
        if (found := self.pages.allocate(self.random.randrange(1, 4))) is None:
            return
        arriving = {page for run in self.runs for page in run.taken}
        assert not {*found} & {*self.held, *self.lent, *arriving}
        for page in found:
            self.written[page].clear()
        self.held += found

    def match(self, stream: StreamId, cells: Cells) -> None:
        own = self.tags[stream]
        found = self.pages.match(own)
        for tag, page in zip(own, found, strict=False):
            assert {(tag, cell) for cell in WHOLE} <= self.written[page]
            assert page not in self.lent
        self.held += found

    def lend(self, stream: StreamId, cells: Cells) -> None:
        tag = self.random.choice(self.tags[stream])
        if (loan := self.pages.parts.lend(tag, cells)) is None:
            return
        page, in_use = loan
        assert {(tag, cell) for cell in cells} <= self.written[page]
        if in_use:
            self.pages.release([page])
        else:
            assert page not in self.held
            self.lent.append(page)
            self._wipe(page, cells)

    def release(self, stream: StreamId, cells: Cells) -> None:
        if self.held:
            self.pages.release([self.held.pop(self.random.randrange(len(self.held)))])

    def take_back(self, stream: StreamId, cells: Cells) -> None:
        if self.lent:
            self.pages.release([self.lent.pop()])

    def lose(self, stream: StreamId, cells: Cells) -> None:
        if not self.held and self.random.random() < 0.3:
            self.pages.lose(lambda _: cells)
            for page in self.written:
                self._wipe(page, cells)

    def _wipe(self, page: int, cells: Cells) -> None:
        self.written[page] = {(tag, cell) for tag, cell in self.written[page] if cell not in cells}


@pytest.mark.parametrize("seed", range(40))
def test_no_interleaving_makes_a_page_of_two_owners_or_a_tag_without_its_cells(seed: int) -> None:
    """Pages that are found have been written since they were lost, lent or used otherwise."""
    world = Interleaved(seed)
    for _ in range(300):
        world.step()

    for run in world.runs:
        world.book.end(run)
    world.pages.release([*world.held, *world.lent])
    world.pages.check()
    assert world.pages.free_pages == PAGES
    assert not world.pages.parts.lent


def test_a_part_that_arrives_is_no_lease(pages: PageManager) -> None:
    """Nor does it make pages spare for a loan."""
    book, own = book_of(pages), tags("a", 2)
    run = book.begin(A, 0, own, FIRST)
    assert (pages.free_pages, pages.leased_pages) == (PAGES - 2, 0)
    book.end(run)
    assert (pages.free_pages, pages.leased_pages) == (PAGES, 0)
