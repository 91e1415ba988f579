"""A borrowed stage that goes home while its pages are written: over scripted hosts with a memory.

What was written, or is there with the loan, is at the own host afterwards, in whatever order copies
and writes come.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvrs.config.cluster import EngineSettings, InstanceSettings
from kvrs.config.sections import TransferSettings
from kvrs.errors import KvrsError, RanksLostError, TransferError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import Role
from kvrs.protocol.pages import Tag
from kvrs.transfer.peers import Identity, Peer
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks import hosted as hosted_module
from kvrs_engine.engine.ranks.connection import StageAt
from kvrs_engine.engine.ranks.hosted import HostedStage, StageCalls
from kvrs_engine.engine.ranks.link import LoanWanted, StageFacts, StageReady, StageUse
from kvrs_engine.engine.ranks.reformed import RanksNow
from kvrs_engine.engine.ranks.settings import layout_of
from kvrs_engine.scheduling.sequences import Chunk

pytestmark = pytest.mark.engine

P, PAGES = 16, 64
LENT = range(20, 52)  # Of the lender.
KEPT = range(8, 40)  # Of the borrower.
ADOPTED = dict(zip(KEPT[:12], LENT[5:17], strict=True))


class ScriptedHost:
    """Pages, with what is in each, of a host that is there or not."""

    def __init__(self) -> None:
        self.pages = dict.fromkeys(range(PAGES), "")
        self.is_there = asyncio.Event()


class Hosts:
    def __init__(self, seed: int, layout: Layout, load_s: float) -> None:
        self.rng, self.layout, self.load_s = random.Random(seed), layout, load_s
        self.of = {name: ScriptedHost() for name in ("own", "donor")}
        self.opened: list[ScriptedConnection] = []
        # Called with each loan, before it is answered; and before anything is written.
        self.on_loan: Callable[[ScriptedConnection, StageReady], StageReady]
        self.on_loan = lambda connection, ready: ready
        self.on_write: Callable[[ScriptedConnection], object] = lambda connection: None

    async def while_others_go_on(self) -> None:
        for _ in range(self.rng.randint(0, 6)):
            await asyncio.sleep(0)

    def connection(self, at: StageAt, **options: Any) -> "ScriptedConnection":
        return ScriptedConnection(self, at)


class ScriptedConnection:
    """The face of a `StageConnection`, as far as a stage that is handed back uses it."""

    def __init__(self, hosts: Hosts, at: StageAt) -> None:
        self._hosts = hosts
        self.host = hosts.of["own" if at.lender is None else "donor"]
        self.now = RanksNow(hosts.layout, {}, 0, 1, None)
        self.use = StageUse(1, 1, 0.0, 0)
        self.error: RanksLostError | None = None
        self.stopped: RanksLostError | None = None
        self.is_refused = False
        self.on_news: Any = lambda message: None

    def lose(self) -> None:
        """The host, or the link to it."""
        self.error = RanksLostError([1], "is lost")
        self.on_news(None)

    def _check(self) -> None:
        if self.error is not None:
            raise TransferError(str(self.error))

    async def open(self, wait_s: float = 0.0, loan: LoanWanted | None = None) -> StageReady:
        if loan is None:
            await self.host.is_there.wait()
        elif not self.host.is_there.is_set():
            raise KvrsError("it is not there")
        facts = StageFacts(b"", {}, None)
        pages = None if loan is None else [*LENT]
        self._hosts.opened.append(self)
        ready = StageReady(1, facts, self.now, self.use, self._hosts.load_s, pages, [])
        return ready if loan is None else self._hosts.on_loan(self, ready)

    async def execute(self, chunks: Sequence[Chunk], *options: object) -> Tensor:
        """Write the tokens of each chunk, at some time until the end."""
        await self._hosts.while_others_go_on()
        for chunk in chunks:
            at = chunk.first_position
            for token_id in chunk.token_ids:
                self.host.pages[chunk.pages[at // P]] += f" {token_id}"
                at += 1
        await self._hosts.while_others_go_on()
        return torch.empty(0)

    async def read(self, pages: Sequence[int]) -> list[str]:
        self._check()
        await self._hosts.while_others_go_on()
        found = [self.host.pages[page] for page in pages]
        await self._hosts.while_others_go_on()
        return found

    async def write(self, pages: Sequence[int], parts: Sequence[str], cells: object) -> None:
        self._hosts.on_write(self)
        self._check()
        await self._hosts.while_others_go_on()
        self.host.pages.update(zip(pages, parts, strict=True))
        await self._hosts.while_others_go_on()

    async def mended(self) -> None: ...

    def give_up(self) -> None:
        self.error = self.error or RanksLostError([1], "has ended")
        self.on_news(None)

    async def close(self) -> None:
        self.give_up()


async def away(
    seed: int, load_s: float, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[HostedStage, Hosts]:
    """A stage that has lost its host, with a donor. `load_s`: of a host."""
    model, settings = ModelConfig.from_directory(tiny_model), EngineSettings(pages=PAGES)
    instance = InstanceSettings(id=InstanceId("d0"), role=Role.DECODE, pp=2)
    layout = layout_of(instance, model.units)
    assert layout is not None
    hosts = Hosts(seed, layout, load_s)
    monkeypatch.setattr(hosted_module, "StageConnection", hosts.connection)
    donor = at("d1-stage-1", InstanceId("d1"))
    calls = StageCalls()
    calls.on_cells = lambda loss: None
    calls.on_tags = no_tags
    for host in hosts.of.values():
        host.is_there.set()
    stage = HostedStage(at("d0-stage-1"), model, settings, layout, 1, [donor], calls)
    await stage.open()
    own = hosts.of["own"]
    own.is_there.clear()
    own.pages = dict.fromkeys(range(PAGES), "")
    stage.connection.error = RanksLostError([1], "is lost")
    stage.connection.on_news(None)
    return stage, hosts


@pytest.mark.parametrize("seed", range(40))
async def test_what_was_written_is_at_home(
    seed: int, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, hosts = await away(seed, 1e9, tiny_model, monkeypatch)
    try:
        await once(lambda: stage.loan is not None)
        expected = await lent_and_written(stage, hosts, seed)
        assert stage.loan is None
        own = hosts.of["own"]
        assert {page: own.pages[page] for page in expected} == expected
    finally:
        await stage.close()


async def test_a_host_that_is_not_back_in_time_is_replaced(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would load sooner than a donor lends, and is not there by then: its link is cut."""
    stage, _ = await away(0, 0.02, tiny_model, monkeypatch)
    try:
        await once(lambda: stage.loan is not None)
    finally:
        await stage.close()


