"""Links of hosts that bring parts of pages, and of heads that order it: real hosts."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvrs.config.file import Config
from kvrs.errors import TransferError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.pages import Tag
from kvrs_engine.engine.ranks.link import (
    IS_HERE,
    NOT_TAKEN,
    VERSION,
    Begin,
    BringParts,
    LendPages,
    LoanAsked,
    LoanWanted,
    OfferParts,
    PagesDone,
    PartsHeld,
    PartsOffered,
    PartsOver,
    PartsRange,
    PartsRefused,
    PartsTaken,
    RefuseParts,
    StageChannel,
    StageLink,
    StageReady,
    StageRefused,
    StoreParts,
    TakeParts,
)
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.ranks.remote import RemoteStage
from kvrs_engine.scheduling.sequences import Chunk
from tests.cluster.launches import until
from tests.engine.ranks.on_nodes import PATIENCE_S, TOKENS, closing, head_of, opened
from tests.engine.ranks.test_borrowed_stages import LENT, PAGES, group_of, hosts_of

pytestmark = [pytest.mark.engine, pytest.mark.network, pytest.mark.process]

D0, D1 = InstanceId("d0"), InstanceId("d1")
SENDER = InstanceId("d0-stage-1")
PARTS = Begin(VERSION, StageChannel.PARTS)
HELD = 2
INTO = [30, IS_HERE, 31, NOT_TAKEN]


def tags(count: int) -> list[Tag]:
    return [Tag(at.to_bytes(16, "big")) for at in range(count)]


def offer_of(count: int, *, are_sent: bool = True) -> OfferParts:
    return OfferParts([PartsRange(StreamId("s"), HELD, tags(count))], are_sent)


class Books:
    """Stand-in for the books of d1, which take parts into INTO, and lend LENT."""

    def __init__(self, head: RanksOnNodes) -> None:
        self.head, self.refusal = head, ""
        self.pages: Sequence[int] = INTO
        self.offered: list[PartsOffered] = []
        self.over: list[PartsOver | None] = []
        self.loans_over = threading.Event()
        for stage in head.remote:
            stage.on_offered = partial(self._offered, stage)
            stage.on_brought = self.over.append
            stage.on_asked = partial(self._asked, stage)
            stage.on_over = lambda loan: self.loans_over.set()

    @property
    def part_bytes(self) -> int:
        return self.head.geometry.page_bytes // 2

    def _offered(self, stage: RemoteStage, offered: PartsOffered) -> None:
        self.offered.append(offered)
        if self.refusal:
            stage.answer(RefuseParts(0, 0, offered.offer, self.refusal))
        else:
            pages = [*self.pages] if offered.are_sent else []
            stage.answer(TakeParts(0, 0, offered.offer, [HELD] * len(offered.ranges), pages))

    def _asked(self, stage: RemoteStage, asked: LoanAsked) -> None:
        stage.answer(LendPages(0, 0, asked.loan, list(LENT)))


@pytest.fixture(scope="module")
def group(tiny_model: Path) -> Config:
    return group_of(tiny_model, members=3)


@pytest.fixture(scope="module")
def hosts(group: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with hosts_of(group, tmp_path_factory.mktemp("hosts"), D1):
        yield


@pytest.fixture
def epoch() -> int:
    """Higher than that of any test before."""
    _epochs.append(_epochs[-1] + 10)
    return _epochs[-1]


_epochs = [0]


@pytest.fixture
def books(group: Config, hosts: None, epoch: int) -> Iterator[Books]:
    with closing(head_of(group, epoch=epoch, of=D1)) as head:
        yield Books(head)


async def asked(link: StageLink, message: Any, payload: torch.Tensor | None = None) -> Any:
    await link.send(message, payload)
    answer, _ = await link.receive(PATIENCE_S)
    return answer


async def all_of(link: StageLink, message: Any, payload: torch.Tensor) -> None:
    """Answers until the link ends. Raises TransferError then."""
    await link.send(message, payload)
    while True:
        await link.receive(PATIENCE_S)


def content(places: int, part_bytes: int) -> torch.Tensor:
    return torch.arange(places * part_bytes, dtype=torch.int64).to(torch.uint8)


async def test_parts_come_into_the_pages_that_the_head_gives(group: Config, books: Books) -> None:
    """It is told of the end once, with what has come; the sender, what is held then."""
    link, began = await opened(group, 1, PARTS, SENDER, D1)
    assert began == PagesDone()
    assert await asked(link, offer_of(4, are_sent=False)) == PartsTaken([HELD], [])
    assert await asked(link, offer_of(4)) == PartsTaken([HELD], [0, 2])
    data = content(2, books.part_bytes)
    first, second = data.view(2, -1)
    assert await asked(link, StoreParts([2]), second) == PartsHeld([HELD])
    assert books.over == []
    assert await asked(link, StoreParts([0]), first) == PartsHeld([HELD + 3])
    books.refusal = "the instance is draining"
    assert await asked(link, offer_of(4)) == PartsRefused("the instance is draining")
    link.stream.close()

    until(lambda: bool(books.over))
    assert books.over == [PartsOver(books.offered[1].offer, [2, 0])]
    assert (books.offered[1].sender, books.offered[1].ranges[0].tags) == (SENDER, tags(4))
    (stage,) = [each for each in books.head.remote if each.stages.start == 1]
    assert (await stage.read([30, 31])).view(-1).equal(data)


@pytest.mark.parametrize(
    ("message", "size", "reason"),
    [
        (StoreParts([1]), 1, "parts of places [1]; allowed: each of [0, 2] once"),
        (StoreParts([0, 0]), 2, "parts of places [0, 0]; allowed: each of [0, 2] once"),
        (StoreParts([]), 0, "parts of places []; allowed: each of [0, 2] once"),
        (StoreParts([0]), 2, "bytes of parts; allowed:"),
        (PARTS, 0, "a message out of turn: Begin"),
    ],
)
async def test_parts_that_were_not_taken_are_refused(
    group: Config, books: Books, message: Any, size: int, reason: str
) -> None:
    """The offer is over with what had come, and the head computes on."""
    link, _ = await opened(group, 1, PARTS, SENDER, D1)
    await asked(link, offer_of(4))
    refused = await asked(link, message, content(size, books.part_bytes) if size else None)
    link.stream.close()

    assert isinstance(refused, StageRefused)
    assert reason in refused.reason
    until(lambda: bool(books.over))
    assert books.over == [PartsOver(books.offered[0].offer, [])]
    await asyncio.to_thread(books.head.execute, [Chunk(TOKENS[:5], 0, [1], logits=1)])


async def test_a_part_does_not_come_twice(group: Config, books: Books) -> None:
    link, _ = await opened(group, 1, PARTS, SENDER, D1)
    await asked(link, offer_of(4))
    part = content(1, books.part_bytes)
    await asked(link, StoreParts([0]), part)
    refused = await asked(link, StoreParts([0]), part)
    link.stream.close()
    assert refused == StageRefused("parts of places [0]; allowed: each of [2] once")


@pytest.mark.parametrize(
    ("begin", "sender", "reason"),
    [
        (PARTS, D0, "parts of 'd0'; allowed: 'd0-stage-1', 'd2-stage-1'"),
        (PARTS, InstanceId("d0-stage-0"), "parts of 'd0-stage-0'; allowed: 'd0-stage-1', "),
        (PARTS, InstanceId("d1-stage-1"), "parts of 'd1-stage-1'; allowed: 'd0-stage-1', "),
        (
            Begin(VERSION + 1, StageChannel.PARTS),
            SENDER,
            f"version {VERSION + 1}; allowed: {VERSION}",
        ),
    ],
)
async def test_only_hosts_of_the_same_stage_bring_parts(
    group: Config, books: Books, begin: Begin, sender: InstanceId, reason: str
) -> None:
    link, answer = await opened(group, 1, begin, sender, D1)
    link.stream.close()
    assert isinstance(answer, StageRefused)
    assert reason in answer.reason


@pytest.mark.parametrize("are_sent", [False, True])
async def test_a_million_tags_are_refused(group: Config, books: Books, are_sent: bool) -> None:
    link, _ = await opened(group, 1, PARTS, SENDER, D1)
    refused = await asked(link, offer_of(1_000_000, are_sent=are_sent))
    link.stream.close()
    assert isinstance(refused, StageRefused)
    assert f"1000000 tags in 1 ranges; allowed: {PAGES}" in refused.reason
    assert books.offered == []


async def test_a_tag_of_another_length_is_none(group: Config, books: Books) -> None:
    link, _ = await opened(group, 1, PARTS, SENDER, D1)
    await link.send(OfferParts([PartsRange(StreamId("s"), 0, [Tag(b"short")])], are_sent=False))
    answer, _ = await link.receive(PATIENCE_S)
    link.stream.close()
    assert isinstance(answer, StageRefused)
    assert "no message of a stage" in answer.reason


async def test_late_parts_reach_no_later_session(group: Config, books: Books, epoch: int) -> None:
    """Nor is anything taken while there is none."""
    link, _ = await opened(group, 1, PARTS, SENDER, D1)
    await asked(link, offer_of(4))
    await asyncio.to_thread(books.head.close)
    with pytest.raises(TransferError):
        await all_of(link, StoreParts([0]), content(1, books.part_bytes))
    link.stream.close()
    link, _ = await opened(group, 1, PARTS, SENDER, D1)
    assert await asked(link, offer_of(4)) == PartsRefused("'d1' has no session")
    with closing(head_of(group, epoch=epoch + 1, of=D1)) as head:
        later = Books(head)
        later.refusal = "not now"
        assert await asked(link, offer_of(4)) == PartsRefused("not now")
        link.stream.close()


async def test_a_stage_that_is_lent_takes_no_parts(group: Config, books: Books, epoch: int) -> None:
    begin = Begin(VERSION, StageChannel.BATCHES, loan=LoanWanted(PAGES, 8, 0.5))
    loan, ready = await opened(group, epoch, begin, D0, D1)
    assert isinstance(ready, StageReady)
    link, _ = await opened(group, 1, PARTS, SENDER, D1)
    assert await asked(link, offer_of(4)) == PartsRefused("'d1' lends the stage")
    loan.stream.close()
    assert await asyncio.to_thread(books.loans_over.wait, PATIENCE_S)
    assert isinstance(await asked(link, offer_of(4)), PartsTaken)
    link.stream.close()


@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        ([PAGES, 1, 2, 3], f"parts in pages [{PAGES}, 1, 2, 3]; allowed: each of 0 to"),
        ([1, 1, 2, 3], "parts in pages [1, 1, 2, 3]; allowed: each of 0 to"),
        ([1, 2], "2 pages of 1 streams are taken; allowed: 4 of 1, as offered"),
    ],
)
async def test_a_head_takes_parts_into_pages_of_its_own(
    group: Config, hosts: None, epoch: int, pages: list[int], reason: str
) -> None:
    batches, ready = await opened(group, epoch, Begin(VERSION, StageChannel.BATCHES), D1, D1)
    begin = Begin(VERSION, StageChannel.PAGES, ready.session)
    orders, _ = await opened(group, epoch, begin, D1, D1)
    link, _ = await opened(group, 1, PARTS, SENDER, D1)
    await link.send(offer_of(4))
    offered, _ = await batches.receive(PATIENCE_S)
    assert isinstance(offered, PartsOffered)
    refused = await asked(orders, TakeParts(ready.session, epoch, offered.offer, [HELD], pages))
    for each in (link, orders, batches):
        each.stream.close()
    assert isinstance(refused, StageRefused)
    assert reason in refused.reason


# Orders of heads.


def bring(pages: list[int], count: int = 2, to: str = "d0", **more: int) -> BringParts:
    many = tags(2) * (count // 2)  # They stay for all tests of this process.
    order = BringParts(0, 0, InstanceId(to), [PartsRange(StreamId("s"), 0, many)], pages)
    return msgspec.structs.replace(order, **more)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (
            bring([LENT.start]),
            f"1 pages [{LENT.start}] for 2 tags; allowed: one of 0 to 63 for each tag, or none",
        ),
        (bring([40, PAGES]), f"2 pages [40, {PAGES}] for 2 tags; allowed: one of 0 to 63"),
        (bring([], 1_000_000), "1000000 tags in 1 ranges; allowed: 64"),
        (bring([1, 2], epoch=-1), "an order of epoch"),
        (bring([1, 2], session=1), "an order of session"),
        (bring([LENT.stop, LENT.start]), f"pages [{LENT.stop}]; allowed: those that are lent"),
    ],
)
async def test_an_order_that_goes_beyond_a_session_is_refused(
    group: Config, books: Books, epoch: int, order: BringParts, reason: str
) -> None:
    """That of a borrower, which has a few pages."""
    begin = Begin(VERSION, StageChannel.BATCHES, loan=LoanWanted(PAGES, 8, 0.5))
    loan, ready = await opened(group, epoch, begin, D0, D1)
    begin = Begin(VERSION, StageChannel.REPLICAS, ready.session)
    link, began = await opened(group, epoch, begin, D0, D1)
    assert began == PagesDone()
    named = {"session": ready.session + order.session, "epoch": epoch + order.epoch}
    own = LENT[: len(order.pages)] if order.epoch or order.session else order.pages
    refused = await asked(link, msgspec.structs.replace(order, pages=list(own), **named))
    link.stream.close()
    loan.stream.close()

    assert isinstance(refused, StageRefused)
    assert reason in refused.reason
    books.head.execute([Chunk(TOKENS[:5], 0, [1], logits=1)])


async def test_parts_of_which_cells_are_lost_are_not_brought(group: Config, books: Books) -> None:
    """Nor what the books had before a loss that has come since."""
    (stage,) = [each for each in books.head.remote if each.stages.start == 1]
    ranges, hosted = [PartsRange(StreamId("s"), 0, tags(1))], stage._hosted
    bringing = stage.bring(InstanceId("d0"), ranges, [5])
    hosted.losses += 1
    with pytest.raises(TransferError, match="cells of these pages are lost"):
        await bringing
    with pytest.raises(TransferError, match="cells of these pages are lost"):
        await asyncio.wrap_future(
            stage._call(hosted.bring(hosted.losses - 1, InstanceId("d0"), ranges, [5]))
        )
    hosted.mended = hosted.losses
    with pytest.raises(TransferError, match="d0-stage-1: "):
        await stage.bring(InstanceId("d0"), ranges, [5])


async def test_a_host_that_is_not_there_leaves_the_order_without_effect(
    group: Config, books: Books
) -> None:
    """Nor does one that takes no parts end the stage."""
    (stage,) = [each for each in books.head.remote if each.stages.start == 1]
    ranges = [PartsRange(StreamId("s"), 0, tags(1))]
    for to, reason in (("d0", "d0-stage-1: "), ("d1", "'d1' takes no parts of this host")):
        with pytest.raises(TransferError, match=reason):
            await stage.bring(InstanceId(to), ranges, [5])
    await asyncio.to_thread(books.head.execute, [Chunk(TOKENS[:5], 0, [1], logits=1)])
