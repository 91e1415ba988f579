"""How long an order to bring parts lasts at both its ends, over scripted links in virtual time."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrs.config.sections import TransferSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.pages import Tag
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity, Peer
from kvrs.transfer.stream import StalledError
from kvrs_engine.engine.ranks.connection import PartsRefusedError, StageAt, StageConnection
from kvrs_engine.engine.ranks.link import OfferParts, PartsHeld, PartsRange, PartsTaken
from kvrs_engine.engine.ranks.replicate import PartsSender
from kvrs_testkit.virtual_time import run_virtually, virtual_loop

D1 = InstanceId("d1")
STALL_S = 2.0
TRANSFER = TransferSettings(stall_timeout_s=STALL_S)
PAGE_BYTES = 1 << 22  # Each page is sent by itself.
PAGES = 10
OWN = Identity(InstanceId("d0"), NodeId("n0"), 1, "", 0)


class ScriptedLink:
    """The face of a `StageLink`, over two queues."""

    def __init__(self, sent: "asyncio.Queue[Any]", come: "asyncio.Queue[Any]") -> None:
        self._sent, self._come = sent, come
        self.is_closed = False
        self.stream = SimpleNamespace(close=self._close, shut=self._close)

    def _close(self) -> None:
        self.is_closed = True

    async def send(self, message: Any, payload: Any = None) -> None:
        self._sent.put_nowait(message)

    async def receive(self, timeout_s: float | None = None) -> tuple[Any, torch.Tensor]:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._come.get(), torch.empty(0)
        except TimeoutError:
            raise StalledError(f"no answer within {timeout_s} s") from None


class World:
    """The process of d0, its host, and that of d1, which answers each message after `each_s`."""

    def __init__(self, each_s: float) -> None:
        self._each_s = each_s
        self.read_s: list[float] = []  # When pages were read.
        orders, answers, there, back = (asyncio.Queue[Any]() for _ in range(4))
        links = SendingLinks(TRANSFER, SendingFaults(), NodeId("n0"))
        at = StageAt(Peer(D1, NodeId("n1"), "", 0), OWN, b"", TRANSFER)
        self.connection = StageConnection(at, 0, (0,), PAGE_BYTES, 0, links)
        self.connection._replicas = ScriptedLink(orders, answers)  # type: ignore[assignment]
        geometry = SimpleNamespace(page_bytes=PAGE_BYTES)
        group: Any = SimpleNamespace(
            read=self._read,
            settings=SimpleNamespace(pages=64),
            pool=SimpleNamespace(geometry=geometry),
        )
        self.sender = PartsSender(group, {D1: at}, links)
        self.link = self.sender._links[D1] = ScriptedLink(there, back)  # type: ignore[assignment]
        session: Any = SimpleNamespace(check=lambda _: None, check_pages=lambda _: None)
        serving = self.sender.serve(ScriptedLink(answers, orders), session)  # type: ignore[arg-type]
        self._tasks = [asyncio.create_task(serving), asyncio.create_task(self._take(there, back))]

    async def _read(self, pages: Sequence[int]) -> torch.Tensor:
        self.read_s.append(virtual_loop().time())
        return torch.empty(PAGE_BYTES, dtype=torch.uint8)

    async def _take(self, there: "asyncio.Queue[Any]", back: "asyncio.Queue[Any]") -> None:
        while True:
            message = await there.get()
            await asyncio.sleep(self._each_s)
            if isinstance(message, OfferParts):
                back.put_nowait(PartsTaken([0], [*range(PAGES)]))
            else:
                back.put_nowait(PartsHeld([max(message.places) + 1]))

    async def bring(self) -> PartsHeld:
        # The session's first answer to the link is not waited for here.
        await self.connection._replicas.receive()  # type: ignore[union-attr]
        tags = [Tag(at.to_bytes(16, "big")) for at in range(PAGES)]
        try:
            return await self.connection.bring(
                D1, [PartsRange(StreamId("s"), 0, tags)], [*range(PAGES)]
            )
        finally:
            self.over_s = virtual_loop().time()

    async def end(self) -> None:
        await asyncio.sleep(100 * STALL_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def test_a_host_has_given_up_when_pages_lose_their_pins() -> None:
    """It brings them at a host that never stalls and never ends: each answer is just in time. The
    order is refused by it, and not given up by the process that has the pins; it reads none later.
    """

    async def bring() -> World:
        world = World(0.9 * STALL_S)
        with pytest.raises(PartsRefusedError, match="d1: no parts were taken for 6 s"):
            await world.bring()
        await world.end()
        return world

    world = run_virtually(bring())
    assert len(world.read_s) > 1
    assert world.over_s == 3 * STALL_S
    assert max(world.read_s) < world.over_s
    assert world.link.is_closed


def test_what_comes_in_time_is_brought_whole() -> None:
    async def bring() -> tuple[World, PartsHeld]:
        world = World(0.2 * STALL_S)
        held = await world.bring()
        await world.end()
        return world, held

    world, held = run_virtually(bring())
    assert held == PartsHeld([PAGES], PAGES * PAGE_BYTES)
    assert not world.link.is_closed


def test_a_host_that_says_nothing_is_given_up_by_its_process() -> None:
    """Later than it would have given up itself."""

    async def bring() -> World:
        world = World(0.0)
        world._tasks[0].cancel()
        await asyncio.gather(world._tasks[0], return_exceptions=True)
        ranges = [PartsRange(StreamId("s"), 0, [Tag(bytes(16))])]
        with pytest.raises(TransferError, match="no answer within 8"):
            await world.connection.bring(D1, ranges, [1])
        await world.end()
        return world

    assert run_virtually(bring()).connection._replicas is None
