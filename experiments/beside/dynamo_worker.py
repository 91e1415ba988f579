"""A worker of NVIDIA Dynamo with the scripted tokens, in place of its mocker.

    python experiments/beside/dynamo_worker.py --model DIRECTORY

Dynamo's own interpreter runs it. The tokens are those of the scripted servers of vLLM, so that a
stream which Dynamo's frontend migrates can be compared token by token; its mocker draws random
ones. SIGHUP: each open stream ends without a finish reason.
"""

import argparse
import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime

from experiments.beside.pace import Prompts, add_options
from kvrs_testkit.scripted_model import token_after

MODEL = "tiny"


class Worker:
    def __init__(self, pause_s: float, prompts: Prompts) -> None:
        self._pause_s, self._prompts = pause_s, prompts
        self._strikes = 0

    def strike(self) -> None:
        self._strikes += 1

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[Any]:
        history, survived = list(request["token_ids"]), self._strikes
        await self._prompts.compute(len(history))
        tokens = request["stop_conditions"]["max_tokens"]
        for made in range(1, tokens + 1):
            if context.is_stopped() or survived != self._strikes:
                return
            history.append(token_after(history))
            finish = {"finish_reason": "length"} if made == tokens else {}
            await asyncio.sleep(self._pause_s)
            yield {"token_ids": history[-1:], **finish}


async def serve(model: str, pause_s: float, prompt_tokens_per_s: float) -> None:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("dynamo.backend.generate")
    worker = Worker(pause_s, Prompts(prompt_tokens_per_s))
    loop.add_signal_handler(signal.SIGHUP, worker.strike)
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        model,
        MODEL,
        worker_type=WorkerType.Aggregated,
        ignore_weights=True,
    )
    await endpoint.serve_endpoint(worker.generate, graceful_shutdown=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    add_options(parser)
    options = parser.parse_args()
    uvloop.run(serve(options.model, options.pause_s, options.prompt_tokens_per_s))
