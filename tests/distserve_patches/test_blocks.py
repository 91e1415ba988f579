"""Blocks that are pages, under upstream's own stages and schedulers; only the workers are
missing.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvrs.errors import KvrsError
from kvrs.ids import StreamId
from kvrs.protocol.pages import page_tags, root_tag
from kvrs_testkit.examples import examples

if TYPE_CHECKING:
    from distserve_patches.blocks import PagedBlockManager

P = 4
ROOT = root_tag("model")


@pytest.fixture(autouse=True, scope="module")
def _upstream(distserve: Path) -> Iterator[None]:
    """Is loaded before a name of it is used, and its stages do not sleep."""
    from distserve import single_stage_engine as engines

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "SLEEP_WHEN_CONTEXT_NO_REQUEST", 0)
        patch.setattr(engines, "SLEEP_WHEN_DECODING_NO_REQUEST", 0)
        yield


class Workers:
    """The calls of the stages to their workers; every step is answered with a token for each
    request.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, name: str, *args: Any) -> list[Any]:
        self.calls.append(name)
        answer = [7] * len(args[0]) if name == "step" else None

        async def answered() -> Any:
            return answer

        return [asyncio.ensure_future(answered())]


def manager(
    gpu_blocks: int, cpu_blocks: int, workers: Workers, stage: str = "DECODING"
) -> "PagedBlockManager":
    from distserve.config import CacheConfig, ParallelConfig
    from distserve.utils import Stage

    from distserve_patches.blocks import PagedBlockManager

    return PagedBlockManager(
        Stage[stage],
        gpu_blocks,
        cpu_blocks,
        None,
        ParallelConfig(),
        CacheConfig(P, 256),
        workers.call,
    )


def request(number: int, tokens: int, more: int = 100) -> Any:
    from distserve.request import Request, SamplingParams

    return Request(
        0.0, number, "", list(range(tokens)), SamplingParams(max_tokens=more, ignore_eos=True)
    )


class NoText:
    @staticmethod
    def decode(_: int) -> str:
        return ""


def stage_of(kind: type, blocks: "PagedBlockManager", parallel: Any, **fields: Any) -> Any:
    """One of upstream's stage engines, without its workers."""

    class Shell(kind):  # type: ignore[misc]  # Upstream has no types.
        def __init__(self) -> None:
            self.__dict__.update(fields)
            self.stage, self.parallel_config, self.block_manager = blocks.stage, parallel, blocks
            self.tokenizer = NoText()
            self.workers: list[Any] = []
            self.batches_in_pipeline: list[Any] = []
            self.batches_ret_futures: list[Any] = []
            self.engine_on_new_step_output_callback = lambda *_: None
            self.engine_on_new_lifetime_event_callback = lambda *_: None
            self.scheduler = self._get_scheduler()

        def _remote_call_all_workers_async(self, name: str, *args: Any) -> Any:
            return blocks.engine_remote_call_all_workers_async(name, *args) * (parallel.world_size)

    return Shell()


class Stages:
    """Upstream's two stages with the bridge between them; a step of one is taken when it is asked
    for.
    """

    def __init__(
        self, context_blocks: int, decoding_blocks: int, cpu_blocks: int, pipeline_size: int
    ) -> None:
        from distserve.config import (
            ContextStageSchedConfig,
            DecodingStageSchedConfig,
            ParallelConfig,
        )
        from distserve.single_stage_engine import ContextStageLLMEngine, DecodingStageLLMEngine

        self.bridge: asyncio.Queue[Any] = asyncio.Queue()
        self.workers = Workers()
        parallel = ParallelConfig(pipeline_parallel_size=pipeline_size)
        self.context_blocks = manager(context_blocks, 1, self.workers, "CONTEXT")
        self.blocks = manager(decoding_blocks, cpu_blocks, self.workers)
        self.context = stage_of(
            ContextStageLLMEngine,
            self.context_blocks,
            ParallelConfig(),
            bridge_queue=self.bridge,
            sched_config=ContextStageSchedConfig("fcfs", 4, 64),
        )
        self.decoding = stage_of(
            DecodingStageLLMEngine,
            self.blocks,
            parallel,
            bridge_queue=self.bridge,
            sched_config=DecodingStageSchedConfig("fcfs", 4, 64, waiting_block_prop_threshold=0.5),
            clear_migrated_blocks_callback=self.context.clear_migrated_blocks_callback,
        )
        self.given_up: list[int] = []
        self.blocks.on_swap_full = self._give_up

    def _give_up(self, one: Any) -> None:
        self.decoding.scheduler.swapped_queue.remove(one)
        self.given_up.append(one.request_id)

    async def step_context(self) -> None:
        await self.context._step()

    async def step_decoding(self) -> None:
        while not self.bridge.empty():
            await self.decoding.scheduler.add_request(self.bridge.get_nowait())
        await self.decoding._step()

    @property
    def running(self) -> list[Any]:
        return [one for batch in self.decoding.scheduler.batch_queues for one in batch.requests]


