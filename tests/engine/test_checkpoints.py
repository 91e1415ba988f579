"""The checkpointer between a page manager and agents that take, refuse, die and stall. No sockets
and no model.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from kvrs.config.backup import BackupSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import CheckpointTarget
from kvrs.protocol.pages import Tag, root_tag
from kvrs.transfer import checkpoint_backlog as backlog
from kvrs.transfer import checkpoint_sender
from kvrs.transfer.checkpoint_sender import PagePusher
from kvrs.transfer.peers import (
    CheckpointClaim,
    HeldPages,
    Peer,
    StoreCode,
    StoredPages,
)
from kvrs_engine.engine.checkpoints import Checkpointer
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.engine.requests import GenerationRun
from kvrs_engine.scheduling import sequences
from kvrs_engine.scheduling.pages import PageManager

PAGE = 4
GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=2, dtype_bytes=4, page_size_tokens=PAGE)
A, B = InstanceId("agent-a"), InstanceId("agent-b")
AGENTS = {name: Peer(name, NodeId("n"), "127.0.0.1", 1) for name in (A, B)}


class Agents(PagePusher):
    """The peers of a pusher; they switch tasks between the pages that they copy."""

    def __init__(self) -> None:
        self.mood: dict[InstanceId, str] = {A: "well", B: "well"}
        self.reserved: set[tuple[InstanceId, StreamId]] = set()
        self.tags: dict[tuple[InstanceId, StreamId], list[Tag]] = {}
        self.bytes: dict[Tag, bytes] = {}
        self.received: list[Tag] = []
        self.offers = 0
        self.stalled = 0
        self.stall: asyncio.Future[None] | None = None
        self.on_store: Callable[[], None] = lambda: None

    async def offer(
        self, peer: Peer, claim: CheckpointClaim, reserved_bytes: int, tags: Sequence[Tag]
    ) -> HeldPages:
        self.offers += 1
        await self._suffer(peer.instance, "offers")
        key = (peer.instance, claim.stream)
        if self.mood[peer.instance] == "full":
            return HeldPages(StoreCode.FULL, 0)
        self.reserved.add(key)
        held = self.tags.setdefault(key, [])
        common = 0
        while common < min(len(held), len(tags)) and held[common] == tags[common]:
            common += 1
        return HeldPages(StoreCode.OK, common)

    async def store(self, peer: Peer, batch: Sequence[StoredPages]) -> list[HeldPages]:
        self.on_store()
        await self._suffer(peer.instance, "stores")
        return [await self._take(peer.instance, stored) for stored in batch]

    async def _take(self, agent: InstanceId, stored: StoredPages) -> HeldPages:
        key = (agent, stored.claim.stream)
        held = self.tags.get(key, [])
        if key not in self.reserved or stored.first_page > len(held):
            return HeldPages(StoreCode.OK, len(held))
        del held[stored.first_page :]
        for tag, page in zip(stored.tags, stored.pages, strict=True):
            await asyncio.sleep(0)
            self.bytes[tag] = bytes(page)
            self.received.append(tag)
            held.append(tag)
        return HeldPages(StoreCode.OK, len(held))

    async def _suffer(self, agent: InstanceId, what: str) -> None:
        if self.mood[agent] == "dead":
            await asyncio.sleep(0)
            raise TransferError("connection refused")
        if self.mood[agent] == f"stalls at {what}":
            self.stalled += 1
            self.stall = asyncio.get_running_loop().create_future()
            await self.stall

    def die(self, agent: InstanceId, *, empty: bool) -> None:
        self.mood[agent] = "dead"
        self.reserved -= {key for key in self.reserved if key[0] == agent}
        if empty:
            self.tags = {key: tags for key, tags in self.tags.items() if key[0] != agent}


class World:
    """Pages whose bytes are a function of their tag, and a scheduler that the test
    drives.
    """

    def __init__(self, pages: int = 256, **backup: Any) -> None:
        self.pages = PageManager(pages, PAGE)
        self.pool = KvPool(GEOMETRY, pages, torch.device("cpu"))
        self.agents = Agents()
        self.released = 0
        settings = BackupSettings(**backup)
        self.checkpointer = Checkpointer(
            self.pages,
            self.pool,
            self.agents,
            AGENTS,
            settings,
            clock=self.now_s,
            released=self._count,
        )
        self.most_pinned = 0
        self.sequences: list[sequences.Sequence] = []
        self.agents.on_store = self._look

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _look(self) -> None:
        self.most_pinned = max(self.most_pinned, self.checkpointer.lent_pages)

    def _count(self) -> None:
        self.released += 1

    def begin(
        self,
        stream: str,
        *to: InstanceId,
        history: int = 0,
        prefill_only: bool = False,
    ) -> sequences.Sequence:
        sequence = sequences.Sequence(
            StreamId(stream),
            (0, 1),
            [7] * max(1, history * PAGE + 1),
            0,
            root_tag("m", stream),
            prefill_only,
        )
        sequence.extend_tags(PAGE)
        self.sequences.append(sequence)
        self.checkpointer.began(run_of(sequence, to or (A,)))
        return sequence

    def fill(self, sequence: sequences.Sequence, pages: int) -> None:
        """Compute that many pages more and report them."""
        for _ in range(pages):
            index = sequence.computed_tokens // PAGE
            while len(sequence.token_ids) <= (index + 1) * PAGE:
                sequence.token_ids.append(len(sequence.token_ids))
            sequence.extend_tags(PAGE)
            allocated = self.pages.allocate(1)
            assert allocated is not None
            self.pool.view(allocated[0])[:] = bytes_of(sequence.tags[index])
            sequence.pages.append(self.pages.register(allocated[0], sequence.tags[index]))
            sequence.computed_tokens = (index + 1) * PAGE
        self.checkpointer.filled(run_of(sequence))

    def end(self, sequence: sequences.Sequence, *, retained: bool = False) -> None:
        if retained:
            self.pages.retain(
                sequence.stream, sequence.pages, len(sequence.pages) * PAGE, until_s=1e9
            )
        if sequence.prefill_only:
            sequence.computed_tokens = (
                sequence.history_tokens
            )  # The last position lies in a page that is not full.
        self.pages.release(sequence.pages)
        sequence.pages = []
        self.checkpointer.ended(run_of(sequence))

    async def settled(self) -> None:
        await eventually(lambda: self.checkpointer.lag_pages == 0)

    def assert_held(self, sequence: sequences.Sequence, pages: int, agent: InstanceId = A) -> None:
        """Whole, right, and in order."""
        held = self.agents.tags[agent, sequence.stream]
        assert held == sequence.tags[:pages]
        assert all(self.agents.bytes[tag] == bytes_of(tag) for tag in held)


def bytes_of(tag: Tag) -> bytes:
    return random.Random(tag).randbytes(GEOMETRY.page_bytes)


def run_of(sequence: sequences.Sequence, agents: Sequence[InstanceId] = ()) -> GenerationRun:
    nothing: Any = None
    return GenerationRun(
        sequence=sequence,
        params=nothing,
        penalties=None,
        logprobs=None,
        text=nothing,
        max_tokens=1,
        min_tokens=0,
        end_token_ids=frozenset(),
        stop_token_ids=frozenset(),
        sources=(),
        checkpoints=tuple(CheckpointTarget(agent, 1000) for agent in agents),
    )


async def eventually(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def working(world: World) -> AsyncIterator[World]:
    """While its background runs; at the end nothing is pinned any more and all books agree."""
    task = asyncio.create_task(world.checkpointer.run())
    try:
        yield world
        assert not task.done(), task
        world.checkpointer.check()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert world.checkpointer.lent_pages == 0
    for sequence in world.sequences:
        world.pages.release(sequence.pages)
    world.pages.check()
    assert world.pages.free_pages == world.pages.pages
    assert world.most_pinned <= world.checkpointer._staging_pages


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_sender, "RETRY_S", 0.01)
    monkeypatch.setattr(backlog, "LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr(backlog, "STUCK_S", 0.02)
    monkeypatch.setattr(backlog, "ROOM_S", 0.02)


async def test_pages_arrive_whole_at_every_agent_and_the_lag_returns_to_zero() -> None:
    """Whenever they are filled, and however many at a time."""
    async with working(World()) as world:
        streams = [world.begin(f"s{index}", A, B) for index in range(5)]
        for number in range(1, 5):
            for sequence in streams:
                world.fill(sequence, number)
            await asyncio.sleep(0)
        assert world.checkpointer.lag_pages > 0
        await world.settled()

        for sequence in streams:
            world.assert_held(sequence, 10, A)
            world.assert_held(sequence, 10, B)
        assert len(world.agents.received) == 2 * 5 * 10, "no page twice"
        assert world.checkpointer.unprotected == 0


async def test_an_agent_that_stalls_with_all_that_may_be_pinned_is_waited_for() -> None:
    """Its pages count until it has given up, or was given up."""
    async with working(World(staging_pages=4)) as world:
        world.agents.mood[A] = "stalls at stores"
        world.fill(world.begin("s", A), 10)
        await eventually(lambda: world.agents.stalled == 1)
        other = world.begin("other", B)
        world.fill(other, 3)
        await eventually(lambda: (B, other.stream) in world.agents.reserved)
        assert (world.checkpointer.lent_pages, world.agents.received) == (4, [])

        assert world.agents.stall is not None
        world.agents.stall.set_exception(TransferError("stalled"))
        await eventually(lambda: len(world.agents.received) == 3)

        world.assert_held(other, 3, B)


async def test_what_a_stalled_agent_leaves_is_enough_for_another() -> None:
    """Page by page if need be; `working` looks that it is never more."""
    async with working(World(staging_pages=4)) as world:
        world.agents.mood[A] = "stalls at stores"
        world.fill(world.begin("s", A), 3)
        await eventually(lambda: world.agents.stalled == 1)
        other = world.begin("other", B)
        world.fill(other, 5)
        await eventually(lambda: len(world.agents.received) == 5)

        world.assert_held(other, 5, B)
        assert world.most_pinned == 4


async def test_a_small_pool_is_not_held_up_by_its_staging() -> None:
    """A quarter of the pages is the most that sending may hold on to."""
    async with working(World(pages=16, staging_pages=64)) as world:
        world.agents.mood[A] = "stalls at stores"
        sequence = world.begin("s")
        world.fill(sequence, 16)
        await eventually(lambda: world.agents.stalled == 1)
        world.end(sequence)

        assert world.checkpointer.lent_pages == 4
        assert world.pages.free_pages == 12


@pytest.mark.parametrize("mood", ["dead", "stalls at offers", "stalls at stores", "full"])
async def test_an_agent_that_does_not_take_pages_holds_up_no_stream(mood: str) -> None:
    """Another agent gets everything, and the engine's own calls return at once: they are no
    coroutines.
    """
    async with working(World(staging_pages=8)) as world:
        world.agents.mood[A] = mood
        sequence = world.begin("s", A, B)
        world.fill(sequence, 20)
        await eventually(lambda: len(world.agents.tags.get((B, sequence.stream), [])) == 20)
        world.fill(sequence, 20)
        await eventually(lambda: len(world.agents.tags.get((B, sequence.stream), [])) == 40)

        world.assert_held(sequence, 40, B)
        assert world.checkpointer.lag_pages == (0 if mood == "full" else 40)
        assert world.checkpointer.unprotected == 0
        world.end(sequence)
        assert world.checkpointer.lag_pages == 0


@pytest.mark.parametrize("empty", [False, True])
async def test_an_agent_that_is_back_is_offered_its_pages_again(empty: bool) -> None:
    """It is sent what it lost, and nothing that it kept."""
    async with working(World()) as world:
        sequence = world.begin("s")
        world.fill(sequence, 5)
        await world.settled()
        world.agents.die(A, empty=empty)
        world.fill(sequence, 2)
        offers = world.agents.offers
        await eventually(lambda: world.agents.offers > offers + 1)
        assert (world.checkpointer.unprotected, world.checkpointer.lag_pages) == (1, 2)

        world.agents.mood[A] = "well"
        await world.settled()

        world.assert_held(sequence, 7)
        assert world.agents.received.count(sequence.tags[0]) == 1 + empty
        assert world.checkpointer.unprotected == 0


async def test_a_prompt_that_was_cached_is_brought_all_the_same() -> None:
    """No batch filled a page of it, so its end is the first event."""
    async with working(World()) as world:
        first = world.begin("s", B, history=3, prefill_only=True)
        world.fill(first, 3)
        again = world.begin("s", A, history=3, prefill_only=True)
        again.computed_tokens = 3 * PAGE + 1
        self_pages = list(first.pages)
        world.pages.retain(again.stream, self_pages, 3 * PAGE, until_s=1e9)
        world.checkpointer.ended(run_of(again))
        await world.settled()

        world.assert_held(again, 3, A)


async def test_a_waiter_for_pages_hears_when_they_are_not_pinned_any_more() -> None:
    async with working(World()) as world:
        world.fill(world.begin("s"), 1)
        await world.settled()

        assert world.released == 1


async def test_without_agents_it_waits_for_ever_and_does_nothing() -> None:
    """An instance with an ended task counts as broken."""
    pages = PageManager(4, PAGE)
    pool = KvPool(GEOMETRY, 4, torch.device("cpu"))
    idle = Checkpointer(
        pages, pool, Agents(), {}, BackupSettings(), clock=lambda: 0.0, released=lambda: None
    )
    task = asyncio.create_task(idle.run())
    await asyncio.sleep(0)
    sequence = sequences.Sequence(
        StreamId("s"), (0, 1), [1], 0, root_tag("m", ""), prefill_only=False
    )
    idle.began(run_of(sequence, [A]))
    idle.filled(run_of(sequence))
    idle.ended(run_of(sequence))

    assert not task.done()
    assert (idle.lag_pages, idle.unprotected) == (0, 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
