"""A stage of an instance in a host, as the instance's process sees it."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvrs.config.engine import EngineSettings
from kvrs.elastic.layouts import Layout
from kvrs.elastic.ways.base import Way
from kvrs.engine.layers.tiles import padded_rows
from kvrs.engine.model_config import ModelConfig
from kvrs.engine.ranks.cells import of_layers
from kvrs.engine.ranks.connection import StageAt, StageConnection
from kvrs.engine.ranks.link import StageFacts, StageUse
from kvrs.engine.ranks.reformed import RanksNow, ReformingNow
from kvrs.engine.worker import geometry_of
from kvrs.errors import KvrsError, RanksLostError, TransferError
from kvrs.protocol.parts import Cell, Part
from kvrs.scheduling.sequences import Chunk

log = logging.getLogger(__name__)

_FLOAT_BYTES = 4

Result = TypeVar("Result")


class RemoteStage:
    """A `StageGroup` of one stage. Its connection belongs to an event loop in a thread of its own:
    batches come from threads that compute, one at a time, pages from the instance's loop.

    With `on_cells` a lost host is waited for: the cells of the stage are gone, and once the books
    know that and a host is there again, batches are computed as before. Without, or where none
    comes, the loss is the end.
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
        self.cells = frozenset(product(self.layers, range(geometry.kv_heads)))
        # Floats of what the stage answers for each row, or where it is the last for each that is
        # sampled from.
        self._is_last = stage + 1 == len(layout.stages)
        self._width = config.vocab if self._is_last else config.hidden
        self._page_size_tokens = geometry.page_size_tokens
        self._units, self._full = config.units_of_ranks, layout
        most_bytes = padded_rows(settings.max_batch_tokens) * self._width * _FLOAT_BYTES
        part_bytes = of_layers(geometry, self.layers).page_bytes
        ranks = layout.stages[stage].ranks
        self._connect = partial(StageConnection, at, stage, ranks, part_bytes, most_bytes)
        self.on_end: Callable[[RanksLostError], object] | None = None
        self.on_change: Callable[[], object] | None = None
        # Called from another thread, with the number of the loss, for `noted`.
        self.on_cells: Callable[[RemoteStage, int], object] | None = None
        # Losses of all cells: those that were, that the books know, and that they have mended.
        self._losses = self._noted = self._mended = 0
        self._away: RanksNow | None = None  # While there is no host.
        self._before = 0, 0, 0  # Of earlier hosts: what `_counted` adds.
        self._error: RanksLostError | None = None  # It computes nothing any more.
        # Set while its ranks compute, and where they do not any more.
        self._may_compute = threading.Event()
        self._computing = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._back = asyncio.Event()  # There is a host, or the error.
        self._returning: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="stage", daemon=True)
        self._thread.start()
        self._connection = self._connect()
        try:
            self.ready = self._call(self._connection.open()).result()
        except BaseException:
            self.close()
            raise
        self._loop.call_soon_threadsafe(self._use, self._connection)
        self._may_compute.wait()

    @property
    def facts(self) -> StageFacts:
        return self.ready.facts

    @property
    def now(self) -> RanksNow:
        """The ranks, as the host has told it last."""
        return self._away or self._counted(self._connection.now)

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
            if not self._is_whole:
                raise RanksLostError(self._full.stages[self.stages.start].ranks, "has lost cells")
            computed = self._connection.execute(chunks, rows, limit_s, self._page_size_tokens, size)
            found = self._call(computed).result()
        return found.view(torch.float32).view(count, self._width)

    @property
    def _is_whole(self) -> bool:
        """No book has pages that were there when all cells were lost."""
        return self._mended == self._losses

    def on_lost(self) -> None:
        self._may_compute.wait()
        if self._error is not None:
            raise self._error

    def noted(self, loss: int) -> None:
        """The books know of that loss, and of those before."""
        self._noted = loss

    def on_restart(self) -> None:
        self._mended = self._noted
        self._call(self._connection.mended())

    async def read(self, pages: Sequence[int]) -> Tensor:
        if not self._is_whole:
            raise TransferError("cells of these pages are lost")
        return await asyncio.wrap_future(self._call(self._connection.read(pages)))

    async def write(self, pages: Sequence[int], parts: Tensor, cells: Part | None = None) -> None:
        await asyncio.wrap_future(self._call(self._write(pages, parts, cells)))

    def lose_device(self, rank: int, bases: Sequence[int] = ()) -> dict[int, frozenset[Cell]]:
        return self._call(self._connection.lose_device(rank, bases)).result()

    def order(self, rank: int, *, leaves: bool) -> "Future[str | None]":
        return self._call(self._connection.move(rank, leaves=leaves))

    def end(self) -> None:
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._end)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._call(self._shut()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _counted(self, now: RanksNow) -> RanksNow:
        """With what was before this host."""
        number, layout, deaths = self._before
        return replace(
            now,
            layout=replace(now.layout, number=now.layout.number + layout),
            deaths=now.deaths + deaths,
            number=now.number + number,
        )

    # In the loop.

    def _use(self, connection: StageConnection) -> None:
        """A host is there."""
        self._connection, self._away = connection, None
        connection.on_stopped, connection.on_error = self._update, self._lost
        connection.on_change = self._changed
        self._update()
        if connection.error is not None:  # Lost before this.
            self._lost(connection.error)

    def _update(self) -> None:
        connection = self._connection
        if self._error is not None or (connection.error or connection.stopped) is None:
            self._may_compute.set()
        else:
            self._may_compute.clear()
        if self._error is not None or connection.error is None:
            self._back.set()
        else:
            self._back.clear()

    def _changed(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _lost(self, lost: RanksLostError) -> None:
        """The host, or the connection to it."""
        if self.on_cells is None or self._connection.is_refused or self._error is not None:
            self._end(lost)
            return
        stage, before, number = self.stages.start, self.now, self.now.number + 1
        ranks = before.layout.stages[stage].ranks
        log.warning("a stage waits for its host", extra={"stage": stage, "cause": str(lost)})
        held = (self._full.held(rank) for rank in ranks if rank in self._full.ranks)
        reforming = ReformingNow(
            number=number,
            way=Way.WAIT,
            ready_at_s=time.monotonic() + self.ready.load_s,
            after=self._full,
            lost=ranks,
            move_bytes=sum(self._units.bytes_of(unit) for own in held for unit in own),
            lost_cells=len(self.cells),
        )
        deaths = before.deaths + len(ranks)
        self._before = number, before.layout.number, deaths
        self._away = RanksNow(before.layout, {}, deaths, number, reforming)
        self._losses += 1
        self.on_cells(self, self._losses)
        self._changed()
        self._returning = self._loop.create_task(self._return())

    async def _return(self) -> None:
        """Wait for a host that has loaded the same."""
        await self._connection.close()
        connection = self._connect()
        try:
            ready = await connection.open()
            loaded, known = ready.facts, self.facts
            if (loaded.arithmetic, loaded.hashes) != (known.arithmetic, known.hashes):
                raise KvrsError("the host has other weights than the one before")
        except KvrsError as error:
            await connection.close()
            self._end(RanksLostError(self._full.stages[self.stages.start].ranks, str(error)))
            return
        self.ready = ready
        self._use(connection)
        self._changed()

    def _end(self, lost: RanksLostError | None = None) -> None:
        """Let batches, and all that wait, end in RanksLostError."""
        if self._error is not None:
            return
        ranks = self._full.stages[self.stages.start].ranks
        self._error = lost or RanksLostError(ranks, "has ended")
        self._connection.give_up()
        self._update()
        if lost is not None and self.on_end is not None and not self._is_closed:
            self.on_end(lost)

    async def _write(self, pages: Sequence[int], parts: Tensor, cells: Part | None) -> None:
        # What has come is there, and can be written when a host is.
        await self._back.wait()
        await self._connection.write(pages, parts, cells)

    async def _shut(self) -> None:
        self._end()
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.wait({self._returning})
        await self._connection.close()