class StagesMachine(RuleBasedStateMachine):
    """Requests come and go, while others allocate, pin, lease and let go as they like. No assertion
    of upstream's may trip.
    """

    @initialize(
        decoding=st.integers(6, 16), cpu=st.integers(0, 12), pipeline_size=st.integers(1, 2)
    )
    def start(self, decoding: int, cpu: int, pipeline_size: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.numbers = iter(range(10**6))
        self.held: dict[str, list[list[int]]] = {"context": [], "decoding": []}
        self.now_s = 0.0

        async def make() -> Stages:
            return Stages(8, decoding, cpu, pipeline_size)

        self.stages = self.loop.run_until_complete(make())
        self.pages = {
            "context": self.stages.context_blocks.pages,
            "decoding": self.stages.blocks.pages,
        }

    @rule(tokens=st.integers(1, 5 * P), more=st.integers(1, 3 * P))
    def ask(self, tokens: int, more: int) -> None:
        # No request is added that could never finish: the server refuses those.
        more = min(more, self.stages.blocks.pages.pages * P - tokens)
        if more > 0:
            self.stages.context.add_request(request(next(self.numbers), tokens, more))

    @rule(steps=st.integers(1, 3))
    def step_context(self, steps: int) -> None:
        for _ in range(steps):
            self.loop.run_until_complete(self.stages.step_context())

    @rule(steps=st.integers(1, 8))
    def step_decoding(self, steps: int) -> None:
        for _ in range(steps):
            self.loop.run_until_complete(self.stages.step_decoding())

    @rule(where=st.sampled_from(["context", "decoding"]), count=st.integers(1, 6))
    def reserve(self, where: str, count: int) -> None:
        pages = self.pages[where].allocate(count)
        if pages is not None:
            self.held[where].append(pages)

    @rule(data=st.data(), where=st.sampled_from(["context", "decoding"]))
    def send(self, data: st.DataObject, where: str) -> None:
        """A peer, or a checkpoint, pins blocks of a request that are full."""
        blocks = self.stages.blocks if where == "decoding" else self.stages.context_blocks
        owners = sorted(number for number in blocks.block_table if blocks.gpu_blocks(number))
        if not owners:
            return
        pages = blocks.gpu_blocks(data.draw(st.sampled_from(owners)))
        for page in pages:
            blocks.pages.pin(page)
        self.held[where].append(pages)

    @rule(
        data=st.data(), where=st.sampled_from(["context", "decoding"]), lasts_s=st.integers(1, 20)
    )
    def retain(self, data: st.DataObject, where: str, lasts_s: int) -> None:
        blocks = self.stages.blocks if where == "decoding" else self.stages.context_blocks
        owners = sorted(number for number in blocks.block_table if blocks.gpu_blocks(number))
        if owners:
            pages = blocks.gpu_blocks(data.draw(st.sampled_from(owners)))
            key = StreamId(data.draw(st.sampled_from("abc")))
            blocks.pages.retain(key, pages, len(pages) * P, self.now_s + lasts_s)

    @rule(passes_s=st.integers(1, 10))
    def expire(self, passes_s: int) -> None:
        self.now_s += passes_s
        for pages in self.pages.values():
            pages.expire(self.now_s)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        where = data.draw(st.sampled_from([where for where, runs in self.held.items() if runs]))
        self.pages[where].release(
            self.held[where].pop(data.draw(st.integers(0, len(self.held[where]) - 1)))
        )

    @rule(data=st.data(), tokens=st.integers(2, 5 * P), more=st.integers(1, 2 * P))
    def take_up(self, data: st.DataObject, tokens: int, more: int) -> None:
        """A recovery: blocks for a whole history, of which a part arrives."""
        blocks = self.stages.blocks
        reserved = blocks.pages.allocate(-(-tokens // P))
        if reserved is None:
            return
        one = request(next(self.numbers), data.draw(st.integers(1, tokens - 1)), more)
        if one.get_input_len() + 1 + more > blocks.pages.pages * P:
            blocks.pages.release(reserved)
            return
        one.add_generated_token("", 5)
        blocks.adopt(one, reserved)
        self.stages.decoding.scheduler.waiting_queue.append(one)

    @precondition(lambda self: self.stages.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.stages.running)).is_finished = True

    @invariant()
    def counts_are_honest(self) -> None:
        if not hasattr(self, "stages"):
            return
        for blocks in (self.stages.blocks, self.stages.context_blocks):
            blocks.check()
            in_tables = {
                block for number in blocks.block_table for block in blocks.gpu_blocks(number)
            }
            foreign = [
                page
                for page in range(blocks.pages.pages)
                if blocks.pages.references[page] and page not in in_tables
            ]
            assert blocks.max_num_gpu_blocks == blocks.pages.pages - len(foreign)
            assert blocks.get_num_avail_gpu_blocks() == blocks.pages.pages - len(foreign) - len(
                in_tables
            )

    def teardown(self) -> None:
        """Once all is released, no block is lost."""
        if hasattr(self, "stages"):
            try:
                self.come_to_the_end()
            finally:
                self.loop.close()

    def come_to_the_end(self) -> None:
        for where, runs in self.held.items():
            for run in runs:
                self.pages[where].release(run)
        for _ in range(20):
            self.loop.run_until_complete(self.stages.step_context())
            self.loop.run_until_complete(self.stages.step_decoding())
        for blocks in (self.stages.blocks, self.stages.context_blocks):
            for number in list(blocks.block_table):
                blocks.free_blocks(number)
            blocks.check()
            assert blocks.pages.free_pages == blocks.pages.pages
        assert (
            self.stages.blocks.get_num_avail_cpu_blocks() == self.stages.blocks.max_num_cpu_blocks
        )


def test_no_assertion_of_upstreams_fails_whatever_is_pinned() -> None:
    """And no block is lost, over random histories."""
    run_state_machine_as_test(StagesMachine, settings=examples(60, stateful_step_count=40))


# Rules of their own.


async def test_a_freed_block_that_is_being_sent_is_given_to_no_request() -> None:
    """The peer's pin outlives the request; under its tag the block can be found afterwards."""
    blocks = manager(4, 0, Workers())
    one = request(1, 2 * P)
    blocks.allocate_blocks(one)
    first, second = blocks.gpu_blocks(1)
    tags = page_tags(ROOT, one.prompt_token_ids, P)
    blocks.pages.register(first, tags[0])
    sent = blocks.pages.match(tags)

    blocks.free_blocks(1)
    others = blocks.pages.allocate(3)

    assert sent == [first]
    assert others is not None
    assert first not in others
    assert (blocks.get_num_avail_gpu_blocks(), blocks.max_num_gpu_blocks) == (0, 0)
    blocks.pages.release(sent)
    assert blocks.pages.match(tags) == [first]
    del second


async def test_workers_finish_swapping_out_before_the_blocks_are_used_again() -> None:
    """They are called at once; a writer past their queue waits for the answer."""
    workers = Workers()
    blocks = manager(2, 2, workers)
    one = request(1, 2 * P)
    blocks.allocate_blocks(one)
    freed = blocks.gpu_blocks(1)

    blocks.swap_out_requests([one])

    assert workers.calls == ["swap_blocks", "wait_for_all_swap_out"]
    assert blocks.gpu_blocks(1) == []
    assert sorted(blocks.pages.allocate(2) or []) == sorted(freed)
    pending = blocks._last_swap_out
    await blocks.swapped_out()
    assert all(isinstance(answer, asyncio.Future) and answer.done() for answer in pending)
    await blocks.swapped_out()
    blocks.check()


async def test_a_swap_that_finds_no_room_gives_the_request_up() -> None:
    """Upstream's assertion would end the server. Without a handler it is an error
    that names what is missing.
    """
    blocks = manager(4, 1, Workers())
    one, two = request(1, 2 * P), request(2, P)
    blocks.allocate_blocks(one)
    blocks.allocate_blocks(two)
    given_up: list[Any] = []

    with pytest.raises(KvrsError, match="--swap-space"):
        blocks.swap_out_requests([one])
    blocks.allocate_blocks(one)
    blocks.on_swap_full = given_up.append
    blocks.swap_out_requests([one, two])

    assert given_up == [one]
    assert 1 not in blocks.block_table
    assert blocks.pages.free_pages == 4
    blocks.swap_in_requests([two])
    assert len(blocks.gpu_blocks(2)) == 1
    blocks.check()


async def test_what_a_history_does_not_need_is_given_back() -> None:
    """A request keeps those blocks of its history that have KV: the schedulers count no others."""
    blocks = manager(8, 0, Workers())
    reserved = blocks.pages.allocate(5)
    assert reserved is not None
    assert (
        blocks.max_num_gpu_blocks == 3
    )  # Reserved for a request that the schedulers do not have yet.

    blocks.adopt(request(1, P + 1), reserved)

    assert blocks.gpu_blocks(1) == reserved[:2]
    assert (blocks.max_num_gpu_blocks, blocks.get_num_avail_gpu_blocks()) == (8, 6)
    blocks.check()


@pytest.mark.parametrize(
    ("tokens", "shared", "refused"),
    [(2 * P, 2, False), (2 * P + 1, 2, False), (2 * P + 1, 3, True), (2 * P - 1, 2, True)],
)
async def test_a_block_that_others_read_is_never_written(
    tokens: int, shared: int, refused: bool
) -> None:
    """Full blocks may have several owners; the one that the next step writes into may not."""
    blocks = manager(8, 0, Workers())
    reserved = blocks.pages.allocate(3)
    assert reserved is not None
    for page in reserved[:shared]:
        blocks.pages.pin(page)

    adopt: Callable[[], None] = lambda: blocks.adopt(request(1, tokens), reserved)  # noqa: E731
    if refused:
        with pytest.raises(AssertionError, match="others read"):
            adopt()
    else:
        adopt()
        assert blocks.gpu_blocks(1) == reserved[: -(-tokens // P)]
