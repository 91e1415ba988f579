"""Streams whose cells are lost: what agents hold of them is fetched, the rest computed, in the same
attempt. The ranks are threads.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs.errors import RanksLostError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.pages import Cell, TrafficClass
from kvrs.transfer.peers import PullResult
from kvrs_engine.elastic.layouts import hybrid, staged
from kvrs_engine.engine.hooks import StepHook
from kvrs_engine.engine.instance import EngineInstance, LoadedModel, describe_model
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.reformer import cells_of
from kvrs_engine.engine.routes import make_routes
from kvrs_engine.engine.worker import end_tokens_of, geometry_of
from kvrs_engine.scheduling import sequences
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_testkit.ports import instance_client
from kvrs_testkit.ranks_in_threads import ThreadRanks
from tests.engine.serving import SECRET
from tests.engine.test_checkpoints_engine import agent, ask, cluster, eventually, prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.network]

PROMPT, TOKENS = prompt_of(3, 100), 80
STEPS = 20
BASE = 1  # Of all streams.


class LosingRanks(ThreadRanks, StepHook):
    """A worker of ranks that can lose the cells of one; the others compute on at once."""

    def __init__(self, model: Path, settings: EngineSettings, ranks: int) -> None:
        config = ModelConfig.from_directory(model)
        units = config.units_of_ranks
        self.layout = hybrid(units, staged(units.layers, [range(ranks)]))
        super().__init__(model, settings, self.layout)
        self.settings, self.geometry = settings, geometry_of(config, settings)
        self.vocab_size, self.eos_token_ids = config.vocab, end_tokens_of(config)
        self.max_positions, self.fingerprint = config.max_positions, "of threads"
        self.pool = self.pages
        self.gpus: list[str] | None = None
        self.steps: int | None = None  # That are computed before it waits for `may_go_on`.
        self.may_go_on = threading.Event()

    def execute(self, chunks: Sequence[Chunk]) -> Tensor:
        losses = self.pool.losses
        if not self.pool.is_whole:
            raise RanksLostError([], "has lost cells before")
        if self.steps is not None:
            self.steps -= 1
            if self.steps < 0:
                self.may_go_on.wait()
        logits = super().execute(chunks)
        if losses != self.pool.losses:
            raise RanksLostError([], "has lost cells meanwhile")
        return logits

    def place(self, sequence: sequences.Sequence, others: object) -> None:
        sequence.base = BASE

    def on_restart(self) -> None:
        self.pool.mended()


class Losing:
    """An instance over such ranks, and what it fetches."""

    def __init__(self, instance: EngineInstance, ranks: LosingRanks) -> None:
        self.instance, self._ranks = instance, ranks
        self.asked: list[range] = []
        self.lost: frozenset[Cell] = frozenset()  # The last time, of each page.
        self.may_pull = asyncio.Event()
        self.may_pull.set()
        self._pull = instance.port.puller.pull
        instance.port.puller.pull = self._pulling  # type: ignore[method-assign]

    def stop_after(self, steps: int) -> None:
        """Compute nothing after so many steps, until it may go on."""
        self._ranks.may_go_on.clear()
        self._ranks.steps = steps

    def go_on(self) -> None:
        self._ranks.steps = None
        self._ranks.may_go_on.set()

    def lose(self, rank: int) -> None:
        cells = {BASE: cells_of(self._ranks.layout, rank, BASE)}
        self.lost = cells[BASE]
        assert self.lost
        self._ranks.pool.lose(cells, self.instance.pages.bases)
        self.instance.core.lose_cells(cells)

    async def lose_more(self, rank: int) -> None:
        """Lose these too, and wait until every run has begun again: before, the loop may wait for
        the ranks of the loss before.
        """
        self.lose(rank)
        await eventually(lambda: not self.instance.core._lost_cells)

    def held(self, stream: StreamId) -> int:
        """Pages that the agent holds as far as it has told."""
        core = self.instance.core
        runs = [run for sequence, run in core._runs.items() if sequence.stream == stream]
        return max((held for run in runs for held in core._held_by_agents(run).values()), default=0)

    @property
    def restored_bytes(self) -> int:
        """Since the start."""
        return self.instance.port.puller.pulled_bytes[TrafficClass.RECOVERY]

    async def _pulling(self, peer: Any, request: Any, *rest: Any, **named: Any) -> PullResult:
        self.asked.append(range(len(request.tags)))
        await self.may_pull.wait()
        return await self._pull(peer, request, *rest, **named)


@asynccontextmanager
async def losing(
    model: Path, agent_port: int, count: int
) -> AsyncIterator[tuple[Losing, aiohttp.ClientSession]]:
    # An engine measures itself when it starts: up to its longest stream.
    config = cluster(model, agent_port, engine={"pages": 64, "max_model_len": 256})
    ranks: Any = LosingRanks(model, config.cluster.engine, count)  # By its face a `ModelWorker`.
    loaded = LoadedModel(ranks, describe_model(config, model, ranks))
    instance = EngineInstance(config, InstanceId("d0"), 1, SECRET, loaded=loaded)
    instance.core.hooks.append(ranks)
    async with instance_client(make_routes(instance), SECRET, "d0") as client:
        await instance.start()
        try:
            yield Losing(instance, ranks), client
            assert instance.failed() is None
        finally:
            await instance.close()
            ranks.close()
    instance.pages.check()
    assert instance.pages.free_pages == instance.pages.pages


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
async def test_streams_that_lose_cells_go_on_whatever_is_lost_while_they_are_restored(
    dense_or_experts: Path, tmp_path: Path, ranks: int
) -> None:
    """Pages that the agent holds are fetched and the rest computed; the tokens equal those of an
    undisturbed stream. Cells lost during a restore are fetched too, although the agent has not
    reported on the restarted stream yet; a lost agent is done without. Two ranks have a head each;
    three have both spread, and the streams' base says by which layers.
    """
    async with asyncio.timeout(180), AsyncExitStack() as agents:
        _, port = await agents.enter_async_context(agent(tmp_path / "store"))
        async with losing(dense_or_experts, port, ranks) as (engine, client):
            core = engine.instance.core
            plain = await ask(client, "plain", PROMPT, TOKENS, kvrs={"checkpoints": []})
            expected = plain["choices"][0]["token_ids"]

            async def lose(stream: str) -> asyncio.Task[dict[str, Any]]:
                """Its answer; what it fetches has been asked for, and waits."""
                core.pages.reset_cache()
                engine.asked.clear()
                engine.stop_after(STEPS)
                asked = asyncio.create_task(ask(client, stream, PROMPT, TOKENS))
                await eventually(lambda: engine.held(StreamId(stream)) >= 4)
                engine.may_pull.clear()
                engine.lose(1)
                engine.go_on()
                await eventually(lambda: len(engine.asked) == 1)
                return asked

            async def tokens(asked: asyncio.Task[dict[str, Any]]) -> Any:
                engine.may_pull.set()
                return (await asked)["choices"][0]["token_ids"]

            once = await lose("once")
            assert core.missing_pages[StreamId("once")] >= len(engine.asked[0]) >= 4
            assert await tokens(once) == expected
            assert core.fetched_pages == len(engine.asked[0])
            # Of each page the lost rank's cells and nothing else.
            geometry = engine.instance.worker.geometry
            lost_bytes = geometry.page_bytes * len(engine.lost) // geometry.page_cells
            assert lost_bytes < geometry.page_bytes
            assert engine.restored_bytes == len(engine.asked[0]) * lost_bytes

            # What was on its way is not fetched once more.
            fetched, restored_bytes = core.fetched_pages, engine.restored_bytes
            twice, before = await lose("twice"), engine.lost
            await engine.lose_more(0)
            assert await tokens(twice) == expected
            assert core.fetched_pages - fetched == len(engine.asked[0])
            lost_bytes = geometry.page_bytes * len(before | engine.lost) // geometry.page_cells
            assert engine.restored_bytes - restored_bytes == len(engine.asked[0]) * lost_bytes

            fetched = core.fetched_pages
            alone = await lose("alone")
            await agents.aclose()
            assert await tokens(alone) == expected
            assert core.fetched_pages == fetched
