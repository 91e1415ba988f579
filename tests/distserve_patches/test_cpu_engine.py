"""Upstream's own engine, schedulers, block manager and Ray workers, on logical GPUs."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distserve_patches.cpu.memory import handle_of, open_handle
from kvrs.config.cluster import EngineSettings
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk

BLOCK = 16
PROMPTS = [[0, *range(5 + index, 40 + 7 * index)] for index in range(4)]
OUTPUT_TOKENS = 40
LONGEST_S = 120.0
# Of a worker's logical GPU memory: enough for all requests, and (with the model's 8 MB) about
# 14 blocks.
AMPLE, SCARCE = 0.9, 0.1305


@contextlib.contextmanager
def llm(
    model: Path, context: tuple[int, int], decoding: tuple[int, int], utilization: float = AMPLE
) -> Iterator[Any]:
    """Upstream's `OfflineLLM`; sizes are tensor and pipeline parallel."""
    import ray
    from distserve import config
    from distserve.llm import OfflineLLM

    parallel = [
        config.ParallelConfig(tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
        for sizes in (context, decoding)
    ]
    made = OfflineLLM(
        config.ModelConfig(str(model), None, dtype="fp32"),
        config.DisaggParallelConfig(*parallel),
        config.CacheConfig(BLOCK, 64, utilization, cpu_swap_space=0.01),
        config.ContextStageSchedConfig("fcfs", 8, 4096),
        config.DecodingStageSchedConfig("fcfs", 8, 4096),
    )
    try:
        yield made
    finally:
        for stage in (made.engine.context_engine, made.engine.decoding_engine):
            for worker in (worker for rank in stage.workers for worker in rank):
                ray.kill(worker)
        for group in made.engine.context_engine.placement_groups:
            ray.util.remove_placement_group(group)


def generated(
    engine: Any, *batches: list[list[int]], between: Callable[[], object] = lambda: None
) -> list[list[list[int]]]:
    """One batch of prompts after the other. `OfflineLLM.generate` takes an event loop of its own
    each time, its queues do not.
    """
    from distserve.request import SamplingParams

    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    async def one(prompt: list[int]) -> list[int]:
        return [step.new_token_id async for step in engine.generate(None, prompt, params)]

    async def everything() -> list[list[list[int]]]:
        outputs = []
        for batch in batches:
            outputs.append(await asyncio.gather(*map(one, batch)))
            between()
        return outputs

    async def serve() -> list[list[list[int]]]:
        work = asyncio.create_task(everything())
        loops = asyncio.create_task(engine.start_all_event_loops())
        await asyncio.wait([work, loops], return_when=asyncio.FIRST_COMPLETED)
        loops.cancel()
        await asyncio.gather(loops, return_exceptions=work.done())
        return work.result()

    return asyncio.run(asyncio.wait_for(serve(), LONGEST_S))


@pytest.fixture(scope="module")
def embedded(tiny_model: Path) -> list[list[int]]:
    """The embedded engine's continuations of the prompts."""
    worker = Worker(tiny_model, EngineSettings(pages=16, page_size_tokens=BLOCK))
    return [continuation(worker, prompt) for prompt in PROMPTS]


def continuation(worker: Worker, prompt: list[int]) -> list[int]:
    tokens, first = list(prompt), 0
    while len(tokens) < len(prompt) + OUTPUT_TOKENS:
        logits = worker.execute([Chunk(tokens[first:], first, list(range(16)), logits=1)])
        first = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


def caches(stage: Any) -> list[Tensor]:
    """Copies of keys and values of a stage of one worker."""
    import ray

    ((worker,),) = stage.workers
    # A stage engine's own list of handles is overwritten with the other stage's.
    handles = ray.get(
        worker.__ray_call__.remote(lambda self: [handle_of(self.k_cache), handle_of(self.v_cache)])
    )
    return [open_handle(handle).clone() for handle in handles]


@dataclass
class Served:
    alone: list[list[int]]
    kv: list[list[Tensor]]  # Of the context and the decoding stage after that: keys and values.
    crowded: list[list[int]]
    swaps: list[bool]  # Whether in.


@pytest.fixture(scope="module")
def served(logical_gpus: int, tiny_model: Path) -> Served:
    """One request alone, then more than there is room for, by the same engine."""
    from distserve.block_manager import BlockManager

    swaps: list[bool] = []
    swap_requests = BlockManager.swap_requests

    def counted(self: Any, requests: list[Any], is_swap_in: bool) -> None:
        swaps.append(is_swap_in)
        swap_requests(self, requests, is_swap_in)

    with pytest.MonkeyPatch.context() as patch, llm(tiny_model, (1, 1), (1, 1), SCARCE) as made:
        patch.setattr(BlockManager, "swap_requests", counted)
        engine = made.engine
        assert 13 <= engine.decoding_engine.num_gpu_blocks <= 16
        kv: list[list[Tensor]] = []
        alone, crowded = generated(
            engine,
            PROMPTS[:1],
            PROMPTS,
            between=lambda: kv.extend(
                map(caches, [engine.context_engine, engine.decoding_engine][: 2 - len(kv)])
            ),
        )
    return Served(alone, kv, crowded, swaps)


def test_tokens_equal_the_embedded_engines_and_transformers(
    served: Served, tiny_model: Path, embedded: list[list[int]]
) -> None:
    """From the context stage over the bridge into decoding: what kvrs recovers elsewhere is what it
    would have been here.
    """
    from transformers import AutoModelForCausalLM

    assert served.alone == embedded[:1]
    prompt = torch.tensor(PROMPTS[:1])
    limits = {
        "max_new_tokens": OUTPUT_TOKENS,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model).generate(
        prompt, attention_mask=torch.ones_like(prompt), **limits
    )
    assert theirs[0, prompt.shape[1] :].tolist() == served.alone[0]


def test_kv_equals_the_embedded_engines(served: Served, tiny_model: Path) -> None:
    """Blocks are pages: bit by bit, in either stage."""
    worker = Worker(tiny_model, EngineSettings(pages=16, page_size_tokens=BLOCK))
    continuation(worker, PROMPTS[0])

    for stage, tokens in zip(
        served.kv, (len(PROMPTS[0]), len(PROMPTS[0]) + OUTPUT_TOKENS - 1), strict=True
    ):
        full = tokens // BLOCK
        for kind, cache in enumerate(stage):
            # The first request of a stage got its first blocks.
            assert torch.equal(cache[:full], worker.pool.tensor[:full, :, :, kind])


def test_requests_that_were_swapped_out_continue_exactly(
    served: Served, embedded: list[list[int]]
) -> None:
    """With fewer blocks than the requests need, upstream swaps, without effect on the tokens."""
    assert served.crowded == embedded
    assert set(served.swaps) == {False, True}


def test_stages_of_different_shape_give_the_same_tokens(
    logical_gpus: int, tiny_model: Path, embedded: list[list[int]]
) -> None:
    """Two ranks that split the heads hand over to two that split the layers."""
    with llm(tiny_model, (2, 1), (1, 2)) as made:
        (tokens,) = generated(made.engine, PROMPTS)

    assert tokens == embedded


def test_a_worker_that_cannot_load_its_model_ends_the_start_with_its_reason(
    logical_gpus: int, tiny_model: Path, tmp_path: Path
) -> None:
    """Upstream waits for its workers but never looks whether they succeeded."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())

    with (
        pytest.raises(Exception, match=r"neither model\.safetensors nor"),
        llm(tmp_path, (1, 1), (1, 1)),
    ):
        pass


def test_a_wait_ends_when_all_have_ended_and_raises_the_first_failure() -> None:
    """So no rank still copies when its blocks are given away."""
    from distserve_patches.compat import Asyncio

    ended: list[str] = []

    async def call(name: str, turns: int, fails: bool) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        ended.append(name)
        if fails:
            raise ValueError(name)

    with pytest.raises(ValueError, match="first"):
        asyncio.run(
            Asyncio.wait([call("first", 1, True), call("slow", 9, False), call("second", 2, True)])
        )

    assert ended == ["first", "second", "slow"]
