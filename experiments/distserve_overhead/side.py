"""One server process of the comparison: answers every line on its standard input with the CPU time
of a round.
"""

import asyncio
import gc
import json
import os
import random
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TextIO

STREAMS = 8
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 192
VOCABULARY = 90

Round = Callable[[list[list[int]]], Any]


def configs(model: Path) -> list[Any]:
    from distserve.config import (
        CacheConfig,
        ContextStageSchedConfig,
        DecodingStageSchedConfig,
        DisaggParallelConfig,
        ModelConfig,
        ParallelConfig,
    )

    return [
        ModelConfig(str(model), None, dtype="fp32"),
        DisaggParallelConfig(ParallelConfig(), ParallelConfig()),
        CacheConfig(16, 256, 0.9, 0),
        ContextStageSchedConfig("fcfs", STREAMS, 4096),
        DecodingStageSchedConfig("fcfs", STREAMS, 4096),
    ]


@asynccontextmanager
async def plain(model: Path) -> AsyncIterator[Round]:
    from distserve.engine import LLMEngine
    from distserve.request import SamplingParams

    engine = LLMEngine(*configs(model))
    await engine.initialize()
    serving = asyncio.ensure_future(engine.start_all_event_loops())

    async def stream(prompt: list[int]) -> int:
        wanted = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=OUTPUT_TOKENS)
        # It decodes the token itself, and has a queue for each stream.
        return len([output.new_token async for output in engine.generate("", prompt, wanted)])

    async def round_of(prompts: list[list[int]]) -> None:
        counts = await asyncio.gather(*map(stream, prompts))
        assert counts == [OUTPUT_TOKENS] * STREAMS

    yield round_of
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


class Stream:
    """A sink that does with a token what upstream does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: asyncio.Queue[str] = asyncio.Queue()

    def token(self, token_id: int) -> bool:
        self._texts.put_nowait(self._tokenizer.decode(token_id))
        return True

    def prefilled(self) -> None:
        pass

    def failed(self, stage: object, cause: str) -> None:
        raise RuntimeError(f"the {stage} stage died: {cause}")

    async def texts(self) -> list[str]:
        return [await self._texts.get() for _ in range(OUTPUT_TOKENS)]


@asynccontextmanager
async def patched(model: Path) -> AsyncIterator[Round]:
    from distserve.tokenizer import get_tokenizer

    from distserve_patches.engine import RecoverableEngine
    from distserve_patches.jobs import Job

    engine = RecoverableEngine(*configs(model))
    await engine.start()
    serving = asyncio.ensure_future(engine.run())
    tokenizer = get_tokenizer(str(model))
    numbers = iter(range(sys.maxsize))

    async def round_of(prompts: list[list[int]]) -> None:
        sinks = [Stream(tokenizer) for _ in prompts]
        for prompt, sink in zip(prompts, sinks, strict=True):
            engine.begin(Job(next(numbers), prompt, OUTPUT_TOKENS, False, sink))
        await asyncio.gather(*(sink.texts() for sink in sinks))

    yield round_of
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    engine.close()


async def answer(side: str, model: Path, heard: TextIO) -> None:
    rng = random.Random(0)
    async with (plain if side == "plain" else patched)(model) as round_of:
        print(json.dumps("ready"), file=heard, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            prompts = [
                [rng.randrange(4, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(STREAMS)
            ]
            gc.collect()
            before_s = time.process_time()
            await round_of(prompts)
            cpu_s = time.process_time() - before_s
            print(json.dumps(cpu_s / (STREAMS * OUTPUT_TOKENS)), file=heard, flush=True)


def main() -> None:
    side, directory = sys.argv[1], Path(sys.argv[2])
    import ray

    from distserve_patches import upstream

    # What upstream prints is not an answer.
    answers = os.dup(1)
    os.dup2(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        upstream.load(off_gpu=True)
        ray.init(
            num_cpus=1,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(directory / side),
        )
    with os.fdopen(answers, "w") as heard:
        asyncio.run(answer(side, directory / "tiny", heard))
    ray.shutdown()


if __name__ == "__main__":
    main()
