"""Instances of a group of which one lends the other the host of a stage: real processes."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.config.file import Config, parse_config
from kvrs.errors import RanksLostError, TransferError
from kvrs.ids import InstanceId
from kvrs.protocol.pages import Tag
from kvrs.transfer.stream import StalledError
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.ranks.link import (
    VERSION,
    Begin,
    ComputeStage,
    EndRank,
    LendPages,
    LoanAsked,
    LoanWanted,
    MoveRank,
    PagesDone,
    ReadPages,
    RefuseLoan,
    StageChannel,
    StageLink,
    StageReady,
    StageRefused,
    WritePages,
)
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.ranks.remote import RemoteStage
from kvrs_engine.engine.ranks.wire import WireChunk
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.free_ports import free_ports
from tests.cluster.launches import until
from tests.engine.ranks.on_nodes import PATIENCE_S, TOKENS, closing, head_of, hosting, opened

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.process]

D0, D1 = InstanceId("d0"), InstanceId("d1")
PAGES = 64
LENT = range(40, 56)  # Of d1.
KEPT = range(16, 32)  # Of d0, while a stage is borrowed.


def chunks(first_page: int = 20) -> list[Chunk]:
    """Three batches of one sequence."""
    cuts = [0, 50, 60, 61]
    pages = range(first_page, first_page + 8)
    return [Chunk(TOKENS[first:last], first, pages, logits=1) for first, last in pairwise(cuts)]


class Books:
    """Stand-in for the books of an instance, which lend LENT, and keep KEPT of what they have."""

    def __init__(self, head: RanksOnNodes) -> None:
        self.head, self.refusal = head, ""
        self.lost: list[tuple[RemoteStage, int]] = []
        self.asked: list[LoanAsked] = []
        self.over: list[int | None] = []
        self.ended, self.home = threading.Event(), threading.Event()
        head.on_end = lambda lost: self.ended.set()
        for stage in head.remote:
            stage.on_cells = partial(self._lose, stage)
            stage.on_asked = partial(self._asked, stage)
            stage.on_over = self.over.append
            stage.on_home = self.home.set

    def mend(self) -> None:
        for stage, loss in self.lost:
            stage.noted(loss)
        for stage in self.head.remote:
            if (loan := stage.loan) is not None and loan.table is None:
                stage.take(loan, KEPT)
        self.head.on_restart()

    def _lose(self, stage: RemoteStage, loss: int) -> None:
        self.lost.append((stage, loss))

    def _asked(self, stage: RemoteStage, asked: LoanAsked) -> None:
        self.asked.append(asked)
        if self.refusal:
            stage.answer(RefuseLoan(0, 0, asked.loan, self.refusal))
        else:
            stage.answer(LendPages(0, 0, asked.loan, list(LENT)))


def group_of(model: Path, members: int = 2) -> Config:
    """Instances d0, d1, ... of two stages each, all of them in hosts."""
    ports = iter(free_ports(2 * members))
    instances = [
        {
            "id": f"d{index}",
            "role": "decode",
            "pp": 2,
            "group": "g",
            "stage_hosts": [{"node": f"n{stage}", "port": next(ports)} for stage in (0, 1)],
        }
        for index in range(members)
    ]
    nodes = [
        {"id": "n0", "instances": instances},
        {"id": "n1", "instances": [{"id": "p0", "role": "prefill"}]},
    ]
    engine = {"pages": PAGES, "max_model_len": 128}
    return parse_config({"cluster": {"model": str(model), "engine": engine, "nodes": nodes}})


@contextmanager
def hosts_of(
    config: Config, directory: Path, *instances: InstanceId
) -> Iterator[dict[tuple[InstanceId, int], int]]:
    """The hosts of both stages of these instances; their process ids."""
    with ExitStack() as stack:
        yield {
            (name, stage): stack.enter_context(hosting(config, directory, stage, name)).pid
            for name in instances
            for stage in (0, 1)
        }


@pytest.fixture
def config(tiny_model: Path) -> Config:
    return group_of(tiny_model)


def mended(books: Books) -> None:
    """Wait for a host of each lost stage, and until its pages are in use."""
    books.head.on_lost()
    books.mend()


def test_a_lost_stage_is_borrowed_and_handed_back(
    config: Config, tiny_model: Path, tmp_path: Path
) -> None:
    """Both compute at the donor's host what one process does, each in pages of its own; what was
    computed at the donor is there at the own host.
    """
    worker = Worker(tiny_model, config.cluster.engine)
    expected = [worker.execute([chunk]) for chunk in chunks()]
    with hosts_of(config, tmp_path, D0, D1) as hosts, ExitStack() as stack:
        own, other = (stack.enter_context(closing(head_of(config, of=name))) for name in (D0, D1))
        books, lender = Books(own), Books(other)
        before = own.now
        other.execute([chunks(0)[0]])
        own.execute([chunks()[0]])
        os.kill(hosts[D0, 1], signal.SIGKILL)
        until(lambda: bool(own.loans))
        mended(books)
        borrowed = own.now

        for chunk, logits in zip(chunks()[:2], expected[:2], strict=True):
            assert same_bytes(own.execute([chunk]), logits)
        assert same_bytes(other.execute([chunks(0)[1]]), expected[1])
        with pytest.raises(TransferError, match="stage 1 is borrowed; allowed: at its lender 'd1'"):
            own.lose_device(1)
        with hosting(config, tmp_path, 1, D0) as back:
            assert books.home.wait(60)
            until(lambda: bool(lender.over))
            after, lost = own.now, list(books.lost)
            assert same_bytes(own.execute([chunks()[2]]), expected[2])
            assert same_bytes(other.execute([chunks(0)[2]]), expected[2])
            assert own.use()[1].host_pid == back.pid

    asked = lender.asked[0]
    assert (asked.borrower, asked.wanted.pages, asked.wanted.least_pages) == (D0, PAGES, 8)
    assert lender.over[0] == asked.loan
    assert borrowed.pids[1] == other.pids.get(1, borrowed.pids[1]) != before.pids[1]
    assert borrowed.pids[0] == after.pids[0] == before.pids[0]
    assert [now.reforming for now in (before, borrowed, after)] == [None] * 3
    assert before.number < borrowed.number < after.number
    assert before.layout.number < borrowed.layout.number < after.layout.number
    assert (borrowed.deaths, after.deaths) == (1, 1)
    assert len(lost) == 2  # The loss, and the pages without memory.
    assert not books.ended.is_set()


@pytest.mark.nightly
def test_an_owner_that_starts_anew_has_its_stage_back(
    config: Config, tiny_model: Path, tmp_path: Path
) -> None:
    """The end of the lender's process leaves the borrower at its host; the next one takes that
    back, and lends again when it is asked, where it does not refuse.
    """
    worker = Worker(tiny_model, config.cluster.engine)
    first, second, third = chunks()
    expected = [worker.execute([chunk]) for chunk in (first, second, third)]
    with hosts_of(config, tmp_path, D0, D1) as hosts, ExitStack() as stack:
        own = stack.enter_context(closing(head_of(config)))
        books = Books(own)
        with closing(head_of(config, of=D1)) as other:
            Books(other)
            own.execute([first])
            os.kill(hosts[D0, 1], signal.SIGKILL)
            until(lambda: bool(own.loans))
            mended(books)
            assert same_bytes(own.execute([first]), expected[0])
        assert same_bytes(own.execute([second]), expected[1])

        later = stack.enter_context(closing(head_of(config, epoch=2, of=D1)))
        lender = Books(later)
        lender.refusal = "a test lends nothing"
        until(lambda: own.now.reforming is not None and own.now.reforming.way is Way.WAIT)
        assert own.now.deaths == 2
        with pytest.raises(RanksLostError):
            own.execute([second])
        lender.refusal = ""
        until(lambda: bool(own.loans))
        mended(books)
        for chunk, logits in zip((first, second, third), expected, strict=True):
            assert same_bytes(own.execute([chunk]), logits)


# What comes over the links of a borrower.

WANTED = LoanWanted(PAGES, 8, 0.5)
LOAN = Begin(VERSION, StageChannel.BATCHES, loan=WANTED)


@pytest.fixture(scope="module")
def group(tiny_model: Path) -> Config:
    return group_of(tiny_model, members=3)


@pytest.fixture(scope="module")
def lender_hosts(group: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with hosts_of(group, tmp_path_factory.mktemp("hosts"), D1):
        yield


@pytest.fixture
def owner_epoch() -> int:
    """Higher than that of any test before."""
    _epochs.append(_epochs[-1] + 1)
    return _epochs[-1]


_epochs = [0]


@pytest.fixture
def lender(group: Config, lender_hosts: None, owner_epoch: int) -> Iterator[Books]:
    with closing(head_of(group, epoch=owner_epoch, of=D1)) as head:
        yield Books(head)


@pytest.mark.parametrize(
    ("begin", "epoch", "reason"),
    [
        (
            Begin(VERSION, StageChannel.BATCHES),
            5,
            "instance 'd0' asks for no loan; allowed: a loan of",
        ),
        (
            Begin(VERSION, StageChannel.PAGES, 1),
            5,
            "session 1; allowed: the one that is open, none",
        ),
        (LOAN, 3, "epoch 3; allowed: 4 or above"),
    ],
)
async def test_a_borrower_that_begins_wrongly_is_refused_by_name(
    group: Config, lender: Books, begin: Begin, epoch: int, reason: str
) -> None:
    link, ready = await opened(group, 4, LOAN, D0, D1)
    assert isinstance(ready, StageReady)
    link.stream.close()
    until(lambda: bool(lender.over))

    link, answer = await opened(group, epoch, begin, D0, D1)
    link.stream.close()

    assert isinstance(answer, StageRefused)
    assert reason in answer.reason


@pytest.mark.parametrize("wrong", [{"pages": 0}, {"least_pages": -1}, {"busy": 1.5}])
async def test_a_loan_of_nothing_is_not_asked_for(
    group: Config, lender: Books, wrong: dict[str, float]
) -> None:
    """The owner does not hear of it."""
    wanted = LoanWanted(PAGES, 8, 0.5)
    for name, value in wrong.items():
        msgspec.structs.force_setattr(wanted, name, value)
    with pytest.raises(TransferError):
        await opened(group, 5, msgspec.structs.replace(LOAN, loan=wanted), D0, D1)

    assert lender.asked == []
    await asyncio.to_thread(lender.head.execute, [chunks(0)[0]])


async def test_a_loan_for_a_million_tags_is_refused(group: Config, lender: Books) -> None:
    """The owner does not hear of it."""
    tags = [Tag(at.to_bytes(16, "big")) for at in range(1_000_000)]
    begin = msgspec.structs.replace(LOAN, loan=LoanWanted(PAGES, 8, 0.5, tags))
    link, refused = await opened(group, 6, begin, D0, D1)
    link.stream.close()

    reason = f"a loan for 1000000 tags; allowed: {PAGES}, the pages of an instance"
    assert refused == StageRefused(reason)
    assert lender.asked == []


@pytest.mark.parametrize(
    ("pages", "tags", "copies", "reason"),
    [
        ([], 0, [], "a loan of 0 pages [] with 0 tags; allowed: each of 0 to 63 once, and at"),
        ([7, 8, 7], 0, [], "a loan of 3 pages [7, 8, 7] with 0 tags; allowed: each of 0 to 63 onc"),
        ([63, 64], 0, [], "a loan of 2 pages [63, 64] with 0 tags; allowed: each of 0 to 63 once"),
        ([7], 2, [], "a loan of 1 pages [7] with 2 tags; allowed: each of 0 to 63 once, and at"),
        ([7], 1, [(64, 7)], "a copy of page 64 into 7; allowed: from an unlent page of 0 to 63"),
        (
            [7, 8],
            1,
            [(8, 7)],
            "a copy of page 8 into 7; allowed: from an unlent page of 0 to 63",
        ),
        ([7], 1, [(8, 9)], "a copy of page 8 into 9; allowed: from an unlent page of 0 to 63"),
    ],
)
async def test_an_owner_lends_pages_of_its_own_each_once(
    group: Config,
    lender_hosts: None,
    owner_epoch: int,
    pages: list[int],
    tags: int,
    copies: list[tuple[int, int]],
    reason: str,
) -> None:
    """A process that answers otherwise is not served any more, and nothing is lent."""
    begin = Begin(VERSION, StageChannel.BATCHES)
    batches, ready = await opened(group, owner_epoch, begin, D1, D1)
    begin = Begin(VERSION, StageChannel.PAGES, ready.session)
    orders, _ = await opened(group, owner_epoch, begin, D1, D1)
    asking = asyncio.create_task(opened(group, 7, LOAN, D0, D1))
    asked, _ = await batches.receive(PATIENCE_S)
    assert isinstance(asked, LoanAsked)
    named = [Tag(bytes([at] * 16)) for at in range(tags)]
    await orders.send(LendPages(ready.session, owner_epoch, asked.loan, pages, named, copies))
    refused, _ = await orders.receive(PATIENCE_S)
    link, answer = await asking
    for each in (link, orders, batches):
        each.stream.close()

    assert isinstance(refused, StageRefused)
    assert reason in refused.reason
    assert isinstance(answer, StageRefused)


async def test_one_instance_borrows_at_a_time(group: Config, lender: Books) -> None:
    """The owner is not asked for another one before the first is gone."""
    link, ready = await opened(group, 10, LOAN, D0, D1)
    second, answer = await opened(group, 10, LOAN, InstanceId("d2"), D1)
    second.stream.close()
    link.stream.close()
    until(lambda: bool(lender.over))
    third, after = await opened(group, 10, LOAN, InstanceId("d2"), D1)
    third.stream.close()

    assert ready.pages == list(LENT)
    assert answer == StageRefused("a loan to 'd2'; allowed: one loan at a time, 'd0' has one")
    assert after.pages == list(LENT)
    assert [asked.borrower for asked in lender.asked] == [D0, "d2"]
    assert lender.over[0] == lender.asked[0].loan


async def test_a_refusal_reaches_the_borrower(group: Config, lender: Books) -> None:
    lender.refusal = "the instance is draining"
    link, answer = await opened(group, 20, LOAN, D0, D1)
    link.stream.close()
    lender.head.close()
    link, later = await opened(group, 20, LOAN, D0, D1)
    link.stream.close()

    assert answer == StageRefused("the instance is draining")
    assert isinstance(later, StageRefused)
    assert "a loan without a session of 'd1'; allowed: during a session" in later.reason


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (ReadPages(0, 0, [39]), "pages [39]; allowed: those that are lent"),
        (WritePages(0, 0, [40, 56]), "pages [56]; allowed: those that are lent"),
        (EndRank(0, 0, 1, []), "EndRank of a borrower; allowed: batches and pages"),
        (MoveRank(0, 0, 1, leaves=True), "MoveRank of a borrower; allowed: batches and pages"),
        (LendPages(0, 0, 1, [1]), "LendPages of a borrower; allowed: batches and pages"),
        (ReadPages(0, -1, [40]), "an order of epoch 29; allowed: 30, the session's"),
    ],
)
async def test_a_borrower_reaches_nothing_but_its_loan(
    group: Config, lender: Books, order: Any, reason: str
) -> None:
    batches, ready = await opened(group, 30, LOAN, D0, D1)
    begin = Begin(VERSION, StageChannel.PAGES, ready.session)
    pages, answer = await opened(group, 30, begin, D0, D1)
    assert answer == PagesDone()
    replaced = {"session": ready.session, "epoch": 30 + order.epoch}
    await pages.send(msgspec.structs.replace(order, **replaced))
    refused, _ = await pages.receive(PATIENCE_S)
    pages.stream.close()
    batches.stream.close()

    assert isinstance(refused, StageRefused)
    assert reason in refused.reason
    lender.head.execute([chunks(0)[0]])  # The owner does not notice.


async def test_a_batch_of_a_borrower_has_no_other_pages(group: Config, lender: Books) -> None:
    link, ready = await opened(group, 40, LOAN, D0, D1)
    chunk = WireChunk([1, 2, 3], 0, [LENT.stop], 1, 0)
    await link.send(ComputeStage(ready.session, 40, 1, [chunk], 60.0))
    refused, _ = await link.receive(PATIENCE_S)
    link.stream.close()

    assert refused == StageRefused(f"pages [{LENT.stop}]; allowed: those that are lent")


async def test_an_owner_does_not_use_what_it_lends(group: Config, lender: Books) -> None:
    link, _ = await opened(group, 50, LOAN, D0, D1)
    try:
        with pytest.raises(RanksLostError, match="allowed: those that are not lent"):
            await asyncio.to_thread(lender.head.execute, [chunks(LENT.start)[0]])
    finally:
        link.stream.close()


async def test_cells_that_the_owner_loses_end_the_loan(group: Config, lender: Books) -> None:
    """The borrower's pages have lost them as well."""
    link, _ = await opened(group, 60, LOAN, D0, D1)
    await asyncio.to_thread(lender.head.lose_device, 1, [0] * PAGES)
    ended = await end_of(link)
    link.stream.close()
    assert not isinstance(ended, StalledError)
    until(lambda: lender.over == [lender.asked[0].loan])


async def end_of(link: StageLink) -> TransferError:
    """Why nothing comes over it any more."""
    try:
        while True:
            await link.receive(PATIENCE_S)
    except TransferError as error:
        return error
