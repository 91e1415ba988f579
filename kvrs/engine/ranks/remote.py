"""A stage of an instance in a host, as the instance's process sees it."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvrs.config.engine import EngineSettings
from kvrs.elastic.layouts import Layout
from kvrs.engine.layers.tiles import padded_rows
from kvrs.engine.model_config import ModelConfig
from kvrs.engine.ranks.cells import of_layers
from kvrs.engine.ranks.connection import StageAt, StageConnection
from kvrs.engine.ranks.link import StageFacts, StageUse
from kvrs.engine.ranks.reformed import RanksNow
from kvrs.engine.worker import geometry_of
from kvrs.errors import RanksLostError
from kvrs.protocol.parts import Cell, Part
from kvrs.scheduling.sequences import Chunk

_FLOAT_BYTES = 4

Result = TypeVar("Result")


class RemoteStage:
    """A `StageGroup` of one stage. Its connection belongs to an event loop in a thread of its own:
    batches come from threads that compute, one at a time, pages from the instance's loop.
    """

    def __init__(
        self,
        at: StageAt,
        config: ModelConfig,
        settings: EngineSettings,
        layout: Layout,
        stage: int,
    ) -> None:
        """Connect, and wait until the host of the stage has loaded it.

        Raises:
            KvrsError: it refuses, or does not answer.
        """
        geometry = geometry_of(config, settings)
        self.stages = range(stage, stage + 1)
        self.layers = layout.layers(self.stages)
        # Floats of what the stage answers for each row, or where it is the last for each that is
        # sampled from.
        self._is_last = stage + 1 == len(layout.stages)
        self._width = config.vocab if self._is_last else config.hidden
        self._page_size_tokens = geometry.page_size_tokens
        most_bytes = padded_rows(settings.max_batch_tokens) * self._width * _FLOAT_BYTES
        part_bytes = of_layers(geometry, self.layers).page_bytes
        self.on_end: Callable[[RanksLostError], object] | None = None
        self.on_change: Callable[[], object] | None = None
        # Set while its ranks compute, and where they do not any more.
        self._may_compute = threading.Event()
        self._may_compute.set()
        self._computing = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stage", daemon=True)
        self._thread.start()
        ranks = layout.stages[stage].ranks
        self._connection = StageConnection(at, stage, ranks, part_bytes, most_bytes)
        self._connection.on_stopped = self._stopped
        self._connection.on_error = self._ended
        self._connection.on_change = self._changed
        try:
            self.ready = self._call(self._connection.open()).result()
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> StageFacts:
        return self.ready.facts

    @property
    def now(self) -> RanksNow:
        """The ranks, as the host has told it last."""
        return self._connection.now

    def use(self) -> dict[int, StageUse]:
        return {self.stages.start: self._connection.use}

    def execute(self, chunks: Sequence[Chunk], rows: Tensor | None, limit_s: float) -> Tensor:
        count = (
            sum(chunk.logits for chunk in chunks)
            if self._is_last
            else padded_rows(sum(len(chunk.token_ids) for chunk in chunks))
        )
        size = count * self._width * _FLOAT_BYTES
        with self._computing:
            computed = self._connection.execute(chunks, rows, limit_s, self._page_size_tokens, size)
            found = self._call(computed).result()
        return found.view(torch.float32).view(count, self._width)

    def on_lost(self) -> None:
        self._may_compute.wait()
        if self._connection.error is not None:
            raise self._connection.error

    def on_restart(self) -> None:
        self._call(self._connection.mended())

    async def read(self, pages: Sequence[int]) -> Tensor:
        return await asyncio.wrap_future(self._call(self._connection.read(pages)))

    async def write(self, pages: Sequence[int], parts: Tensor, cells: Part | None = None) -> None:
        await asyncio.wrap_future(self._call(self._connection.write(pages, parts, cells)))

    def lose_device(self, rank: int, bases: Sequence[int] = ()) -> dict[int, frozenset[Cell]]:
        return self._call(self._connection.lose_device(rank, bases)).result()

    def order(self, rank: int, *, leaves: bool) -> "Future[str | None]":
        return self._call(self._connection.move(rank, leaves=leaves))

    def end(self) -> None:
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._connection.give_up)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._call(self._connection.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # In the loop.

    def _stopped(self) -> None:
        if self._connection.stopped is None or self._connection.error is not None:
            self._may_compute.set()
        else:
            self._may_compute.clear()

    def _ended(self, lost: RanksLostError) -> None:
        if self.on_end is not None and not self._is_closed:
            self.on_end(lost)

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()
