"""Books of an instance that lends pages of its stages, or borrows a stage of others."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import pytest

from kvrs.config.cluster import ElasticSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.net.http import News
from kvrs.protocol.instance import StageLent
from kvrs.protocol.pages import Cell, page_tags, root_tag
from kvrs_engine.elastic import lending
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.core import EngineCore
from kvrs_engine.engine.ranks.link import LendPages, LoanAsked, LoanWanted, RefuseLoan
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.ranks.returning import StageLoan
from kvrs_engine.engine.requests import GenerationRun
from kvrs_engine.engine.stage_loans import StageLoans
from kvrs_engine.scheduling.pages import PageManager

D1 = InstanceId("d1")
PAGES = 32
WANTED = LoanWanted(PAGES, 4, 0.5)


@dataclass
class ScriptedStage:
    stages: range = range(1, 2)
    cells: frozenset[Cell] = frozenset({(1, 0)})
    losses: int = 0
    loan: StageLoan | None = None
    told: list[tuple[int, Sequence[int] | str]] = field(default_factory=list)
    orders: list[LendPages | RefuseLoan] = field(default_factory=list)
    noted_losses: list[int] = field(default_factory=list)
    lost: str | None = None  # Why an answer does not arrive.
    is_whole: bool = True
    is_home: bool = False  # By the time that a loan is taken.
    on_cells: Callable[[int], object] | None = None
    on_asked: Callable[[LoanAsked], object] | None = None
    on_over: Callable[[int | None], object] | None = None
    on_home: Callable[[], object] | None = None

    def busy(self, now_s: float) -> float:
        return 0.0

    def take(self, loan: StageLoan, kept: Sequence[int], adopted: Mapping[int, int]) -> bool:
        if not self.is_home:
            loan.take(kept, adopted)
        return not self.is_home

    def noted(self, loss: int) -> None:
        self.noted_losses.append(loss)

    def answer(self, order: LendPages | RefuseLoan) -> "Future[None]":
        answer = order.reason if isinstance(order, RefuseLoan) else order.pages
        self.told.append((order.loan, answer))
        self.orders.append(order)
        told: Future[None] = Future()
        if self.lost is None:
            told.set_result(None)
        else:
            told.set_exception(TransferError(self.lost))
        return told


@dataclass
class ScriptedNow:
    reforming: object = None


@dataclass
class ScriptedRanks:
    remote: list[ScriptedStage]
    now: ScriptedNow = field(default_factory=ScriptedNow)

    @property
    def loans(self) -> dict[int, StageLoan]:
        return {one.stages.start: one.loan for one in self.remote if one.loan is not None}


class ScriptedCore:
    def __init__(self) -> None:
        self.pages = PageManager(PAGES, 16)
        self.is_draining = False
        self.lost: list[dict[int, frozenset[Cell]]] = []
        self.woken = 0

    @property
    def under_way(self) -> list[GenerationRun]:
        return []

    def lose_cells(self, cells: dict[int, frozenset[Cell]]) -> None:
        self.lost.append(cells)

    def wake(self) -> None:
        self.woken += 1


class CountedNews(News):
    told = 0

    def tell(self) -> None:
        self.told += 1


class World:
    def __init__(self, **elastic: float) -> None:
        self.core = ScriptedCore()
        self.pages = self.core.pages
        self.stage = ScriptedStage()
        self.first_stage = ScriptedStage(range(1), frozenset({(0, 0)}))
        self.ranks = ScriptedRanks([self.first_stage, self.stage])
        settings = ElasticSettings.model_validate(elastic)
        self.news = CountedNews()
        self.loans = StageLoans(
            cast(RanksOnNodes, self.ranks), settings, cast(EngineCore, self.core), self.news
        )
        self.loans.start()

    async def ask(
        self, loan: int = 1, wanted: LoanWanted = WANTED, stage: ScriptedStage | None = None
    ) -> Sequence[int] | str:
        stage = stage or self.stage
        assert stage.on_asked is not None
        stage.on_asked(LoanAsked(loan, D1, wanted))
        await settled()
        return stage.told[-1][1]

    async def over(self, loan: int | None, stage: ScriptedStage | None = None) -> None:
        stage = stage or self.stage
        assert stage.on_over is not None
        stage.on_over(loan)
        await settled()

    def borrow(self, pages: range = range(100, 116)) -> StageLoan:
        loan = StageLoan(D1, NodeId("n1"), pages, 16)
        self.stage.loan = loan
        self.stage.losses += 1
        return loan


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def filled(pages: PageManager, count: int, stream: str = "s") -> list[int]:
    """Cached pages of a stream."""
    own = pages.allocate(count)
    assert own is not None
    tags = page_tags(root_tag(stream), range(16 * count), 16)
    for page, tag in zip(own, tags, strict=True):
        pages.register(page, tag)
    pages.release(own)
    return own


async def test_pages_that_are_lent_are_used_by_no_stream_until_the_loan_is_over() -> None:
    world = World()
    lent = await world.ask()
    assert isinstance(lent, list)

    left = world.pages.allocate(PAGES - len(lent))
    assert left is not None
    assert world.pages.allocate(1) is None
    assert {*left} & {*lent} == set()
    assert world.loans.lends == [StageLent(D1, 1, PAGES // 2)]
    assert world.loans.held_pages == PAGES // 2

    await world.over(1)
    assert world.pages.free_pages == PAGES // 2
    assert world.loans.lends == []
    assert (world.loans.changes, world.news.told) == (2, 2)
    world.pages.check()


async def test_a_loan_takes_the_cache_and_no_page_of_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lending, "LEND_PAGES", 1.0)
    world = World()
    filled(world.pages, 10)
    held = world.pages.allocate(12)
    assert held is not None
    leased = world.pages.allocate(4)
    assert leased is not None
    world.pages.retain(StreamId("leased"), leased, 64, 1e9)
    world.pages.release(leased)

    lent = await world.ask()

    assert isinstance(lent, list)
    assert len(lent) == PAGES - 12 - 4
    assert world.pages.retained_tokens(StreamId("leased")) == 64
    world.pages.check()


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("draining", "the instance is draining"),
        ("reforming", "the instance lacks a stage itself"),
        ("borrowing", "the instance lacks a stage itself"),
        ("back", "the instance lacks a stage itself"),
        ("full", "3 pages could be lent; allowed: 4 or more"),
    ],
)
async def test_a_refusal_changes_nothing(state: str, reason: str) -> None:
    world = World()
    if state == "draining":
        world.core.is_draining = True
    elif state == "reforming":
        world.ranks.now.reforming = object()
    elif state == "borrowing":
        world.borrow()
    elif state == "back":  # Its host is; the books have pages that were lost with the one before.
        world.stage.is_whole = False
    else:
        world.pages.allocate(PAGES - 3)
    before = world.pages.free_pages

    assert await world.ask() == reason
    assert world.pages.free_pages == before
    assert (world.loans.lends, world.news.told) == ([], 0)


async def test_a_loan_without_a_borrower_that_waits_is_over() -> None:
    world = World()
    world.stage.lost = "the borrower of loan 1 does not wait any more"
    await world.ask()

    assert world.loans.lends == []
    assert world.pages.free_pages == PAGES


async def test_all_loans_end_with_the_host() -> None:
    """Each only once: an end that is told later changes nothing."""
    world = World()
    await world.ask(1, replace_pages(4))
    await world.ask(2, replace_pages(4))
    assert world.loans.held_pages == 8

    await world.over(None)
    await world.over(2)

    assert world.pages.free_pages == PAGES
    world.pages.check()


def replace_pages(pages: int) -> LoanWanted:
    return LoanWanted(pages, 1, 0.5)


async def test_pages_that_are_lent_at_a_stage_are_lent_at_the_others_too() -> None:
    """Nothing else uses them there, so that a second stage costs no page; they come back with the
    end of the last loan.
    """
    world = World()
    second = await world.ask()
    first = await world.ask(stage=world.first_stage)

    assert isinstance(second, list)
    assert first == second
    assert world.loans.lends == [StageLent(D1, stage, PAGES // 2) for stage in (1, 0)]
    assert world.loans.held_pages == PAGES // 2
    assert await world.ask(2) == "0 pages could be lent; allowed: 4 or more"
    assert world.pages.free_pages == PAGES // 2

    await world.over(1)
    assert world.pages.free_pages == PAGES // 2
    assert await world.ask(2) == second
    await world.over(None)
    await world.over(1, world.first_stage)
    assert (world.pages.free_pages, world.loans.held_pages) == (PAGES, 0)
    world.pages.check()


@pytest.mark.parametrize("is_wanted", [True, False])
async def test_a_page_with_parts_of_all_stages_is_lent_at_each(is_wanted: bool) -> None:
    """For what is in it or for what comes into it: no copy, and nothing is left of it."""
    world = World()
    cached = filled(world.pages, 3)
    tags = page_tags(root_tag("s"), range(48), 16)
    for stage in world.ranks.remote:
        wanted = tags[:2] if is_wanted or stage is world.first_stage else []
        lent = await world.ask(wanted=LoanWanted(8, 4, 0.5, wanted), stage=stage)
        assert {*lent[:2]} == {*cached[:2]}
    orders = [stage.orders[-1] for stage in world.ranks.remote]
    assert all(isinstance(each, LendPages) and not each.copies for each in orders)
    assert not any(
        world.pages.parts.has(tags[at], stage.cells)
        for stage in world.ranks.remote
        for at in range(2)
    )
    for stage in world.ranks.remote:
        await world.over(1, stage)
    assert world.pages.match(tags) == []
    world.pages.check()
    assert world.pages.free_pages == PAGES


async def test_pages_without_memory_are_given_up_while_a_stage_is_borrowed() -> None:
    """Those that were used last are kept."""
    world = World()
    old, new = filled(world.pages, 20, "old"), filled(world.pages, 10, "new")
    loan = world.borrow()
    world.loans.on_restart()

    assert loan.table is not None
    assert {*new} <= {*loan.table}
    assert len({*old} & {*loan.table}) <= 6
    assert sorted(loan.table.values()) == sorted(loan.pages)
    assert world.pages.free_pages == len(loan.pages)
    given: set[int] = set()
    while (page := world.pages.allocate(1)) is not None:
        given.update(page)
    assert given == {*loan.table}

    world.stage.loan = None
    assert world.stage.on_home is not None
    world.stage.on_home()
    await settled()
    assert world.pages.free_pages == PAGES - len(loan.pages)
    assert world.core.woken
    world.pages.check()


async def test_pages_that_are_sent_or_filled_are_waited_for() -> None:
    """Until then the stage has no table, and computes nothing."""
    world = World()
    sent = world.pages.allocate(20)
    assert sent is not None
    loan = world.borrow()
    world.loans.on_restart()
    assert loan.table is None
    assert world.pages.free_pages == PAGES - 20

    world.pages.release(sent)
    async with asyncio.timeout(10):
        while not world.core.lost:
            await asyncio.sleep(0.01)
    assert world.core.lost == [{0: world.stage.cells}]
    assert world.stage.noted_losses == [world.stage.losses]
    world.loans.on_restart()
    assert loan.table is not None


async def test_a_loss_of_the_borrowed_stage_brings_all_pages_back() -> None:
    world = World()
    world.borrow()
    world.loans.on_restart()
    world.stage.loan = None
    world.loans.on_restart()

    assert world.pages.free_pages == PAGES
    assert world.loans.held_pages == 0


async def test_a_second_loan_has_a_table_of_the_pages_that_are_left() -> None:
    world = World()
    first = world.borrow()
    world.loans.on_restart()
    other = replace(world.stage, stages=range(2, 3), losses=1)
    other.loan = StageLoan(InstanceId("d2"), NodeId("n2"), range(200, 210), 16)
    world.ranks.remote.append(other)
    world.loans.on_restart()

    assert first.table is not None
    assert other.loan.table is not None
    assert {*other.loan.table} <= {*first.table}
    assert world.pages.free_pages == 10


async def test_pages_that_the_lender_has_are_whole_again() -> None:
    """And found, beside the part that others lack; of other pages the lender's are used as they
    come.
    """
    world = World()
    own = filled(world.pages, 10)
    tags = page_tags(root_tag("s"), range(160), 16)
    world.pages.lose(lambda page: world.stage.cells)
    assert world.pages.match(tags) == []
    loan = world.borrow()
    loan.tags = [tags[0], page_tags(root_tag("other"), range(16), 16)[0], *tags[1:4]]
    world.loans.on_restart()

    assert loan.table is not None
    assert [loan.table[page] for page in own[:4]] == [100, 102, 103, 104]
    assert sorted(loan.table.values()) == [*loan.pages]
    assert loan.touched == {*own[:4]}
    found = world.pages.match(tags)
    assert found == own[:4]
    world.pages.release(found)
    world.pages.check()


async def test_a_stage_that_has_gone_home_has_nothing_of_what_the_lender_has() -> None:
    """Its own host came between the look at the loan and its first use."""
    world = World()
    filled(world.pages, 10)
    tags = page_tags(root_tag("s"), range(160), 16)
    world.pages.lose(lambda page: world.stage.cells)
    world.borrow().tags = tags[:4]
    world.stage.is_home = True
    world.loans.on_restart()

    assert world.pages.match(tags) == []
    assert world.loans.restarts.adopted_pages == 0
    world.pages.check()


async def test_what_the_borrower_wants_is_lent_first() -> None:
    """Also pages in use, as copies; what is not there is not waited for."""
    world = World()
    cached, used = filled(world.pages, 3, "cached"), filled(world.pages, 2, "used")
    tags = [page_tags(root_tag(name), range(48), 16) for name in ("cached", "used", "nothing")]
    assert world.pages.match(tags[1][:2]) == used
    wanted = [tags[2][0], tags[0][0], tags[1][1], tags[0][0], tags[0][2]]
    lent = await world.ask(wanted=LoanWanted(8, 4, 0.5, wanted))

    assert isinstance(lent, list)
    assert lent[:2] == [cached[0], cached[2]]
    (order,) = world.stage.orders
    assert isinstance(order, LendPages)
    assert order.tags == [tags[0][0], tags[0][2], tags[1][1]]
    assert order.copies == [(used[1], lent[2])]
    assert len({*lent}) == 8
    assert not {*used} & {*lent}
    assert [world.pages.references[page] for page in used] == [1, 1]
    assert world.pages.match(tags[0]) == []
    await world.over(1)
    world.pages.release(used)
    world.pages.check()
    assert world.pages.free_pages == PAGES


@pytest.mark.parametrize(("way", "admits"), [(Way.SUBSTITUTE, False), (Way.WAIT, True)])
async def test_no_stream_gets_pages_while_a_donor_is_asked(way: Way, admits: bool) -> None:
    """They would be those that the donor has, given up for streams that nothing computes."""
    world = World()
    assert world.loans.admits()
    world.ranks.now.reforming = SimpleNamespace(way=way)
    assert world.loans.admits() is admits


async def test_what_is_lent_needs_no_memory_in_what_is_borrowed() -> None:
    """An instance may lend pages of a stage and lose another one; they are not used when they come
    back before that does.
    """
    world = World()
    lent = await world.ask()
    assert isinstance(lent, list)
    loan = world.borrow(range(100, 108))
    world.loans.on_restart()

    assert loan.table is not None
    assert len(loan.table) == 8
    assert not {*lent} & {*loan.table}
    await world.over(1)
    assert world.pages.free_pages == 8
    assert world.loans.lends == []
    world.stage.loan = None
    world.loans.on_restart()
    assert world.pages.free_pages == PAGES
    world.pages.check()


def test_a_page_that_is_not_in_use_is_not_read() -> None:
    loan = StageLoan(D1, NodeId("n1"), [7, 9], 16)
    with pytest.raises(TransferError, match="lost meanwhile"):
        loan.theirs([0])
    loan.take([3, 4])
    assert loan.theirs([4, 3]) == [9, 7]
    with pytest.raises(TransferError, match="lost meanwhile"):
        loan.theirs([3, 5])
