"""A stage of an instance in a host, with an interface for the threads of the instance's process."""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.protocol.pages import Cell, Part
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.engine.layers.tiles import FLOAT_BYTES, padded_rows
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.connection import StageAt
from kvrs_engine.engine.ranks.hosted import HostedStage, StageCalls
from kvrs_engine.engine.ranks.link import OwnerAnswer, PartsHeld, PartsRange, StageFacts, StageUse
from kvrs_engine.engine.ranks.reformed import RanksNow
from kvrs_engine.engine.ranks.returning import StageLoan
from kvrs_engine.scheduling.sequences import Chunk

Result = TypeVar("Result")


class RemoteStage(StageCalls):
    """A `StageGroup` of one stage. Its `HostedStage` runs in an event loop in a separate thread;
    batches come from computing threads, one at a time, and page transfers from the instance's loop.

    With `on_cells`, a lost host is replaced by another instance's host or by a new own host. The
    cells of the stage are lost; batches go on when the page tables have noted that and a host is
    there. Without `on_cells`, or without a new host, the loss is final.
    """

    def __init__(
        self,
        at: StageAt,
        config: ModelConfig,
        settings: EngineSettings,
        layout: Layout,
        stage: int,
        donors: Sequence[StageAt] = (),
    ) -> None:
        """Connect to the own host, and wait until the host has loaded the stage. `donors` are other
        instances' hosts of the same stage, in the order in which they are asked.

        Raises:
            KvrsError: the own host refuses, or does not answer.
        """
        super().__init__()
        self.at = at.peer  # The own host.
        self._hosted = hosted = HostedStage(at, config, settings, layout, stage, donors, self)
        self.stages, self.layers, self.cells = range(stage, stage + 1), hosted.layers, hosted.cells
        self._computing = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stage", daemon=True)
        self._thread.start()
        try:
            self._call(hosted.open()).result()
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> StageFacts:
        return self._hosted.ready.facts

    @property
    def now(self) -> RanksNow:
        """The state of the ranks, by the host's last report."""
        return self._hosted.now

    @property
    def loan(self) -> StageLoan | None:
        """The loan of another instance's host; None: the host is the own one, or lost."""
        return self._hosted.loan

    @property
    def losses(self) -> int:
        """Number of times that all cells were lost."""
        return self._hosted.losses

    @property
    def is_whole(self) -> bool:
        """True if the page tables have dropped all pages that lost cells."""
        return self._hosted.is_whole

    def busy(self, now_s: float) -> float:
        """Return the share of the last seconds in which the host computed."""
        return self._hosted.busy.share(now_s)

    def use(self) -> dict[int, StageUse]:
        return {self.stages.start: self._hosted.use}

    def execute(self, chunks: Sequence[Chunk], rows: Tensor | None, limit_s: float) -> Tensor:
        hosted = self._hosted
        count = (
            sum(chunk.logits for chunk in chunks)
            if hosted.is_last
            else padded_rows(sum(len(chunk.token_ids) for chunk in chunks))
        )
        size = count * hosted.width * FLOAT_BYTES
        with self._computing:
            found = self._call(hosted.execute(chunks, rows, limit_s, size)).result()
        return found.view(torch.float32).view(count, hosted.width)

    def on_lost(self) -> None:
        self._hosted.may_compute.wait()
        if (error := self._hosted.error) is not None:
            raise error

    def take(self, loan: StageLoan, kept: Sequence[int], adopted: Mapping[int, int] = {}) -> bool:
        """Call `HostedStage.take`; return False after `close`."""
        if self._is_closed:
            return False
        return self._call(self._hosted.take(loan, kept, adopted)).result()

    def noted(self, loss: int) -> None:
        """Note that the page tables know of this loss and the earlier ones."""
        self._hosted.noted = loss

    def on_restart(self) -> None:
        hosted, loan = self._hosted, self._hosted.loan
        if loan is None or loan.table is not None:
            hosted.mended = hosted.noted
            self._call(hosted.connection.mended())

    async def read(self, pages: Sequence[int]) -> Tensor:
        if not self._hosted.is_whole:
            raise TransferError("cells of these pages are lost")
        return await asyncio.wrap_future(self._call(self._hosted.read(pages)))

    async def write(self, pages: Sequence[int], parts: Tensor, cells: Part | None = None) -> None:
        await asyncio.wrap_future(self._call(self._hosted.write(pages, parts, cells)))

    def lose_device(self, rank: int, bases: Sequence[int] = ()) -> dict[int, frozenset[Cell]]:
        self._check_own()
        return self._call(self._hosted.connection.lose_device(rank, bases)).result()

    def order(self, rank: int, *, leaves: bool) -> "Future[str | None]":
        self._check_own()
        return self._call(self._hosted.connection.move(rank, leaves=leaves))

    def answer(self, order: OwnerAnswer) -> "Future[None]":
        """Answer the request of another instance or its host; the future may fail with
        TransferError.
        """
        if self._is_closed:
            ended: Future[None] = Future()
            ended.set_exception(TransferError("has ended"))
            return ended
        return self._call(self._hosted.connection.answer(order))

    async def bring(
        self, to: InstanceId, ranges: Sequence[PartsRange], pages: Sequence[int]
    ) -> PartsHeld:
        """Send parts of pages to another instance's host; raises TransferError as
        `HostedStage.bring`.
        """
        hosted, losses = self._hosted, self._hosted.losses
        if self._is_closed or not hosted.is_whole:
            raise TransferError("cells of these pages are lost")
        return await asyncio.wrap_future(self._call(hosted.bring(losses, to, ranges, pages)))

    def end(self) -> None:
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._hosted.end)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed, self.on_end = True, lambda lost: None
        self._call(self._hosted.close()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_own(self) -> None:
        """Raises TransferError if the host is another instance's."""
        if (loan := self.loan) is not None:
            raise TransferError(
                f"stage {self.stages.start} is borrowed; allowed: at its lender {loan.lender!r}"
            )

    def _call(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)
