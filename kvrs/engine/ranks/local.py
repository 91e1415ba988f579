"""Stages of an instance that are on this node, where others are not."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from kvrs.config.engine import EngineSettings
from kvrs.elastic.layouts import Layout
from kvrs.engine.models.digests import Note
from kvrs.engine.models.weights import Weights
from kvrs.engine.ranks.link import StageReady
from kvrs.engine.ranks.seats import Ended
from kvrs.engine.ranks.stages import StageRanks
from kvrs.errors import RanksLostError
from kvrs.scheduling.sequences import Chunk


class StageGroup(Protocol):
    """Consecutive stages on one node: `LocalStages` on this one, `RemoteStage` on another. None of
    them comes back: the first loss is the end.
    """

    stages: range
    layers: range
    ready: StageReady
    # Called once, from another thread, when ranks are lost.
    on_end: Callable[[RanksLostError], object] | None

    def execute(self, chunks: Sequence[Chunk], rows: Tensor | None, limit_s: float) -> Tensor:
        """Compute a batch, one at a time: from the rows `[padded rows, hidden]` of the stage before
        to those behind the last stage, or to logits where that is the model's last.

        Raises:
            RanksLostError: it is not computed.
        """
        ...

    async def read(self, pages: Sequence[int]) -> Tensor:
        """These layers' part of pages, as bytes `[pages, part of a page]`.

        Raises:
            TransferError: the stages are lost.
        """
        ...

    async def write(self, pages: Sequence[int], parts: Tensor) -> None:
        """Raises TransferError: the stages are lost."""
        ...

    def kill_rank(self, rank: int) -> None:
        """A fault."""
        ...

    def end(self) -> None:
        """Let a batch that is computed end in RanksLostError."""
        ...

    def close(self) -> None: ...


class LocalStages(StageRanks):
    def __init__(
        self, model_directory: Path, settings: EngineSettings, layout: Layout, stages: range
    ) -> None:
        """Start the ranks and wait until all can compute.

        Raises:
            ConfigError: directory or settings are wrong.
            KvrsError: there is not enough memory, a rank has ended, or the ranks differ.
        """
        super().__init__(model_directory, settings, layout, stages)
        self.on_end: Callable[[RanksLostError], object] | None = None
        self._has_ended = False
        self._ending = threading.Lock()
        try:
            self._formation, _ = self.start_ranks()
        except BaseException:
            self.end_ranks(0.0)
            raise
        processes = self.processes
        assert processes.arithmetic is not None, "all ranks have answered"
        self.ready = StageReady(
            processes.arithmetic,
            processes.hashes,
            Note(model_directory, Weights(model_directory).files).read(),
            {rank: seat.pid for rank, seat in processes.seats.items()},
        )
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def execute(self, chunks: Sequence[Chunk], rows: Tensor | None, limit_s: float) -> Tensor:
        page_size_tokens = self.pool.geometry.page_size_tokens
        try:
            return self._formation.execute(chunks, page_size_tokens, limit_s, rows)
        except RanksLostError as lost:
            self._lost(lost)
            raise

    async def read(self, pages: Sequence[int]) -> Tensor:
        staged = self.pool.stage(pages)
        await staged.save()
        return staged.buffer

    async def write(self, pages: Sequence[int], parts: Tensor) -> None:
        staged = self.pool.stage(pages)
        staged.buffer.copy_(parts)
        await staged.restore(len(pages))

    def kill_rank(self, rank: int) -> None:
        self.processes.seats[rank].kill(with_device=True)

    def end(self) -> None:
        self._formation.end()

    def close(self) -> None:
        with self._ending:
            self._has_ended = True
        self.end()
        self.processes.told.put(None)
        self._watcher.join()
        self.end_ranks(0.0)

    def _watch(self) -> None:
        while (told := self.processes.told.get()) is not None:
            if isinstance(told, Ended):
                seat = told.seat
                self._lost(RanksLostError([seat.rank], "has died", seat.status()))

    def _lost(self, error: RanksLostError) -> None:
        with self._ending:
            if self._has_ended:
                return
            self._has_ended = True
        self.end()
        if self.on_end is not None:
            self.on_end(error)
