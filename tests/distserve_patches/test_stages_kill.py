"""Real worker processes under Ray, killed by SIGKILL while they serve, while they start, and twice
in a row.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from distserve_patches.jobs import Job, Stage
from distserve_patches.upstream import LOGICAL_GPU_BYTES
from kvrs.ids import StreamId
from tests.distserve_patches.fake_workers import Recorder, new_job

if TYPE_CHECKING:
    from distserve_patches.engine import RecoverableEngine
    from distserve_patches.pool import StagePool

PAGE_SIZE = 16
Starting = Callable[..., contextlib.AbstractAsyncContextManager["RecoverableEngine"]]
_numbers = itertools.count()


@pytest.fixture
def starting(logical_gpus: int, tiny_model: Path) -> Starting:
    """Starts an engine of (tensor, pipeline) ranks with so many blocks, and checks at the end that
    all of them are free.
    """
    from distserve.config import (
        CacheConfig,
        ContextStageSchedConfig,
        DecodingStageSchedConfig,
        DisaggParallelConfig,
        ModelConfig,
        ParallelConfig,
    )

    from distserve_patches.engine import RecoverableEngine

    model = ModelConfig(str(tiny_model), None, dtype="fp32")

    @contextlib.asynccontextmanager
    async def start(
        *, blocks: int, context: tuple[int, int] = (1, 1), decoding: tuple[int, int] = (1, 1)
    ) -> AsyncIterator["RecoverableEngine"]:
        ranks = DisaggParallelConfig(*(ParallelConfig(tp, 0, pp) for tp, pp in (context, decoding)))
        block_bytes = (
            2
            * model.get_num_layers()
            * model.get_num_heads()
            * PAGE_SIZE
            * model.get_head_size()
            * 4
        )
        needed = (
            LOGICAL_GPU_BYTES * 0.01
            + model.get_model_size_in_bytes()
            + (blocks + 0.5) * block_bytes
        )
        engine = RecoverableEngine(
            model,
            ranks,
            CacheConfig(
                PAGE_SIZE, 256, needed / LOGICAL_GPU_BYTES, (blocks * block_bytes) / (1 << 30)
            ),
            ContextStageSchedConfig("fcfs", 2, 512),
            DecodingStageSchedConfig("fcfs", 4, 512),
        )
        await engine.start()
        serving = asyncio.ensure_future(engine.run())
        try:
            yield engine
            await until(lambda: (serving.done() and serving.result()) or is_empty(engine))
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            engine.close()

    return start


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(90):
        while not condition():
            await asyncio.sleep(0.005)


def is_empty(engine: "RecoverableEngine") -> bool:
    if engine._requests or not all(engine.stage(stage).alive for stage in Stage):
        return False
    for stage in engine._stages.values():
        stage.block_manager.check()
    return all(
        engine.stage(stage).pages.free_pages == engine.stage(stage).pages.pages for stage in Stage
    )


def recorder(job: Job) -> Recorder:
    assert isinstance(job.sink, Recorder)
    return job.sink


def begun(
    engine: "RecoverableEngine",
    histories: Iterable[list[int]],
    max_new: int,
    *,
    prefill_only: bool = False,
) -> list[Job]:
    jobs = [
        new_job(next(_numbers), history, max_new, Recorder(), prefill_only=prefill_only)
        for history in histories
    ]
    for job in jobs:
        engine.begin(job)
    return jobs


async def tokens_of(jobs: list[Job]) -> list[list[int]]:
    await until(lambda: all(recorder(job).over.is_set() for job in jobs))
    assert [recorder(job).failure for job in jobs] == [None] * len(jobs)
    return [recorder(job).tokens for job in jobs]


def histories(count: int, length: int) -> list[list[int]]:
    return [
        [0, *((5 + 7 * number + 3 * index) % 90 + 4 for index in range(length - 1))]
        for number in range(count)
    ]


def kill(engine: "RecoverableEngine", stage: Stage, rank: int = 0) -> None:
    os.kill(engine.stage(stage).worker_pids[rank], signal.SIGKILL)


async def test_decoding_dies_under_load_and_again_while_it_starts(starting: Starting) -> None:
    """Its streams fail, wherever they are; prefills and what they retain stay; after its return
    everything is as before.
    """
    async with starting(blocks=24) as engine:
        # More than fit: some decode, some are swapped out, some wait in every queue.
        asked = histories(9, 60)
        expected = await tokens_of(begun(engine, asked, 70))
        changes: list[tuple[Stage, bool]] = []
        engine.on_stage = lambda stage, state: changes.append((stage, state.alive))
        context = engine.stage(Stage.CONTEXT).pages

        victims = begun(engine, asked, 70)
        line = engine._decoding.scheduler
        await until(
            lambda: line.swapped_queue and line.unaccepted_queue and line.batch_queues[0].requests
        )
        [retained] = begun(engine, histories(1, 40), 1, prefill_only=True)

        def retain() -> None:
            context.retain(StreamId("s"), engine.blocks(retained, Stage.CONTEXT), 40, until_s=1e12)

        recorder(retained).on_prefilled = retain
        kill(engine, Stage.DECODING)
        await until(lambda: not engine.stage(Stage.DECODING).alive)
        assert all(recorder(job).over.is_set() for job in victims)
        assert {failure[0] for job in victims if (failure := recorder(job).failure)} == {
            Stage.DECODING
        }
        for job, tokens in zip(victims, expected, strict=True):
            assert recorder(job).tokens == tokens[: len(recorder(job).tokens)]
        await tokens_of([retained])

        await until(lambda: engine._decoding.located)
        os.kill(engine._decoding.located[0].pid, signal.SIGKILL)
        await until(lambda: engine.stage(Stage.DECODING).alive)
        assert context.retained_tokens(StreamId("s")) == 40
        assert await tokens_of(begun(engine, asked[:4], 70)) == expected[:4]

        kill(engine, Stage.DECODING)
        await until(
            lambda: (
                engine.stage(Stage.DECODING).generation > 2 and engine.stage(Stage.DECODING).alive
            )
        )
        assert await tokens_of(begun(engine, asked[:2], 70)) == expected[:2]
        assert changes == [(Stage.DECODING, False), (Stage.DECODING, True)] * 2


async def test_the_context_stage_dies_and_decoding_goes_on(starting: Starting) -> None:
    """Streams that have left it are not disturbed; what comes after its return finds its way to the
    same decoding workers.
    """
    async with starting(blocks=60) as engine:
        leaving, staying = histories(2, 50), histories(8, 200)
        expected = await tokens_of(begun(engine, leaving, 150))
        decoding_pids = engine.stage(Stage.DECODING).worker_pids

        running = begun(engine, leaving, 150)
        await until(lambda: all(len(recorder(job).tokens) > 1 for job in running))
        lost = begun(engine, staying, 20)
        await until(lambda: engine.stage(Stage.CONTEXT).running)
        kill(engine, Stage.CONTEXT)
        await until(lambda: not engine.stage(Stage.CONTEXT).alive)

        assert await tokens_of(running) == expected
        await until(lambda: all(recorder(job).over.is_set() for job in lost))
        assert {failure[0] for job in lost if (failure := recorder(job).failure)} == {Stage.CONTEXT}
        await until(lambda: engine.stage(Stage.CONTEXT).alive)
        assert await tokens_of(begun(engine, leaving, 150)) == expected
        assert engine.stage(Stage.DECODING).worker_pids == decoding_pids


async def test_one_rank_of_a_stage_takes_the_others_along(starting: Starting) -> None:
    """Also one that does not answer: the next generation has new processes for all ranks."""
    async with starting(blocks=60, decoding=(2, 1)) as engine:
        asked = histories(3, 40)
        expected = await tokens_of(begun(engine, asked, 40))
        before = engine.stage(Stage.DECODING).worker_pids

        victims = begun(engine, asked, 400)
        await until(lambda: all(len(recorder(job).tokens) > 3 for job in victims))
        kill(engine, Stage.DECODING, rank=1)
        await until(lambda: all(recorder(job).failure for job in victims))
        await until(lambda: engine.stage(Stage.DECODING).alive)

        assert not set(before) & set(engine.stage(Stage.DECODING).worker_pids)
        assert await tokens_of(begun(engine, asked, 40)) == expected


async def test_streams_go_on_behind_kv_of_another_stage(starting: Starting) -> None:
    """The pages of a prefill of the whole history come into reserved blocks: the tokens are those
    of one undisturbed stream.
    """
    async with starting(blocks=60) as engine:
        [prompt] = histories(1, 40)
        [expected] = await tokens_of(begun(engine, [prompt], 60))
        history = [*prompt, *expected[:20]]
        with (
            contextlib.closing(engine.pool(Stage.CONTEXT)) as source,
            contextlib.closing(engine.pool(Stage.DECODING)) as target,
        ):
            saved = await pages_of_a_prefill(engine, source, history)
            for kv_tokens in (16, 37, 59):
                job = new_job(next(_numbers), history, 40, Recorder())
                blocks = await engine.reserve(job)
                arriving = target.stage(blocks)
                for view, page in zip(arriving.views, saved, strict=True):
                    view[:] = page
                await arriving.restore(len(blocks))
                arriving.free()
                engine.take_up(job, kv_tokens)

                assert await tokens_of([job]) == [expected[20:]]


async def pages_of_a_prefill(
    engine: "RecoverableEngine", source: "StagePool", history: list[int]
) -> list[bytes]:
    [prefill] = begun(engine, [history], 1, prefill_only=True)
    pages = engine.stage(Stage.CONTEXT).pages
    blocks: list[int] = []

    def keep() -> None:
        blocks.extend(engine.blocks(prefill, Stage.CONTEXT))
        for block in blocks:
            pages.pin(block)

    recorder(prefill).on_prefilled = keep
    await tokens_of([prefill])
    staged = source.stage(blocks)
    await staged.save()
    saved = [bytes(view) for view in staged.views]
    staged.free()
    pages.release(blocks)
    return saved


async def test_the_death_of_a_worker_elsewhere_is_noticed(logical_gpus: int) -> None:
    """There is no handle on a process of another machine; Ray knows."""
    import ray

    from distserve_patches.watch import first_death, locate

    class Idle:
        pass

    actor = ray.remote(num_cpus=0)(Idle).remote()
    [worker] = await locate([actor])
    assert worker.here
    noticing = asyncio.ensure_future(first_death([dataclasses.replace(worker, here=False)]))
    await asyncio.sleep(0.1)
    assert not noticing.done()
    os.kill(worker.pid, signal.SIGKILL)

    async with asyncio.timeout(30):
        assert str(worker.pid) in await noticing
