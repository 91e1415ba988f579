"""An engine with several batches in flight at a time."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrs.errors import RanksLostError
from kvrs_engine.engine import instance
from kvrs_engine.engine.core import EngineCore
from kvrs_engine.engine.hooks import StepHook
from kvrs_engine.scheduling.sequences import Chunk
from tests.engine.peers import PATIENCE_S, PeerEngine, peer_engines

pytestmark = [pytest.mark.engine, pytest.mark.network]

PROMPTS = [[3 + position * step % 500 for position in range(40)] for step in (7, 11)]


def body(prompt: Sequence[int], stream: str) -> dict[str, Any]:
    kvrs = {"stream": stream, "attempt": 1, "prompt_tokens": len(prompt)}
    return {"prompt": prompt, "max_tokens": 30, "ignore_eos": True, "temperature": 0, "kvrs": kvrs}


@pytest.fixture
async def engines(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[PeerEngine]]:
    """One with one batch at a time, and one with two."""
    depths = iter([1, 2])

    def core(*given: Any, **named: Any) -> EngineCore:
        return EngineCore(*given, **named | {"batches": next(depths)})

    monkeypatch.setattr(instance, "EngineCore", core)
    async with peer_engines([tiny_model] * 2) as both:
        yield both


async def both_in_flight(engine: PeerEngine) -> list[Any]:
    """Two streams, each with a batch that is computed and cannot end."""
    engine.may_compute.clear()
    runs = []
    for count, prompt in enumerate(PROMPTS, 1):
        runs.append(await engine.begin(body(prompt, f"s{count}")))
        await engine.until(partial(lambda count: len(engine.computed) == count, count))
    engine.instance.core.scheduler.check()
    return runs


async def test_two_batches_at_a_time_yield_the_tokens_of_one(engines: list[PeerEngine]) -> None:
    """A stream that arrives while a batch is computed does not wait for its end."""
    one, two = engines
    expected = [await one.answer(body(prompt, f"s{at}")) for at, prompt in enumerate(PROMPTS)]

    runs = await both_in_flight(two)
    two.may_compute.set()

    assert [await two.rest_of(run) for run in runs] == expected


async def test_batches_that_are_lost_together_are_computed_after_one_wait(
    engines: list[PeerEngine],
) -> None:
    """No stream notices, and the ranks are awaited when nothing is in flight."""
    one, two = engines
    expected = [await one.answer(body(prompt, f"s{at}")) for at, prompt in enumerate(PROMPTS)]
    core, waits = two.instance.core, []

    class Waiting(StepHook):
        def on_lost(self) -> None:
            waits.append(len(core._in_flight))

    core.hooks.append(Waiting())
    losing(two, calls=2)
    runs = await both_in_flight(two)
    two.may_compute.set()

    assert [await two.rest_of(run) for run in runs] == expected
    assert waits == [0]


async def test_pages_of_a_lost_batch_are_nobody_elses_until_the_ranks_compute_again(
    engines: list[PeerEngine],
) -> None:
    """A rank that lives may still write into them, also where the client has gone."""
    two = engines[1]
    core, pages = two.instance.core, two.instance.pages
    may_go_on = threading.Event()
    free: list[int] = []

    class Waiting(StepHook):
        def on_lost(self) -> None:
            free.append(pages.free_pages)
            assert may_go_on.wait(PATIENCE_S)

    core.hooks.append(Waiting())
    losing(two, calls=1)
    run = await two.begin(body(PROMPTS[0], "s1"))
    await two.until(lambda: len(free) == 1)
    core.abort(run)
    await asyncio.sleep(0)

    assert free == [pages.free_pages]
    may_go_on.set()
    await two.until(lambda: pages.free_pages > free[0])
    core.scheduler.check()


async def test_batches_that_are_lost_at_the_end_of_an_engine_are_no_error(
    engines: list[PeerEngine],
) -> None:
    """Nothing awaits them any more, and none is reported as an exception that was overlooked."""
    two, reported = engines[1], list[Any]()
    core = two.instance.core
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    losing(two, calls=2)
    await both_in_flight(two)

    await two.instance.close()
    two.may_compute.set()
    await asyncio.to_thread(core._thread.shutdown)
    await asyncio.sleep(0)
    core._in_flight.clear()
    gc.collect()

    assert reported == []


def losing(engine: PeerEngine, calls: int) -> None:
    """That many batches are lost."""
    lock, execute = threading.Lock(), engine._execute
    left = [calls]

    def lose(chunks: Sequence[Chunk]) -> Any:
        with lock:
            left[0] -= 1
            if left[0] >= 0:
                raise RanksLostError([1], "has died")
            return execute(chunks)

    engine._execute = lose
