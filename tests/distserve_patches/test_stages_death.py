"""Upstream's own engine over workers of the test's process, which die or fail: at every moment, and
at random ones.
"""

import asyncio
import contextlib
import random
from pathlib import Path

import pytest

from distserve_patches.jobs import Job, JobEnded, Stage
from tests.distserve_patches.fake_engine import HELD, PROMPT, Running, finished, starter, until
from tests.distserve_patches.fake_workers import Recorder, continuation, new_job


@pytest.fixture
def running(distserve: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    return starter(tiny_model, monkeypatch)


async def test_a_cause_that_ray_tells_later_is_passed_on(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death is not reported later for it."""
    from distserve_patches import engine as recoverable

    told = asyncio.Event()

    async def memory_cause(workers: list[object]) -> str:
        await told.wait()
        return f"{len(workers)} died of memory"

    async with running() as (engine, world):
        monkeypatch.setattr(recoverable, "memory_cause", memory_cause)
        world.barren = 1  # So that there is a time in which it is down.
        world.kill("decoding")
        await until(lambda: not engine.stage(Stage.DECODING).alive)
        await until(lambda: engine.stage(Stage.DECODING).death == "killed by the test")

        told.set()

        await until(lambda: engine.stage(Stage.DECODING).death == "1 died of memory")


@pytest.mark.parametrize("held", HELD)
async def test_the_death_of_decoding_fails_its_streams_and_spares_prefills(
    running: Running, held: str
) -> None:
    """Whatever queue they are in. Prefills go on, retained pages stay, and the stage returns with a
    new generation.
    """
    async with running(max_batch=2) as (engine, world):
        world.held.update(HELD[held])
        changes: list[tuple[Stage, bool, int]] = []
        engine.on_stage = lambda stage, state: changes.append(
            (stage, state.alive, state.generation)
        )
        sinks = [Recorder() for _ in range(6)]
        for number, sink in enumerate(sinks):
            engine.begin(new_job(number, [*PROMPT, number], 8, sink))
        stage, method = HELD[held][0]
        await until(lambda: world.calls[stage, method])
        await asyncio.sleep(0.02)
        prefill = Recorder()
        engine.begin(new_job(10, PROMPT, 1, prefill, prefill_only=True))
        world.barren = 1  # So that there is a time in which it is down.

        world.kill("decoding")
        for sink in sinks:
            assert (await finished(sink)).failure is not None
        assert {sink.failure[0] for sink in sinks if sink.failure} == {Stage.DECODING}
        late = Recorder()
        assert not engine.stage(Stage.DECODING).alive
        engine.begin(new_job(11, PROMPT, 8, late))
        assert late.failure is None
        assert (await finished(late)).failure == (Stage.DECODING, "it is down")
        world.held.clear()
        await finished(prefill)
        await until(lambda: engine.stage(Stage.DECODING).alive)
        again = Recorder()
        engine.begin(new_job(12, PROMPT, 8, again))
        await finished(again)

        assert prefill.tokens == continuation(PROMPT, 1)
        assert again.tokens == continuation(PROMPT, 8)
        assert changes == [(Stage.DECODING, False, 1), (Stage.DECODING, True, 2)]


async def test_the_death_of_the_context_stage_spares_streams_that_have_left_it(
    running: Running,
) -> None:
    """Those that decode go on; those that wait, compute or are being copied fail."""
    async with running(max_batch=3) as (engine, world):
        leaving = [Recorder() for _ in range(2)]
        for number, sink in enumerate(leaving):
            engine.begin(new_job(number, [*PROMPT, number], 40, sink))
        await until(lambda: all(len(sink.tokens) > 1 for sink in leaving))
        world.held.add(("decoding", "migrate_blocks"))
        staying = [Recorder() for _ in range(6)]
        for number, sink in enumerate(staying, 10):
            engine.begin(new_job(number, [*PROMPT, number], 8, sink))
        await until(lambda: world.calls["decoding", "migrate_blocks"] > 2)
        reserved = new_job(30, PROMPT, 5, Recorder())
        reserving = asyncio.ensure_future(engine.reserve(reserved))
        await asyncio.sleep(0.01)

        world.kill("context")
        for sink in staying:
            assert (await finished(sink)).failure == (Stage.CONTEXT, "killed by the test")
        world.held.clear()
        for number, sink in enumerate(leaving):
            assert (await finished(sink)).tokens == continuation([*PROMPT, number], 40)
        await reserving
        engine.abort(reserved)
        await until(lambda: engine.stage(Stage.CONTEXT).alive)
        again = Recorder()
        engine.begin(new_job(31, PROMPT, 8, again))

        assert (await finished(again)).tokens == continuation(PROMPT, 8)


async def test_a_reservation_ends_with_its_stage(running: Running) -> None:
    """A waiting call raises, a job with blocks fails through its sink; both may begin what
    they do not know yet.
    """
    async with running(decoding_blocks=3) as (engine, world):
        has, waits = Recorder(), Recorder()
        job = new_job(1, PROMPT, 2, has)
        await engine.reserve(job)
        waiting = asyncio.ensure_future(engine.reserve(new_job(2, PROMPT, 2, waits)))
        await asyncio.sleep(0.01)

        world.kill("decoding")

        with pytest.raises(JobEnded):
            await waiting
        assert (
            (await finished(has)).failure
            == (await finished(waits)).failure
            == (Stage.DECODING, "killed by the test")
        )
        engine.take_up(job, 5)
        assert engine.blocks(job, Stage.DECODING) == []


async def test_a_stage_is_brought_up_until_it_stays(running: Running) -> None:
    """Workers that die while they start cost a pause, not the server; the other stage serves
    meanwhile.
    """
    async with running() as (engine, world):
        world.barren = 3
        world.kill("decoding")
        await until(lambda: not engine.stage(Stage.DECODING).alive)
        prefill = Recorder()
        engine.begin(new_job(1, PROMPT, 1, prefill, prefill_only=True))
        await finished(prefill)
        await until(lambda: engine.stage(Stage.DECODING).alive)
        world.kill("decoding")
        world.kill("context")
        await until(lambda: [engine.stage(stage).generation for stage in Stage] == [2, 3])
        await until(lambda: all(engine.stage(stage).alive for stage in Stage))
        stream = Recorder()
        engine.begin(new_job(2, PROMPT, 8, stream))

        assert (await finished(stream)).tokens == continuation(PROMPT, 8)
        assert len([actor for actor in world.actors if actor.stage == "decoding"]) == 6


async def test_a_rank_that_dies_is_noticed_though_the_others_never_answer(running: Running) -> None:
    """On a GPU they wait for it inside a collective operation, in a step as well as while they
    start.
    """
    async with running(ranks=2) as (engine, world):
        world.held.add(("decoding", "step"))
        stream = Recorder()
        engine.begin(new_job(1, PROMPT, 8, stream))
        await until(lambda: world.calls["decoding", "step"])
        world.held.add(("decoding", "init_model"))
        begun = world.calls["decoding", "init_model"]

        world.living("decoding")[1].die()
        assert (await finished(stream)).failure == (Stage.DECODING, "killed by the test")
        await until(lambda: world.calls["decoding", "init_model"] == begun + 2)
        world.living("decoding")[1].die()
        await until(lambda: world.calls["decoding", "init_model"] == begun + 4)
        world.held.clear()
        await until(lambda: engine.stage(Stage.DECODING).alive)


async def test_a_context_stage_that_returns_waits_for_no_dead_decoding(running: Running) -> None:
    """Decoding dies while the new blocks are made known to it, and gets to know them when it
    returns.
    """
    async with running() as (engine, world):
        world.held.add(("decoding", "register_kvcache_mem_handles"))
        known = world.calls["decoding", "register_kvcache_mem_handles"]
        world.kill("context")
        await until(lambda: world.calls["decoding", "register_kvcache_mem_handles"] > known)
        world.kill("decoding")
        await until(lambda: engine.stage(Stage.CONTEXT).alive)
        world.held.clear()
        await until(lambda: engine.stage(Stage.DECODING).alive)
        stream = Recorder()
        engine.begin(new_job(1, PROMPT, 8, stream))

        assert (await finished(stream)).tokens == continuation(PROMPT, 8)


async def test_a_copy_that_fails_ends_its_job_alone(running: Running) -> None:
    """Upstream does not look whether it succeeded, and frees the blocks that it came from."""
    async with running() as (engine, world):
        world.fails.add(("decoding", "migrate_blocks"))
        lost = Recorder()
        engine.begin(new_job(1, PROMPT, 8, lost))
        await finished(lost)
        world.fails.clear()
        stream = Recorder()
        engine.begin(new_job(2, PROMPT, 8, stream))
        await finished(stream)

        assert lost.failure is not None
        assert "broken on purpose" in lost.failure[1]
        assert stream.tokens == continuation(PROMPT, 8)
        assert engine.stage(Stage.DECODING).generation == 1


async def test_a_step_that_fails_ends_the_stage(running: Running) -> None:
    """After an error in a step a worker's memory is undefined."""
    async with running() as (engine, world):
        world.fails.add(("decoding", "step"))
        lost = Recorder()
        engine.begin(new_job(1, PROMPT, 8, lost))
        await finished(lost)
        world.fails.clear()
        await until(lambda: engine.stage(Stage.DECODING).generation == 2)

        assert lost.failure is not None
        assert lost.failure[0] is Stage.DECODING


async def test_a_reservation_whose_blocks_may_still_be_read_ends_with_the_stage(
    running: Running,
) -> None:
    """They may be on their way to swap space when others write into them."""
    async with running(decoding_blocks=12, swap_blocks=40) as (engine, world):
        world.fails.add(("decoding", "wait_for_all_swap_out"))
        jobs = [new_job(number, [*PROMPT, number], 30, Recorder()) for number in range(3)]
        for job in jobs:
            engine.begin(job)
        await until(lambda: world.calls["decoding", "wait_for_all_swap_out"])
        for job in jobs:
            engine.abort(job)
        sink = Recorder()

        with pytest.raises(JobEnded):
            await engine.reserve(new_job(10, PROMPT, 4, sink))

        assert (await finished(sink)).failure is not None
        world.fails.clear()


async def test_what_is_heard_late_of_a_death_does_not_end_the_next_life(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray reports that a worker is gone later than the system does; by then others may have been
    started.
    """
    from ray.exceptions import RayActorError

    async with running() as (engine, world):
        heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def swapped_out() -> None:
            await heard

        monkeypatch.setattr(engine._decoding.block_manager, "swapped_out", swapped_out)
        job = new_job(1, PROMPT, 8, Recorder())
        waiting = asyncio.ensure_future(engine.reserve(job))
        await until(lambda: engine.blocks(job, Stage.DECODING))
        world.kill("decoding")
        await until(lambda: engine.stage(Stage.DECODING).generation == 2)

        heard.set_exception(RayActorError())
        with pytest.raises(JobEnded):
            await waiting

        await asyncio.sleep(0.05)
        assert engine.stage(Stage.DECODING).alive
        assert engine.stage(Stage.DECODING).generation == 2


async def test_a_swap_that_fails_ends_the_stage(running: Running) -> None:
    """Upstream does not wait for it, and would compute with blocks that hold something else."""
    async with running(decoding_blocks=12, swap_blocks=40) as (engine, world):
        world.fails.add(("decoding", "swap_blocks"))
        sinks = [Recorder() for _ in range(3)]
        for number, sink in enumerate(sinks):
            engine.begin(new_job(number, [*PROMPT, number], 30, sink))
        for sink in sinks:
            await finished(sink)

        assert any(sink.failure is not None for sink in sinks)
        await until(lambda: engine.stage(Stage.DECODING).generation > 1)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_every_job_ends_and_no_block_is_lost(
    running: Running, seed: int
) -> None:
    """Random streams, prefills, reservations, aborts, deaths: a job ends exact, aborted, or failed
    that it failed.
    """
    chance = random.Random(seed)
    async with running(max_batch=3, context_blocks=24, decoding_blocks=18, swap_blocks=8) as (
        engine,
        world,
    ):
        jobs: list[Job] = []
        aborted: set[int] = set()
        tasks = []

        async def bring(job: Job) -> None:
            with contextlib.suppress(JobEnded):
                blocks = await engine.reserve(job)
                for worker in world.living("decoding"):
                    if engine.blocks(job, Stage.DECODING) == blocks:
                        for position, token in enumerate(job.history):
                            worker.blocks[blocks[position // 4]][position % 4] = token
                await asyncio.sleep(chance.random() * 0.01)
                engine.take_up(job, chance.randrange(1, len(job.history)))

        for number in range(60):
            history = [chance.randrange(251) for _ in range(chance.randrange(2, 24))]
            job = new_job(
                number,
                history,
                chance.randrange(1, 20),
                Recorder(),
                prefill_only=chance.random() < 0.2,
            )
            jobs.append(job)
            if not job.prefill_only and chance.random() < 0.4:
                tasks.append(asyncio.ensure_future(bring(job)))
            else:
                engine.begin(job)
            if chance.random() < 0.3:
                victim = chance.choice(jobs)
                aborted.add(victim.id)
                engine.abort(victim)
            if chance.random() < 0.06:
                world.kill(chance.choice(["context", "decoding"]))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.03)
        await asyncio.gather(*tasks)

        for job in jobs:
            sink = job.sink
            assert isinstance(sink, Recorder)
            if job.id not in aborted:
                await finished(sink)
            wanted = 1 if job.prefill_only else job.max_new_tokens
            assert sink.tokens == continuation(job.history, wanted)[: len(sink.tokens)]
            if job.id not in aborted and sink.failure is None:
                assert len(sink.tokens) == wanted
