"""Pages of real stages: upstream's engine over Ray workers, whose ranks have parts of the model's
KV.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from distserve_patches.jobs import Job, Stage
from kvrs.config.cluster import EngineSettings
from kvrs.errors import TransferError
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk

if TYPE_CHECKING:
    from distserve_patches.engine import RecoverableEngine

PAGE = 16
HISTORY = [0, *range(5, 5 + 2 * PAGE + 6)]
PAGES = 3  # The last one is partial.
NEW = 20


class Listener:
    """A sink with a replaceable `prefilled`."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.at_prefilled: Any = lambda: None
        self.over = asyncio.Event()
        self.limit = 1

    def token(self, token_id: int) -> bool:
        self.tokens.append(token_id)
        if len(self.tokens) == self.limit:
            self.over.set()
        return len(self.tokens) < self.limit

    def prefilled(self) -> None:
        self.at_prefilled()

    def failed(self, stage: Stage, cause: str) -> None:
        raise AssertionError(f"{stage}: {cause}")


# Workers take long to start: they serve all tests, of which the last one kills.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def made(logical_gpus: int, tiny_model: Path) -> AsyncIterator["RecoverableEngine"]:
    """Two ranks that split the heads compute prompts, two that split the layers decode."""
    from distserve import config

    from distserve_patches.engine import RecoverableEngine

    engine = RecoverableEngine(
        config.ModelConfig(str(tiny_model), None, dtype="fp32"),
        config.DisaggParallelConfig(config.ParallelConfig(2, 0, 1), config.ParallelConfig(1, 0, 2)),
        config.CacheConfig(PAGE, 64, cpu_swap_space=0.01),
        config.ContextStageSchedConfig("fcfs", 8, 4096),
        config.DecodingStageSchedConfig("fcfs", 8, 4096, waiting_block_prop_threshold=1.0),
    )
    await engine.start()
    running = asyncio.create_task(engine.run())
    yield engine
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    engine.close()


async def prefilled_pages(made: "RecoverableEngine", number: int) -> list[int]:
    """The context stage computes the history; its pages are pinned when this returns."""
    sink, pages = Listener(), made.stage(Stage.CONTEXT).pages
    job, pinned = Job(number, HISTORY, 1, True, sink), []

    def pin() -> None:
        pinned.extend(made.blocks(job, Stage.CONTEXT))
        for page in pinned:
            pages.pin(page)

    sink.at_prefilled = pin
    made.begin(job)
    await sink.over.wait()
    return pinned


def embedded(model: Path) -> tuple[list[bytes], list[int]]:
    """The embedded engine's pages of the history, and how it goes on."""
    worker = Worker(model, EngineSettings(pages=8, page_size_tokens=PAGE))
    tokens, first, pages = list(HISTORY), 0, list(range(8))
    before: list[bytes] = []
    while len(tokens) < len(HISTORY) + NEW:
        logits = worker.execute([Chunk(tokens[first:], first, pages, logits=1)])
        before = before or [bytes(worker.pool.view(page)) for page in range(PAGES)]
        first = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return before, tokens[len(HISTORY) :]


async def test_pages_go_from_a_context_stage_into_a_decoding_stage_of_another_shape(
    made: "RecoverableEngine", tiny_model: Path
) -> None:
    """They are the embedded engine's, bit by bit, and an engine that fetches them continues with
    its tokens.
    """
    expected, continuation = embedded(tiny_model)
    async with asyncio.timeout(60):
        theirs = made.pool(Stage.CONTEXT).stage(await prefilled_pages(made, 1))
        await theirs.save()
        assert [bytes(view) for view in theirs.views] == expected

        sink, pool = Listener(), made.pool(Stage.DECODING)
        sink.limit = NEW
        job = Job(2, HISTORY, NEW, False, sink)
        arrived = pool.stage(await made.reserve(job))
        for view, sent in zip(arrived.views, theirs.views, strict=True):
            view[:] = sent
        await arrived.restore(PAGES)
        made.take_up(job, len(HISTORY) - 1)
        await sink.over.wait()

        assert sink.tokens == continuation


async def test_pages_get_out_while_a_step_runs(made: "RecoverableEngine", tiny_model: Path) -> None:
    """A step that does not end until its other rank comes holds up no export."""
    import ray

    expected, _ = embedded(tiny_model)
    async with asyncio.timeout(60):
        pages = await prefilled_pages(made, 3)
        ((leader, follower),) = made._context.workers
        token = [[1], [[5]], [0], [[made.stage(Stage.CONTEXT).pages.pages - 1]]]
        step = follower.step.remote(*token)

        staged = made.pool(Stage.CONTEXT).stage(pages)
        await staged.save()

        assert [bytes(view) for view in staged.views] == expected
        assert ray.wait([step], timeout=0)[0] == []
        await leader.step.remote(*token)
        await step


async def test_a_killed_worker_fails_the_transfer_and_takes_nothing_along(
    made: "RecoverableEngine",
) -> None:
    """Pages staged before are still there; the memory has no name that would stay."""
    async with asyncio.timeout(60):
        pool = made.pool(Stage.CONTEXT)
        pages = await prefilled_pages(made, 4)
        staged, more = pool.stage(pages), pool.stage(pages)
        await staged.save()
        before = [bytes(view) for view in staged.views]

        os.kill(made.stage(Stage.CONTEXT).worker_pids[1], signal.SIGKILL)
        with pytest.raises(TransferError, match="worker died"):
            await more.save()

        assert [bytes(view) for view in staged.views] == before
        assert os.readlink(pool.slots.file.path).startswith("/memfd:")
