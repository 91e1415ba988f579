"""The instance that the parts of a stage go to next."""

import asyncio
from collections import Counter, abc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrs.config.backup import BackupSettings
from kvrs.config.sections import TransferSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.pages import root_tag
from kvrs.transfer.peers import Peer
from kvrs_engine.engine.core import EngineCore
from kvrs_engine.engine.ranks.connection import PartsRefusedError
from kvrs_engine.engine.ranks.link import PartsHeld, PartsRange
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.ranks.remote import RemoteStage
from kvrs_engine.engine.requests import GenerationRun
from kvrs_engine.engine.ring import RingStage, StageRing
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.replicas import ReplicaBook
from kvrs_engine.scheduling.sequences import Sequence
from kvrs_testkit.virtual_time import run_virtually, virtual_loop

P = 16
D1, D2 = InstanceId("d1"), InstanceId("d2")
RING = [D1, D2]


def test_one_that_has_refused_is_passed_over_for_a_while() -> None:
    """Then it is asked again, as the first that it is."""
    lane = RingStage(cast(RemoteStage, None))
    assert lane.next_target(RING, now_s=0.0) == D1
    lane.refusals[D1] = 5.0, "d1 lends the stage"
    assert lane.next_target(RING, now_s=4.9) == D2
    assert lane.next_target(RING, now_s=5.0) == D1


def test_where_none_takes_parts_all_reasons_are_told() -> None:
    lane = RingStage(cast(RemoteStage, None))
    assert lane.unprotected == "nothing was sent yet"
    lane.refusals |= {D1: (5.0, "d1 lends the stage"), D2: (6.0, "d2: connection refused")}
    lane.target = D1
    assert lane.next_target(RING, now_s=1.0) is None
    assert lane.unprotected == "d1 lends the stage; d2: connection refused"
    assert lane.next_target(RING, now_s=1.0) == D1, "all are asked again"
    lane.target = D2
    assert lane.unprotected is None


def core_of(pages: PageManager) -> EngineCore:
    return cast(EngineCore, SimpleNamespace(pages=pages, is_draining=False, wake=lambda: None))


def ring_of(bytes_per_s: float | None = None) -> StageRing:
    """The ring of d0, with two stages of one and of three layers, 1000 bytes of a page each."""
    pages = PageManager(400, 16)
    stages = [
        SimpleNamespace(at=Peer(InstanceId(f"d0-stage-{at}"), f"n{at}", "", 0), layers=layers)  # type: ignore[arg-type]
        for at, layers in enumerate((range(1), range(1, 4)))
    ]
    ranks: Any = SimpleNamespace(remote=stages, geometry=SimpleNamespace(page_bytes=4000, layers=4))
    return StageRing(
        ranks,
        RING,
        core_of(pages),
        ReplicaBook(pages, 0.5, lambda: 0.0),
        BackupSettings(staging_pages=64),
        TransferSettings(link_bytes_per_s=bytes_per_s, stall_timeout_s=2.0),
        clock=lambda: 0.0,
    )


@pytest.mark.parametrize(
    ("bytes_per_s", "pages"), [(None, 64), (1e6, 64), (15_000.0, 10), (10.0, 1)]
)
def test_no_more_parts_go_at_a_time_than_a_link_carries_in_time(
    bytes_per_s: float | None, pages: int
) -> None:
    """In the time of one stall, by the stage with most layers; its host gives up after three."""
    assert ring_of(bytes_per_s)._staging_pages == pages