async def lent_and_written(stage: HostedStage, hosts: Hosts, seed: int) -> dict[int, str]:
    """Take the loan, and write while the own host comes back; returns what is in each page then."""
    rng, lender, loan = random.Random(seed), hosts.of["donor"], stage.loan
    assert loan is not None
    for number, page in enumerate(ADOPTED.values()):
        lender.pages[page] = f"replica {number}"
    back_after = rng.randint(1, 12) if seed % 4 else -1
    if back_after < 0:
        hosts.of["own"].is_there.set()
        await hosts.while_others_go_on()
    if not await stage.take(loan, KEPT, ADOPTED):
        assert back_after < 0
        await once(lambda: stage.loan is None)
        return {}
    stage.noted = stage.mended = stage.losses
    expected = {own: lender.pages[theirs] for own, theirs in ADOPTED.items()}
    pulled, computed = KEPT[12:20], KEPT[20:]
    number = 0
    while stage.loan is not None:
        number += 1
        if number == back_after:
            hosts.of["own"].is_there.set()
        page, first = rng.choice(pulled), rng.randrange(len(computed) - 4)
        start, count = rng.randint(0, P), rng.randint(1, 3 * P)
        chunk = Chunk([number] * count, start, computed[first : first + 5], logits=1)
        await asyncio.gather(
            stage.write([page], [f"pulled {number}"], None),  # type: ignore[arg-type]
            stage.execute([chunk], None, 60.0, 0),
        )
        expected[page] = f"pulled {number}"
        for position in range(start, start + count):
            page = computed[first + position // P]
            expected[page] = expected.get(page, "") + f" {number}"
    return expected


def at(name: str, lender: InstanceId | None = None) -> StageAt:
    peer = Peer(InstanceId(name), NodeId("n1"), "127.0.0.1", 1)
    own = Identity(InstanceId("d0"), NodeId("n0"), 1, "", 0)
    return StageAt(peer, own, b"", TransferSettings(stall_timeout_s=60.0), lender)


def no_tags() -> "Future[list[Tag]]":
    found: Future[list[Tag]] = Future()
    found.set_result([])
    return found


async def once(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0)
