"""DistServe's own engine, made recoverable, over workers of the test's own process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from distserve_patches.jobs import Stage
from tests.distserve_patches.fake_workers import FakeWorkerClass, Recorder, World

if TYPE_CHECKING:
    from distserve_patches.engine import RecoverableEngine

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
Running = Callable[..., contextlib.AbstractAsyncContextManager[tuple["RecoverableEngine", World]]]

# What is held up so that jobs are found there.
HELD = {
    "waiting for the context stage": [("context", "step")],
    "in its batch": [("context", "step")],
    "being copied": [("decoding", "migrate_blocks")],
    "unaccepted behind a copy": [("decoding", "migrate_blocks")],
    "waiting for the decoding stage": [("decoding", "step")],
    "in the batch of the decoding stage": [("decoding", "step")],
}


async def locate(actors: list[Any]) -> list[Any]:
    return [
        SimpleNamespace(actor=actor, pid=number, here=True)
        for number, actor in enumerate(actors, 1)
    ]


async def memory_cause(workers: list[Any]) -> None:
    """Ray's memory monitor has ended none."""


def starter(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    """Starts an engine over fake workers, and checks at the end that no job is left in it."""
    import distserve.single_stage_engine as engines
    import ray
    from distserve import engine as engine_module
    from distserve.config import (
        CacheConfig,
        ContextStageSchedConfig,
        DecodingStageSchedConfig,
        DisaggParallelConfig,
        ModelConfig,
        ParallelConfig,
    )

    from distserve_patches import engine as recoverable
    from distserve_patches import stages

    async def first_death(workers: list[Any]) -> str:
        deaths = [asyncio.ensure_future(worker.actor.death.wait()) for worker in workers]
        try:
            await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for death in deaths:
                death.cancel()
        return "killed by the test"

    monkeypatch.setattr(recoverable, "memory_cause", memory_cause)
    monkeypatch.setattr(stages, "locate", locate)
    monkeypatch.setattr(stages, "first_death", first_death)
    monkeypatch.setattr(ray, "kill", lambda actor: actor.die())
    monkeypatch.setattr(recoverable, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(engine_module.LLMEngine, "_init_placement_groups", lambda self: [None])
    monkeypatch.setattr(engines, "PlacementGroupSchedulingStrategy", lambda **_: None)
    model = ModelConfig(str(tiny_model), None, dtype="fp32")

    @contextlib.asynccontextmanager
    async def start(
        max_batch: int = 4, ranks: int = 1, **sizes: int
    ) -> AsyncIterator[tuple["RecoverableEngine", World]]:
        world = World(**{"context_blocks": 40, "decoding_blocks": 40, **sizes})
        monkeypatch.setattr(engines, "ParaWorker", FakeWorkerClass(world))
        engine = recoverable.RecoverableEngine(
            model,
            DisaggParallelConfig(ParallelConfig(), ParallelConfig(tensor_parallel_size=ranks)),
            CacheConfig(world.block_size, 64, 0.9, 0),
            ContextStageSchedConfig("fcfs", max_batch, 60),
            DecodingStageSchedConfig("fcfs", max_batch, 60),
        )
        await engine.start()
        serving = asyncio.ensure_future(engine.run())
        try:
            yield engine, world
            world.held.clear()
            await until(lambda: (serving.done() and serving.result()) or is_empty(engine))
            assert not world.bugs, world.bugs
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            engine.close()

    return start


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def is_empty(engine: "RecoverableEngine") -> bool:
    """Both stages are up, no job is left, and every block is free."""
    if engine._requests or not all(engine.stage(stage).alive for stage in Stage):
        return False
    for stage in engine._stages.values():
        stage.block_manager.check()
    context, decoding = engine._context.scheduler, engine._decoding.scheduler
    if (
        context.unaccepted_queue
        or context.num_on_fly_request_block
        or engine.stage(Stage.CONTEXT).queued
    ):
        return False
    if (
        decoding.stale
        or engine.stage(Stage.DECODING).queued
        or engine.stage(Stage.DECODING).running
    ):
        return False
    return all(
        engine.stage(stage).pages.free_pages == engine.stage(stage).pages.pages for stage in Stage
    )


async def finished(sink: Recorder) -> Recorder:
    async with asyncio.timeout(20):
        await sink.over.wait()
    return sink
