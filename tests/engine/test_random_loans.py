"""Random series of what happens to an instance that lends two stages: own streams, parts that come,
loans and their ends.
"""

from collections import Counter
from random import Random

import pytest

from kvrs.ids import StreamId
from kvrs.protocol.pages import Tag, page_tags, root_tag
from kvrs_engine.engine.ranks.link import LendPages, LoanWanted
from tests.engine.test_stage_loans import PAGES, ScriptedStage, World

STEPS = 60
FAMILIES = 6
TAGS = {at: page_tags(root_tag(f"s{at}"), range(16 * 6), 16) for at in range(FAMILIES)}


class Instance:
    """The world of loans, own streams of it, and pages into which parts come."""

    def __init__(self, seed: int) -> None:
        self.rng, self.world = Random(seed), World()
        self.pages = self.world.pages
        self.pages.replicas.most = PAGES // 2
        self.whole = self.world.stage.cells | self.world.first_stage.cells
        self.held: list[list[int]] = []  # By own streams.
        self.coming: list[tuple[ScriptedStage, Tag, int]] = []
        self.loans: dict[tuple[int, int], set[int]] = {}  # Pages by stage and number.
        self.asked = 0

    def begin(self) -> None:
        """A stream finds what there is, and computes the rest."""
        tags = TAGS[self.rng.randrange(FAMILIES)]
        own = self.pages.match(tags)
        fresh = self.pages.allocate(len(tags) - len(own))
        if fresh is None:
            self.pages.release(own)
            return
        for page, tag in zip(fresh, tags[len(own) :], strict=True):
            self.pages.register(page, tag)
        self.held.append(own + fresh)

    def end(self) -> None:
        if self.held:
            self.pages.release(self.held.pop(self.rng.randrange(len(self.held))))

    def part_begins(self) -> None:
        stage = self.rng.choice(self.world.ranks.remote)
        if any(number == stage.stages.start for number, _ in self.loans):
            return  # Its host takes no parts.
        tag = self.rng.choice(TAGS[self.rng.randrange(FAMILIES)])
        if not self.pages.parts.has(tag, stage.cells):
            page = self.pages.parts.expect(StreamId("other"), tag, self.whole)
            if page is not None:
                self.coming.append((stage, tag, page))

    def part_ends(self) -> None:
        if self.coming:
            stage, tag, page = self.coming.pop(self.rng.randrange(len(self.coming)))
            if self.rng.random() < 0.8:
                self.pages.parts.brought(page, tag, stage.cells)
            self.pages.parts.leave(page, self.whole)

    async def ask(self) -> None:
        stage = self.rng.choice(self.world.ranks.remote)
        number = stage.stages.start
        if any(at == number for at, _ in self.loans):
            return  # One borrower a host.
        self.asked += 1
        tags = self.rng.sample(TAGS[self.rng.randrange(FAMILIES)], self.rng.randint(0, 6))
        wanted = LoanWanted(self.rng.randint(2, PAGES), 2, 0.5, tags)
        lent = await self.world.ask(self.asked, wanted, stage)
        if isinstance(lent, str):
            return
        order = stage.orders[-1]
        assert isinstance(order, LendPages)
        assert len({*lent}) == len(lent)
        assert all(source not in lent and target in lent for source, target in order.copies)
        self.loans[number, self.asked] = {*lent}

    async def over(self) -> None:
        if self.loans:
            number, loan = self.rng.choice([*self.loans])
            del self.loans[number, loan]
            (stage,) = [each for each in self.world.ranks.remote if each.stages.start == number]
            await self.world.over(loan, stage)

    def check(self) -> None:
        """Each part of a page is one loan's, or the instance's and of those who send to it."""
        self.pages.check()
        lent = Counter(page for pages in self.loans.values() for page in pages)
        own = {page for pages in self.held for page in pages}
        assert not own & {*lent}
        for stage, _, page in self.coming:
            number = stage.stages.start
            here = {page for (at, _), pages in self.loans.items() if at == number for page in pages}
            assert page not in here
        assert self.world.loans.held_pages == len(lent) <= 0.75 * PAGES
        free = PAGES - len(own | {*lent} | {page for *_, page in self.coming})
        assert self.pages.free_pages == free
        for tags in TAGS.values():
            assert not {*lent} & {page for page in map(self.found, tags) if page is not None}

    def found(self, tag: Tag) -> int | None:
        pages = self.pages.match([tag])
        self.pages.release(pages)
        return pages[0] if pages else None


@pytest.mark.parametrize("seed", range(60))
async def test_a_part_of_a_page_is_used_by_one_at_a_time(seed: int) -> None:
    """And all is as before when the last of them has ended."""
    one = Instance(seed)
    for _ in range(STEPS):
        match one.rng.randrange(6):
            case 0:
                one.begin()
            case 1:
                one.end()
            case 2:
                one.part_begins()
            case 3:
                one.part_ends()
            case 4:
                await one.ask()
            case _:
                await one.over()
        one.check()
    while one.loans:
        await one.over()
    while one.held or one.coming:
        one.end()
        one.part_ends()
    one.check()
    assert one.pages.free_pages == PAGES
