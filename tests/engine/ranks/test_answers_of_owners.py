"""How long a host waits for the process of its instance, in virtual time: it may be stopped, or end
meanwhile.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.transfer.peers import Identity
from kvrs_engine.engine.ranks.link import (
    VERSION,
    Begin,
    LendPages,
    LoanAsked,
    LoanWanted,
    OfferParts,
    PartsOffered,
    PartsRange,
    StageChannel,
    TakeParts,
)
from kvrs_engine.engine.ranks.sessions import StageRefusedError, StageSessions
from kvrs_testkit.virtual_time import run_virtually, virtual_loop

D0, D1 = InstanceId("d0"), InstanceId("d1")
WANTED = LoanWanted(64, 8, 0.5)
OFFER = OfferParts([PartsRange(StreamId("s"), 0, [])], are_sent=True)


class ScriptedLink:
    """The face of a `StageLink` that a session uses."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.is_shut = asyncio.Event()
        self.stream = SimpleNamespace(shut=self.is_shut.set)

    async def send(self, message: Any) -> None:
        self.sent.append(message)


def head(name: InstanceId) -> Identity:
    return Identity(name, NodeId("n0"), 1, "", 0)


class World:
    """A host of d1, and the process of d1 that answers after a while, or ends."""

    def __init__(self, answers_s: float, ends_s: float = 1e9) -> None:
        self.sessions, self.own = StageSessions(D1, 64, [D0]), ScriptedLink()
        self._answers_s, self._ends_s = answers_s, ends_s
        self.over_s: float | None = None

    async def serve(self) -> None:
        begin = Begin(VERSION, StageChannel.BATCHES)
        async with self.sessions.of(self.own, head(D1), begin) as session:  # type: ignore[arg-type]
            loop = virtual_loop()
            loop.call_at(self._answers_s, self._answer)
            await asyncio.sleep(self._ends_s)
        await session.over()
        self.over_s = loop.time()

    def _answer(self) -> None:
        for each in self.own.sent:
            match each:
                case LoanAsked():
                    self.sessions.answered(LendPages(1, 1, each.loan, [5, 6]))
                case PartsOffered():
                    self.sessions.answered(TakeParts(1, 1, each.offer, [0], []))
                case _:
                    pass

    async def lend(self) -> frozenset[int] | None:
        begin = Begin(VERSION, StageChannel.BATCHES, loan=WANTED)
        async with self.sessions.of(ScriptedLink(), head(D0), begin) as loan:  # type: ignore[arg-type]
            return loan.pages

    async def offer(self) -> TakeParts | str:
        session, link = self.sessions.receiving(), ScriptedLink()
        assert not isinstance(session, str)
        with session.beside(link):  # type: ignore[arg-type]
            return await self.sessions.offer(session, InstanceId("d0-stage-1"), OFFER)

    async def ended(self, asks: Any) -> tuple[Any, float]:
        """The answer, or why there is none, and when."""
        serving = asyncio.create_task(self.serve())
        await asyncio.sleep(0)
        try:
            found = await asks
        except StageRefusedError as error:
            found = str(error)
        at_s = virtual_loop().time()
        if self._ends_s < 1e9:
            await serving
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        return found, at_s


@pytest.mark.parametrize(
    ("answers_s", "ends_s", "expected"),
    [
        (4.0, 1e9, (frozenset({5, 6}), 4.0)),
        (6.0, 1e9, ("'d1' has not answered", 5.0)),
        (6.0, 1.0, ("'d1' has not answered", 1.0)),
    ],
)
def test_a_loan_waits_a_while_for_its_owner_and_not_for_one_that_has_ended(
    answers_s: float, ends_s: float, expected: tuple[Any, float]
) -> None:
    """A process that is stopped says nothing; the borrower asks the next one."""

    async def lend() -> tuple[Any, float]:
        world = World(answers_s, ends_s)
        return await world.ended(world.lend())

    assert run_virtually(lend()) == expected


@pytest.mark.parametrize(
    ("answers_s", "ends_s", "expected"),
    [
        (4.0, 1e9, (TakeParts(1, 1, 1, [0], []), 4.0)),
        (6.0, 1e9, ("'d1' has not answered", 5.0)),
        (6.0, 1.0, ("'d1' has not answered", 1.0)),
    ],
)
def test_parts_wait_a_while_for_the_owner_and_do_not_hold_up_the_next_one(
    answers_s: float, ends_s: float, expected: tuple[Any, float]
) -> None:
    """A session ends with its process, also while an offer waits in it."""

    async def offer() -> tuple[Any, float, float | None]:
        world = World(answers_s, ends_s)
        found = await world.ended(world.offer())
        return *found, world.over_s

    *found, over_s = run_virtually(offer())
    assert tuple(found) == expected
    assert over_s == (ends_s if ends_s < 1e9 else None)
