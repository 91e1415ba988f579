"""Upstream's own engine, schedulers and block manager over workers of the test's process: every
state that a job can be in.
"""

import asyncio
from pathlib import Path

import pytest

from distserve_patches.jobs import JobEnded, Stage
from tests.distserve_patches.fake_engine import (
    HELD,
    PROMPT,
    Running,
    finished,
    is_empty,
    starter,
    until,
)
from tests.distserve_patches.fake_workers import Recorder, continuation, new_job


@pytest.fixture
def running(distserve: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    return starter(tiny_model, monkeypatch)


async def test_a_stream_has_the_tokens_of_an_undisturbed_engine(running: Running) -> None:
    """Prefill, hand-off and decoding by upstream's own code; token 0 comes after `prefilled`."""
    async with running() as (engine, _):
        sinks = [Recorder() for _ in range(6)]
        for number, sink in enumerate(sinks):
            engine.begin(new_job(number, [*PROMPT, number], 12, sink))

        for number, sink in enumerate(sinks):
            await finished(sink)
            assert sink.was_prefilled
            assert sink.tokens == continuation([*PROMPT, number], 12)


async def test_a_prefill_ends_with_token_0_and_its_pages_can_be_retained(running: Running) -> None:
    """Pages that the sink retains in `prefilled` stay when the job has let go of them."""
    async with running() as (engine, world):
        sink = Recorder()
        job = new_job(1, PROMPT, 1, sink, prefill_only=True)
        pages = engine.stage(Stage.CONTEXT).pages
        held: list[int] = []

        def retain() -> None:
            held.extend(engine.blocks(job, Stage.CONTEXT))
            pages.retain("stream", held, len(PROMPT), until_s=1e9)  # type: ignore[arg-type]

        sink.on_prefilled = retain
        engine.begin(job)
        await finished(sink)

        assert sink.tokens == continuation(PROMPT, 1)
        assert pages.retained_tokens("stream") == len(PROMPT)  # type: ignore[arg-type]
        [worker] = world.living("context")
        assert [token for block in held for token in worker.blocks[block]][: len(PROMPT)] == PROMPT


async def test_a_sink_that_wants_no_more_ends_its_job_in_the_same_step(running: Running) -> None:
    """Stop strings are found by the server; neither stage computes a step for them in vain."""
    async with running() as (engine, world):
        at_once, later = Recorder(wants=1), Recorder(wants=5)
        engine.begin(new_job(1, PROMPT, 50, at_once))
        await finished(at_once)
        assert world.calls["decoding", "step"] == 0
        await until(lambda: is_empty(engine))

        engine.begin(new_job(2, PROMPT, 50, later))
        await finished(later)
        await until(lambda: is_empty(engine))

        assert later.tokens == continuation(PROMPT, 5)
        assert world.calls["decoding", "step"] == 4


@pytest.mark.parametrize("kv_tokens", [1, 4, 7, 8, 9, 12])
async def test_a_job_goes_on_behind_whatever_kv_was_brought(
    running: Running, kv_tokens: int
) -> None:
    """The tokens behind the KV are decoded again and dropped; what comes out is what was not known
    yet.
    """
    async with running() as (engine, world):
        history = [*PROMPT, *continuation(PROMPT, 3)]
        sink = Recorder()
        job = new_job(1, history, 9, sink)

        blocks = await engine.reserve(job)
        assert blocks == engine.blocks(job, Stage.DECODING)
        [worker] = world.living("decoding")
        for position, token in enumerate(history[:kv_tokens]):
            worker.blocks[blocks[position // 4]][position % 4] = token
        engine.take_up(job, kv_tokens)
        await finished(sink)

        assert sink.tokens == continuation(history, 9)
        assert world.calls["context", "step"] == 0


async def test_reservations_wait_their_turn(running: Running) -> None:
    """The first request gets room first, and an abort admits the next one."""
    async with running(decoding_blocks=6) as (engine, _):
        jobs = [new_job(number, PROMPT, 4, Recorder()) for number in range(4)]
        waiting = [asyncio.ensure_future(engine.reserve(job)) for job in jobs]
        await until(lambda: waiting[1].done())
        assert not waiting[2].done()

        engine.abort(jobs[2])
        with pytest.raises(JobEnded):
            await waiting[2]
        engine.abort(jobs[0])
        await until(lambda: waiting[3].done())

        assert engine.stage(Stage.DECODING).pages.free_pages == 0
        for job in jobs:
            engine.abort(job)


async def test_a_cancelled_reservation_leaves_nothing(running: Running) -> None:
    """Also when its blocks are granted in the moment in which its task is cancelled."""
    async with running(decoding_blocks=3) as (engine, _):
        first, second = (new_job(number, PROMPT, 2, Recorder()) for number in range(2))
        await engine.reserve(first)
        waiting = asyncio.ensure_future(engine.reserve(second))
        await asyncio.sleep(0.01)

        engine.abort(first)
        waiting.cancel()

        with pytest.raises(asyncio.CancelledError):
            await waiting


@pytest.mark.parametrize("held", HELD)
async def test_an_abort_frees_everything_wherever_the_job_is(running: Running, held: str) -> None:
    """At once what is not in use, and what a step or a copy uses when it is done. The others do not
    notice.
    """
    async with running(max_batch=2) as (engine, world):
        world.held.update(HELD[held])
        sinks = [Recorder() for _ in range(6)]
        jobs = [new_job(number, [*PROMPT, number], 8, sink) for number, sink in enumerate(sinks)]
        for job in jobs:
            engine.begin(job)
        stage, method = HELD[held][0]
        await until(lambda: world.calls[stage, method])
        await asyncio.sleep(0.02)

        *aborted, last = jobs
        for job in aborted:
            engine.abort(job)
            engine.abort(job)
        world.held.clear()
        await finished(sinks[-1])

        assert sinks[-1].tokens == continuation(last.history, 8)
        assert all(sink.failure is None and len(sink.tokens) < 8 for sink in sinks[:-1])


async def test_a_sink_may_abort_others_from_within_a_token(running: Running) -> None:
    """While upstream goes through the batch of which they are a part."""
    async with running() as (engine, _):
        sinks = [Recorder() for _ in range(4)]
        jobs = [new_job(number, [*PROMPT, number], 10, sink) for number, sink in enumerate(sinks)]

        def abort_others() -> None:
            if len(sinks[1].tokens) == 3:
                engine.abort(jobs[0])
                engine.abort(jobs[2])

        sinks[1].on_token = abort_others
        sinks[3].on_prefilled = lambda: engine.abort(jobs[3])
        for job in jobs:
            engine.begin(job)
        await finished(sinks[1])

        assert sinks[1].tokens == continuation([*PROMPT, 1], 10)
        assert not sinks[3].tokens
        assert len(sinks[0].tokens) < 10
        assert len(sinks[2].tokens) < 10


async def test_streams_that_are_swapped_out_come_back(running: Running) -> None:
    """And when there is no swap space left either, one is given up instead of the server."""
    for swap_blocks in (40, 1):
        async with running(decoding_blocks=12, swap_blocks=swap_blocks) as (engine, world):
            sinks = [Recorder() for _ in range(3)]
            for number, sink in enumerate(sinks):
                engine.begin(new_job(number, [*PROMPT, number], 30, sink))
            for sink in sinks:
                await finished(sink)

            done = [
                sink.tokens == continuation([*PROMPT, number], 30)
                for number, sink in enumerate(sinks)
            ]
            assert all(done) == (swap_blocks > 1)
            assert any(done)
            assert all(
                sink.failure is not None
                for sink, is_done in zip(sinks, done, strict=True)
                if not is_done
            )
            assert bool(world.calls["decoding", "swap_blocks"]) == (swap_blocks > 1)


async def test_a_stream_that_was_swapped_out_does_not_wait_for_those_that_wait_for_it(
    running: Running,
) -> None:
    """Upstream lets no request pass it, though it fits into no batch beside the blocks of the one
    that waits.
    """
    async with running(decoding_blocks=12, swap_blocks=40) as (engine, world):
        growing, waiting = Recorder(), Recorder()
        growing.on_token = lambda: (
            world.held.add(("decoding", "step")) if len(growing.tokens) == 27 else None
        )
        engine.begin(new_job(1, PROMPT, 34, growing))
        await until(lambda: world.held)
        engine.begin(new_job(2, PROMPT[:8], 8, waiting))
        await until(lambda: engine._decoding.scheduler.unaccepted_queue)
        world.held.clear()

        assert (await finished(waiting)).tokens == continuation(PROMPT[:8], 8)
        assert (await finished(growing)).tokens == continuation(PROMPT, 34)
        assert world.calls["decoding", "swap_blocks"]


@pytest.mark.parametrize("swap_blocks", [40, 0])
async def test_streams_that_wait_do_not_hold_each_other_up(
    running: Running, swap_blocks: int
) -> None:
    """They own all blocks, the first one needs one more, and nothing is computed that could give
    one back.
    """
    async with running(decoding_blocks=6, swap_blocks=swap_blocks) as (engine, world):
        history = PROMPT * 2
        first, second = Recorder(), Recorder()
        resumed = new_job(1, history, 4, second)
        blocks = await engine.reserve(resumed)
        engine.begin(new_job(2, PROMPT[:4], 4, first))
        await until(
            lambda: [request.job.id for request in engine._decoding.scheduler.waiting_queue] == [2]
        )
        [worker] = world.living("decoding")
        for position, token in enumerate(history[:-1]):
            worker.blocks[blocks[position // 4]][position % 4] = token

        engine.take_up(resumed, len(history) - 1)

        assert (await finished(first)).tokens == continuation(PROMPT[:4], 4)
        await finished(second)
        assert second.tokens == (continuation(history, 4) if swap_blocks else [])
        assert (second.failure is None) == bool(swap_blocks)


async def test_a_job_that_ends_on_the_bridge_is_not_copied(running: Running) -> None:
    """Between the two stages it stands in a queue from which it cannot be taken."""
    async with running() as (engine, world):
        sink = Recorder()
        job = new_job(1, PROMPT, 8, sink)

        def abort_soon() -> None:
            asyncio.get_running_loop().call_soon(engine.abort, job)

        sink.on_token = abort_soon
        engine.begin(job)
        await until(lambda: sink.tokens)
        await until(lambda: is_empty(engine))

        assert not world.calls["decoding", "migrate_blocks"]


async def test_a_prompt_above_half_of_all_blocks_is_served(running: Running) -> None:
    """Upstream counts a waiting request twice."""
    async with running(decoding_blocks=16, context_blocks=16) as (engine, _):
        sink = Recorder()
        engine.begin(new_job(1, PROMPT * 5, 8, sink))

        assert (await finished(sink)).tokens == continuation(PROMPT * 5, 8)


async def test_what_could_never_be_served_is_refused(running: Running) -> None:
    """Upstream would let it block its line for ever."""
    async with running(decoding_blocks=10) as (engine, _):
        assert engine.refusal(new_job(1, PROMPT, 31, Recorder())) is None
        assert "decoding stage" in str(engine.refusal(new_job(2, PROMPT, 32, Recorder())))
        assert "max-tokens-per-batch" in str(engine.refusal(new_job(3, [1] * 61, 1, Recorder())))
        assert engine.refusal(new_job(4, [1] * 60, 1, Recorder(), prefill_only=True)) is None


async def test_a_stage_is_full_when_its_batch_is(running: Running) -> None:
    """One more would wait, whether or not one waits already; the first one did not."""
    async with running(max_batch=1) as (engine, world):
        first, second = Recorder(), Recorder()
        assert not engine.stage(Stage.DECODING).full
        world.held.add(("decoding", "step"))
        engine.begin(new_job(1, PROMPT, 12, first))
        await until(lambda: engine.stage(Stage.DECODING).running == 1)
        assert engine.stage(Stage.DECODING).full

        engine.begin(new_job(2, PROMPT, 12, second))
        await until(lambda: engine.stage(Stage.DECODING).queued == 1)
        world.held.clear()
        await finished(first)
        await finished(second)

        await until(lambda: not engine.stage(Stage.DECODING).running)
        assert not engine.stage(Stage.DECODING).full


async def test_a_stage_is_full_when_blocks_run_short(running: Running) -> None:
    """The batch has places, and the next one does not fit beside the first."""
    async with running(decoding_blocks=10) as (engine, world):
        world.held.add(("decoding", "step"))
        sinks = [Recorder(), Recorder()]
        engine.begin(new_job(1, PROMPT, 12, sinks[0]))
        await until(lambda: engine.stage(Stage.DECODING).running == 1)
        assert not engine.stage(Stage.DECODING).full

        engine.begin(new_job(2, 3 * PROMPT, 4, sinks[1]))
        await until(lambda: engine.stage(Stage.DECODING).queued == 1)
        world.held.clear()
        await until(lambda: engine.stage(Stage.DECODING).full)

        for sink in sinks:
            await finished(sink)
