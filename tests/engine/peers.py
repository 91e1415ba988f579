"""Several real engines in the test's own event loop, each on a node of its own, that fetch pages
from each other.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.openai.requests import parse_completion_request
from kvrs.protocol.pages import page_tags
from kvrs.transfer.peers import Peer, PullRequest, PullResult
from kvrs_engine.engine.admission import Admission
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.kv_pool import KvPool
from kvrs_engine.engine.requests import GenerationRun
from kvrs_engine.scheduling.sequences import Chunk
from tests.engine.serving import SECRET

P = 16  # Tokens per page.
SMALL = {
    "pages": 64,
    "page_size_tokens": P,
    "max_model_len": 256,
}  # Quick to start: an engine measures itself.
PATIENCE_S = 60.0  # A bug may leave a stream without an answer; no test shall wait for it for ever.


class PeerEngine:
    """An engine that records what it computed and pulled, and in which both can be held up."""

    def __init__(self, instance: EngineInstance) -> None:
        self.instance = instance
        self.computed: list[range] = []  # Positions, of every chunk.
        self.asked: list[tuple[InstanceId, PullRequest]] = []
        self.brought: list[PullResult] = []
        self.may_pull = asyncio.Event()
        self.may_pull.set()
        self.may_compute = threading.Event()
        self.may_compute.set()
        self._execute, self._pull = instance.worker.execute, instance.port.puller.pull
        instance.worker.execute = self._computing  # type: ignore[method-assign]
        instance.port.puller.pull = self._pulling  # type: ignore[method-assign]

    @property
    def positions(self) -> list[int]:
        """All that were computed; with an equal one twice, if it was."""
        return [position for chunk in self.computed for position in chunk]

    async def begin(self, body: dict[str, Any]) -> GenerationRun:
        run = await Admission(self.instance).admit(
            parse_completion_request(json.dumps(body).encode())
        )
        self.instance.core.submit(run)
        return run

    async def answer(self, body: dict[str, Any]) -> list[int]:
        """The tokens of a completion."""
        return await self.rest_of(await self.begin(body))

    async def rest_of(self, run: GenerationRun) -> list[int]:
        token_ids: list[int] = []
        async with asyncio.timeout(PATIENCE_S):
            while (output := await run.outputs.get()) is not None:
                token_ids += output.token_ids
                if output.finish_reason is not None:
                    break
        return token_ids

    def pages(self, token_ids: Sequence[int]) -> list[bytes | None]:
        """The KV of every full page of a history, as it lies in this engine; None: it is not
        here.
        """
        manager, pool = self.instance.pages, self.instance.worker.pool
        assert isinstance(pool, KvPool), "one process"
        found: list[bytes | None] = []
        for tag in page_tags(self.instance.root(""), list(token_ids), P):
            held = manager.match([tag])
            found.append(pool.tensor[held[0]].numpy().tobytes() if held else None)
            manager.release(held)
        return found

    def _computing(self, chunks: Sequence[Chunk]) -> Any:
        self.computed += [
            range(one.first_position, one.first_position + len(one.token_ids)) for one in chunks
        ]
        assert self.may_compute.wait(PATIENCE_S)
        return self._execute(chunks)

    async def until(self, what: Callable[[], bool]) -> None:
        """Let the others run until something is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not what():
                await asyncio.sleep(0.001)

    async def _pulling(
        self, peer: Peer, request: PullRequest, *rest: Any, **named: Any
    ) -> PullResult:
        self.asked.append((peer.instance, request))
        await self.may_pull.wait()
        result = await self._pull(peer, request, *rest, **named)
        self.brought.append(result)
        return result


@asynccontextmanager
async def peer_engines(models: Sequence[Path], **engine: Any) -> AsyncIterator[list[PeerEngine]]:
    """Engines `e0`, `e1`, ... on nodes `n0`, `n1`, ..., one for each model."""
    nodes = [
        {"id": f"n{index}", "instances": [{"id": f"e{index}", "role": "both"}]}
        for index in range(len(models))
    ]
    all_of_them: list[PeerEngine] = []
    try:
        for index, model in enumerate(models):
            cluster = {"model": str(model), "engine": {**SMALL, **engine}, "nodes": nodes}
            config = parse_config({"cluster": cluster})
            all_of_them.append(
                PeerEngine(EngineInstance(config, InstanceId(f"e{index}"), 1, SECRET))
            )
            await all_of_them[-1].instance.start()
        for one in all_of_them:
            one.computed.clear()
            for other in all_of_them:
                _introduce(one.instance, other.instance)
        yield all_of_them
    finally:
        for one in all_of_them:
            one.may_compute.set()
            await one.instance.close()
            one.instance.pages.check()


def _introduce(one: EngineInstance, other: EngineInstance) -> None:
    (listener,) = other.port.server._accepting._listeners.values()
    one.registry[other.settings.id] = replace(
        one.registry[other.settings.id], port=listener.getsockname()[1]
    )