class Neighbours:
    """The hosts of a stage that others have: which of them take parts, and what they have got."""

    def __init__(self) -> None:
        self.taking = {D1, D2}
        self._held = Counter[tuple[InstanceId, StreamId]]()
        self.got: list[tuple[float, InstanceId, int]] = []  # When, where and how many pages.

    async def bring(
        self, to: InstanceId, ranges: abc.Sequence[PartsRange], pages: abc.Sequence[int]
    ) -> PartsHeld:
        if to not in self.taking:
            raise PartsRefusedError("it lends the stage")
        if pages:
            self.got.append((virtual_loop().time(), to, len(pages)))
            for each in ranges:
                assert each.first_page == self._held[to, each.stream]
                self._held[to, each.stream] += len(each.tags)
        return PartsHeld([self._held[to, each.stream] for each in ranges])


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are not gathered."""
    monkeypatch.setattr("kvrs.transfer.checkpoint_sender.GATHER_S", 0.0)


class World:
    """d0, of which streams compute a page after the other; all is sent at once."""

    def __init__(self) -> None:
        self.others = Neighbours()
        at = Peer(InstanceId("d0-stage-0"), NodeId("n0"), "", 0)
        stage = SimpleNamespace(at=at, stages=range(1), bring=self.others.bring)
        self.pages = PageManager(64, P)
        self.ring = StageRing(
            cast(RanksOnNodes, SimpleNamespace(remote=[stage])),
            RING,
            core_of(self.pages),
            ReplicaBook(self.pages, 0.5, lambda: 0.0),
            BackupSettings(),
            TransferSettings(),
            clock=virtual_loop().time,
        )
        self._running = asyncio.create_task(self.ring.run())
        self._runs: dict[str, GenerationRun] = {}

    def _begin(self, name: str) -> GenerationRun:
        sequence = Sequence(
            stream=StreamId(name),
            attempt=(1, 1),
            token_ids=[*range(40 * P)],
            prompt_tokens=40 * P,
            root=root_tag(name),
            prefill_only=False,
        )
        sequence.extend_tags(P)
        run = cast(GenerationRun, SimpleNamespace(sequence=sequence, checkpoints=[D1]))
        self.ring.began(run)
        return run

    async def compute(self, name: str = "s") -> None:
        """One more page of a stream."""
        if (run := self._runs.get(name)) is None:
            run = self._runs[name] = self._begin(name)
        sequence, page = run.sequence, self.pages.allocate(1)
        assert page is not None
        self.pages.register(page[0], sequence.tags[sequence.computed_tokens // P])
        self.pages.release(page)
        sequence.computed_tokens += P
        self.ring.filled(run)
        await asyncio.sleep(0.01)

    async def end(self) -> None:
        self.ring.check()
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


def test_parts_go_to_the_next_one_at_once() -> None:
    """With all that the one before had; and what is new to the first when that takes them again."""

    async def lay() -> list[tuple[float, InstanceId, int]]:
        world = World()
        await world.compute()
        await world.compute()
        world.others.taking.remove(D1)
        await world.compute()
        await asyncio.sleep(1.0)
        world.others.taking.add(D1)
        for _ in range(2):
            await world.compute()
            await asyncio.sleep(5.0)
        await world.end()
        return world.others.got

    got = run_virtually(lay())
    assert [(to, pages) for _, to, pages in got] == [(D1, 1), (D1, 1), (D2, 3), (D2, 1), (D1, 3)]
    assert [at_s for at_s, *_ in got] == pytest.approx([0.0, 0.01, 0.02, 1.03, 6.04], abs=0.01)


def test_a_stream_that_begins_takes_the_others_with_it() -> None:
    """To the first along the ring, also where these have no new page."""

    async def lay() -> list[tuple[float, InstanceId, int]]:
        world = World()
        world.others.taking.remove(D1)
        await world.compute()
        await world.compute()
        await asyncio.sleep(6.0)
        world.others.taking.add(D1)
        await world.compute("t")
        await world.end()
        return world.others.got

    got = [(to, pages) for _, to, pages in run_virtually(lay())]
    assert got == [(D2, 1), (D2, 1), (D1, 1), (D1, 2)]


@pytest.mark.parametrize("away_s", [0.3, 3.0, 20.0])
def test_parts_go_on_soon_after_one_takes_them_again(away_s: float) -> None:
    """However long none has, and without another page."""

    async def lay() -> tuple[str | None, list[tuple[float, InstanceId, int]]]:
        world = World()
        await world.compute()
        world.others.taking.clear()
        await world.compute()
        await asyncio.sleep(away_s)
        unprotected = world.ring.facts_of(0)["unprotected"]
        world.others.taking.add(D2)
        await asyncio.sleep(5.0)
        await world.end()
        return unprotected, world.others.got

    unprotected, (first, then) = run_virtually(lay())
    assert unprotected == "it lends the stage; it lends the stage"
    assert (first[1:], then[1:]) == ((D1, 1), (D2, 2))
    assert away_s < then[0] < away_s + 1.1
