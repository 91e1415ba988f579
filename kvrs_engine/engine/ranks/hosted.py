"""A stage and its current host: its own host, another instance's host, or none."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs.errors import KvrsError, RanksLostError, TransferError
from kvrs.ids import InstanceId
from kvrs.protocol.pages import Part, Tag
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.lending import BusyShare
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.layers.tiles import FLOAT_BYTES, padded_rows
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.cells import of_layers
from kvrs_engine.engine.ranks.connection import StageAt, StageConnection
from kvrs_engine.engine.ranks.link import (
    FromOthers,
    LoanAsked,
    LoanOver,
    LoanWanted,
    PartsHeld,
    PartsOffered,
    PartsOver,
    PartsRange,
    StageReady,
    StageUse,
)
from kvrs_engine.engine.ranks.reformed import RanksNow, ReformingNow
from kvrs_engine.engine.ranks.returning import Gate, StageLoan, StageReturn
from kvrs_engine.engine.worker import geometry_of
from kvrs_engine.scheduling.sequences import Chunk, pages_for

log = logging.getLogger(__name__)

_TAGS_S = 1.0  # Time limit for `on_tags`; after it, a loan is requested without replicas.


class StageCalls:
    """The callbacks of a stage, called in the thread of its event loop."""

    def __init__(self) -> None:
        # The stage has ended for good; the state of its ranks has changed.
        self.on_end: Callable[[RanksLostError], object] = lambda lost: None
        self.on_change: Callable[[], object] = lambda: None
        # All cells are lost; the argument is the number of the loss, for `noted`. Without this
        # callback the loss of a host ends the stage.
        self.on_cells: Callable[[int], object] | None = None
        # An instance asks for a loan; a loan has ended (None: all loans); the own host is back.
        self.on_asked: Callable[[LoanAsked], object] = lambda asked: None
        self.on_over: Callable[[int | None], object] = lambda loan: None
        self.on_home: Callable[[], object] = lambda: None
        # Returns the tags of the streams' full pages, for the request of a loan.
        self.on_tags: Callable[[], Future[list[Tag]]] | None = None
        # Another host offers parts of pages; an offer has ended (None: all offers).
        self.on_offered: Callable[[PartsOffered], object] = lambda offered: None
        self.on_brought: Callable[[PartsOver | None], object] = lambda over: None


class HostedStage:
    """A stage with its current host. Methods run in one event loop; attributes that other threads
    read are replaced, never modified.
    """

    def __init__(
        self,
        at: StageAt,
        config: ModelConfig,
        settings: EngineSettings,
        layout: Layout,
        stage: int,
        donors: Sequence[StageAt],
        calls: StageCalls,
    ) -> None:
        geometry = geometry_of(config, settings)
        self.stage, self.layers = stage, layout.layers(range(stage, stage + 1))
        self.cells = frozenset(product(self.layers, range(geometry.kv_heads)))
        # `width` is the number of floats per output row, or per sampled row in the last stage.
        self.is_last = stage + 1 == len(layout.stages)
        self.width = config.vocab if self.is_last else config.hidden
        self.page_size_tokens = size = geometry.page_size_tokens
        self.ranks = ranks = layout.stages[stage].ranks
        self._units, self._full, self._calls = config.units_of_ranks, layout, calls
        connect = partial(
            StageConnection,
            stage=stage,
            ranks=ranks,
            part_bytes=of_layers(geometry, self.layers).page_bytes,
            max_bytes=padded_rows(settings.max_batch_tokens) * self.width * FLOAT_BYTES,
            # Not shared with other stages, whose hosts have other event loops and nodes.
            links=SendingLinks(at.transfer, SendingFaults(), at.own.node),
        )
        # The largest and the smallest loan; a smaller loan might not hold the longest stream.
        longest = pages_for(min(settings.max_model_len, config.max_positions), size)
        self._max_pages, self._least_pages = settings.pages, min(settings.pages, longest)
        # Numbers of losses of all cells: in total, noted by the page tables, and repaired there.
        self.losses = self.noted = self.mended = 0
        self.loan: StageLoan | None = None  # None: the host is the own one, if there is a host.
        self.busy = BusyShare(len(ranks))
        self._away: RanksNow | None = None  # The state of the ranks while there is no host.
        self._before = 0, 0, 0  # Counters of earlier hosts, which `_counted` adds.
        self.error: RanksLostError | None = None  # The final error; None: the stage goes on.
        self.may_compute = threading.Event()  # Set while ranks compute, and after `error`.
        self.gate, self.is_lost = Gate(), asyncio.Event()
        self._back = asyncio.Event()  # Set while there is a host, and after `error`.
        self._return = StageReturn(self, connect, at, donors, size)
        self._returning: asyncio.Task[None] | None = None
        self.connection = connect(at)
        self.ready: StageReady  # The last answer of its own host.

    async def open(self) -> None:
        """Connect to the own host; raises KvrsError if it refuses or does not answer."""
        self.ready = await self.connection.open()
        self._use(self.connection)

    @property
    def now(self) -> RanksNow:
        """The state of the ranks, by the host's last report."""
        return self._away or self._counted(self.connection.now)

    @property
    def use(self) -> StageUse:
        return self.connection.use

    @property
    def is_whole(self) -> bool:
        """True if the page tables have dropped all pages that lost cells."""
        return self.mended == self.losses

    async def execute(
        self, chunks: Sequence[Chunk], rows: Tensor | None, limit_s: float, answer_bytes: int
    ) -> Tensor:
        """Compute a batch; raises RanksLostError if it has failed."""
        async with self.gate.using():
            if not self.is_whole:
                raise RanksLostError(self.ranks, "has lost cells")
            size, connection, loan = self.page_size_tokens, self.connection, self.loan
            theirs = chunks if loan is None else loan.translated(chunks)
            try:
                found = await connection.execute(theirs, rows, limit_s, size, answer_bytes)
            finally:
                if loan is not None:
                    loan.computed(chunks)
            self.busy.note(time.monotonic(), connection.use.worked_s)
            return found

    async def read(self, pages: Sequence[int]) -> Tensor:
        """Read the stage's part of pages; raises TransferError if the stage is lost."""
        async with self.gate.using():
            theirs = pages if self.loan is None else self.loan.theirs(pages)
            return await self.connection.read(theirs)

    async def write(self, pages: Sequence[int], parts: Tensor, cells: Part | None) -> None:
        """Write the stage's part of pages when there is a host; raises TransferError if the stage
        is lost, or lost cells meanwhile.
        """
        await self._back.wait()
        async with self.gate.using():
            loan = self.loan
            theirs = pages if loan is None else loan.theirs(pages)
            try:
                await self.connection.write(theirs, parts, cells)
            finally:
                if loan is not None:
                    loan.touched.update(pages)

    async def bring(
        self, losses: int, to: InstanceId, ranges: Sequence[PartsRange], pages: Sequence[int]
    ) -> PartsHeld:
        """Send parts of pages to another instance's host. `losses` is the number of losses when the
        page tables had the pages.

        Raises:
            TransferError: as `StageConnection.bring`, or cells were lost since.
        """
        # The gate is not used, because batches must not wait.
        if losses != self.losses or not self.is_whole or self._away is not None:
            raise TransferError("cells of these pages are lost")
        theirs = pages if self.loan is None else self.loan.theirs(pages)
        return await self.connection.bring(to, ranges, theirs)

    async def take(self, loan: StageLoan, kept: Sequence[int], adopted: Mapping[int, int]) -> bool:
        """Call `StageLoan.take`; return False if the loan is not the current one."""
        if self.loan is not loan:
            return False
        loan.take(kept, adopted)
        return True

    def end(self, lost: RanksLostError | None = None) -> None:
        """End the stage: batches and all waiting calls fail with RanksLostError."""
        if self.error is not None:
            return
        self.error = lost or RanksLostError(self.ranks, "has ended")
        self.connection.give_up()
        self._update()
        if lost is not None:
            self._calls.on_end(lost)

    async def close(self) -> None:
        self.end()
        if self._returning is not None:
            self._returning.cancel()
            await asyncio.wait({self._returning})
        await self.connection.close()

    def _counted(self, now: RanksNow) -> RanksNow:
        """Add the counters of earlier hosts."""
        number, layout, deaths = self._before
        return replace(
            now,
            layout=replace(now.layout, number=now.layout.number + layout),
            deaths=now.deaths + deaths,
            number=now.number + number,
        )

    def _use(self, connection: StageConnection) -> None:
        self.connection, self._away = connection, None
        connection.on_news = partial(self._hear, connection)
        self._hear(connection, None)

    def _hear(self, connection: StageConnection, message: FromOthers | None) -> None:
        if connection is not self.connection:
            return
        match message:
            case LoanAsked():
                self._calls.on_asked(message)
            case LoanOver(loan=loan):
                self._calls.on_over(loan)
            case PartsOffered() if self.loan is None:
                self._calls.on_offered(message)
            case PartsOver() if self.loan is None:
                self._calls.on_brought(message)
            case None:
                self._update()
                if connection.error is None:
                    self._calls.on_change()
                elif self._away is None:
                    self._lost(connection.error)
            case _:
                pass  # Parts for the lender.

    def _update(self) -> None:
        connection = self.connection
        if self.error is not None or (connection.error or connection.stopped) is None:
            self.may_compute.set()
        else:
            self.may_compute.clear()
        if self.error is not None or connection.error is None:
            self._back.set()
        else:
            self._back.clear()

    def _lost(self, lost: RanksLostError) -> None:
        """Handle the loss of the host or of its connection."""
        is_final = self.loan is None and self.connection.is_refused
        if self._calls.on_cells is None or is_final or self.error is not None:
            self.end(lost)
            return
        before = self.now
        log.warning("a stage has no host", extra={"stage": self.stage, "cause": str(lost)})
        way, in_s = Way.WAIT, self.ready.load_s
        if self._return.borrows:
            way, in_s = Way.SUBSTITUTE, self._return.join_s
        held = (self._full.held(rank) for rank in self.ranks if rank in self._full.ranks)
        number, deaths = before.number + 1, before.deaths + len(self.ranks)
        reforming = ReformingNow(
            number=number,
            way=way,
            ready_at_s=time.monotonic() + in_s,
            after=self._full,
            lost=self.ranks,
            move_bytes=sum(self._units.bytes_of(unit) for own in held for unit in own),
            lost_cells=len(self.cells),
        )
        self._before = number, before.layout.number, deaths
        self._away = RanksNow(before.layout, {}, deaths, number, reforming)
        if self.loan is None:
            self._calls.on_over(None)
            self._calls.on_brought(None)
        self.loan = None
        self._lose_cells()
        self._calls.on_change()
        self.is_lost.set()
        if self._returning is None or self._returning.done():
            self._returning = asyncio.create_task(self._go())

    def _lose_cells(self) -> None:
        self.losses += 1
        if self._calls.on_cells is not None:
            self._calls.on_cells(self.losses)

    async def _go(self) -> None:
        try:
            await self._return.run()
        except KvrsError as error:
            self.end(RanksLostError(self.ranks, str(error)))

    # Called by `StageReturn`.

    async def wanted(self) -> LoanWanted:
        busy, tags = self.busy.share(time.monotonic()), list[Tag]()
        if self._calls.on_tags is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_TAGS_S):
                    tags = await asyncio.wrap_future(self._calls.on_tags())
        return LoanWanted(self._max_pages, self._least_pages, busy, tags[: self._max_pages])

    def waits(self) -> None:
        if (away := self._away) is None or (now := away.reforming) is None or now.way is Way.WAIT:
            return
        reforming = replace(now, way=Way.WAIT, ready_at_s=time.monotonic() + self.ready.load_s)
        self._away = replace(away, reforming=reforming)
        self._calls.on_change()

    def borrow(self, connection: StageConnection, loan: StageLoan) -> None:
        self._join(connection)
        self.loan = loan
        # The page tables must first drop the pages beyond the loan.
        self._lose_cells()
        self.is_lost.clear()
        self._use(connection)

    def come_home(self, connection: StageConnection, ready: StageReady) -> None:
        if self._away is None:  # Handed back by the lender.
            now = self.now
            self._before = now.number, now.layout.number, now.deaths
        self.ready, self.loan = ready, None
        self._join(connection)
        self.is_lost.clear()
        self._use(connection)
        self._calls.on_home()

    def _join(self, connection: StageConnection) -> None:
        """Subtract the new host's counts from before this session."""
        now, (number, layout, deaths) = connection.now, self._before
        number, layout = number + 1 - now.number, layout + 1 - now.layout.number
        self._before = number, layout, deaths - now.deaths
