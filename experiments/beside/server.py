"""A scripted server of vLLM in a process of its own, which spoils its open streams on a signal.

    python -m experiments.beside.server --port 8001

SIGUSR1: the next event of each open stream is cut off in its middle, and the stream goes on behind
it. SIGUSR2: each open stream ends with a clean FIN in its middle, without the last chunk of its
body. SIGHUP: each open stream ends with the last chunk of its body, without a finish reason and
without `[DONE]`. SIGKILL and SIGSTOP need no code.
"""

import argparse
import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from experiments.beside.pace import Prompts, add_options
from kvrs.net.routes import Request, Response
from kvrs.protocol.openai.fields import ApiKind, rows
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript

MODEL = "tiny"
# The request that a task answers.
_answered: ContextVar[Request] = ContextVar("_answered")


class Spoiling(StrEnum):
    MALFORMED = "malformed"
    FIN = "fin"
    EARLY_END = "early end"


SIGNALS = {
    signal.SIGUSR1: Spoiling.MALFORMED,
    signal.SIGUSR2: Spoiling.FIN,
    signal.SIGHUP: Spoiling.EARLY_END,
}


@dataclass(eq=False)
class SpoilingVllm(ScriptedVllm):
    strikes: int = 0
    spoiling: Spoiling | None = None
    prompts: Prompts = field(default_factory=lambda: Prompts(math.inf))

    def strike(self, spoiling: Spoiling) -> None:
        self.strikes, self.spoiling = self.strikes + 1, spoiling

    async def _completions(self, request: Request) -> Response:
        _answered.set(request)
        # vLLM leaves out what it does not know, which routers add; the script refuses it.
        fields = msgspec.json.decode(await request.read())
        known = rows(ApiKind.CHAT if "messages" in fields else ApiKind.COMPLETIONS)
        own = {"kv_transfer_params", "vllm_xargs"}
        kept = {name: value for name, value in fields.items() if name in known or name in own}
        request.body, request.coming = msgspec.json.encode(kept), None
        return await super()._completions(request)

    async def _events(
        self,
        parsed: CompletionRequest | ChatRequest,
        history: list[int],
        position: int,
        known: list[int],
    ) -> AsyncIterator[bytes | Fault]:
        await self.prompts.compute(len(history))
        survived = self.strikes
        async for event in super()._events(parsed, history, position, known):
            if survived == self.strikes:
                yield event
                continue
            survived = self.strikes
            match self.spoiling:
                case Spoiling.MALFORMED:
                    assert isinstance(event, bytes)
                    yield event[: len(event) // 2] + b"\n\n"
                case Spoiling.EARLY_END:
                    yield Fault.EOF
                case _:
                    transport = _answered.get().connection.transport
                    assert transport is not None
                    transport.close()
                    yield Fault.EOF


async def serve(port: int, pause_s: float, prompt_tokens_per_s: float) -> None:
    server = SpoilingVllm(
        f"v{port}", "n0", port=port, model=MODEL, script=VllmScript(pause_s=pause_s), adapters={}
    )
    server.prompts = Prompts(prompt_tokens_per_s)
    await server.start()
    server.started_s = int(time.time())  # Another one than that of the process before.
    loop = asyncio.get_running_loop()
    for number, spoiling in SIGNALS.items():
        loop.add_signal_handler(number, server.strike, spoiling)
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    print("ready", flush=True)
    await ended.wait()
    await server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    add_options(parser)
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.pause_s, options.prompt_tokens_per_s))
