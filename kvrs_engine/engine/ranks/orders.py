"""The execution of a session's orders by the ranks of a stage.

A batch is answered when no rank of the stage computes it any more: with its result, or, if ranks
were lost, with `StageStopped` at once and `StageServes` when the remaining ranks have joined the
next formation. So no other batch or session uses the pages of an abandoned batch while a living
rank may still write into them.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kvrs.config.cluster import MAX_RANKS
from kvrs.errors import RanksLostError, TransferError
from kvrs.protocol.pages import Part
from kvrs_engine.engine.layers.tiles import FLOAT_BYTES, padded_rows
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.ranks.group import RankGroup
from kvrs_engine.engine.ranks.link import (
    IS_HERE,
    NOT_TAKEN,
    WORDS,
    CellsLost,
    ComputeStage,
    EndRank,
    LendPages,
    Mended,
    MoveRank,
    Ordered,
    OwnerAnswer,
    PagesDone,
    PagesLost,
    RankMoved,
    ReadPages,
    RefuseLoan,
    RefuseParts,
    StageChanged,
    StageComputed,
    StageComputing,
    StageLink,
    StageReady,
    StageServes,
    StageStopped,
    TakeParts,
    WritePages,
    max_page_payload,
)
from kvrs_engine.engine.ranks.reformed import RanksNow
from kvrs_engine.engine.ranks.sessions import (
    BatchLimits,
    StageRefusedError,
    StageSession,
    StageSessions,
)
from kvrs_engine.engine.ranks.wire import chunks_of


class StageOrders:
    def __init__(
        self, group: RankGroup, sessions: StageSessions, config: ModelConfig, load_s: float
    ) -> None:
        """`group` has the ranks of one stage, whose start took `load_s`."""
        self._load_s, self._sessions = load_s, sessions
        self._group, (self._stage,) = group, group.stages
        self._limits = BatchLimits.of(config, group.settings)
        self._geometry = group.pool.geometry
        # Floats per input row; 0 for the first stage, which has no input rows.
        self._width = config.hidden if self._stage else 0
        rows_bytes = padded_rows(group.settings.max_batch_tokens) * config.hidden * FLOAT_BYTES
        self.max_payload_bytes = max(rows_bytes, max_page_payload(self._geometry.page_bytes))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self._changes: set[asyncio.Event] = set()  # One event per session.

    def changed(self) -> None:
        """Tell all sessions that the state of the ranks has changed."""
        for change in self._changes:
            change.set()

    def close(self) -> None:
        """End the thread, after the group was closed."""
        self._thread.shutdown()

    async def batches(self, link: StageLink, session: StageSession) -> None:
        """Serve a link of batches; raises TransferError or RanksLostError when the link or the
        ranks are lost.
        """
        group = self._group
        use = group.use(session.number)[self._stage]
        pages = None
        tags = [] if session.terms is None else session.terms.tags
        if session.terms is not None:
            pages = session.terms.pages
        ready = StageReady(session.number, group.facts, self._now(), use, self._load_s, pages, tags)
        await link.send(ready)
        telling = asyncio.create_task(self._tell_changes(link))
        try:
            while True:
                order, payload = await link.receive()
                _check(session, order)
                match order:
                    case ComputeStage():
                        await self._compute(link, session, order, payload)
                    case Mended():
                        # A loan begins after any loss that its borrower could know of.
                        if session.pages is None:
                            group.on_restart()
                    case _:
                        raise StageRefusedError(f"a message out of turn: {type(order).__name__}")
        finally:
            telling.cancel()

    async def pages(self, link: StageLink, session: StageSession) -> None:
        """Serve a link of pages; raises TransferError when the link is lost."""
        await link.send(PagesDone())
        while True:
            order, payload = await link.receive()
            _check(session, order)
            match order:
                case ReadPages() | WritePages():
                    session.check_pages(order.pages)
                    await self._move(link, order, payload)
                case _ if session.pages is not None:
                    raise StageRefusedError(
                        f"{type(order).__name__} of a borrower; allowed: batches and pages"
                    )
                case LendPages() | RefuseLoan() | TakeParts() | RefuseParts():
                    await link.send(await self._answered(session, order))
                case EndRank():
                    await link.send(CellsLost(await self._end_rank(order)))
                case MoveRank():
                    moved = self._group.reformer.order(order.rank, leaves=order.leaves)
                    await link.send(RankMoved(await asyncio.wrap_future(moved)))
                case _:
                    raise StageRefusedError(f"a message out of turn: {type(order).__name__}")

    def _now(self) -> RanksNow:
        return self._group.now.later(-time.monotonic())

    async def _tell_changes(self, link: StageLink) -> None:
        change = asyncio.Event()
        self._changes.add(change)
        try:
            with suppress(TransferError):  # The other task of the link handles the loss.
                while True:
                    await change.wait()
                    change.clear()
                    await link.send(StageChanged(self._now()))
        finally:
            self._changes.remove(change)

    # Batches.

    async def _compute(
        self, link: StageLink, session: StageSession, order: ComputeStage, payload: Tensor
    ) -> None:
        chunks = chunks_of(order.chunks)
        self._limits.check(chunks)
        session.check_pages([page for chunk in chunks for page in chunk.pages])
        count = padded_rows(sum(len(chunk.token_ids) for chunk in chunks))
        if len(payload) != count * self._width * FLOAT_BYTES:
            raise StageRefusedError(
                f"{len(payload)} bytes of rows; allowed: {count * self._width * FLOAT_BYTES}"
            )
        rows = payload.view(torch.float32).view(count, self._width) if self._width else None
        group, loop = self._group, asyncio.get_running_loop()
        computed = loop.run_in_executor(self._thread, group.execute, chunks, rows, order.limit_s)
        try:
            while not (await asyncio.wait({computed}, timeout=order.limit_s / WORDS))[0]:
                await link.send(StageComputing(order.batch))
            if isinstance(lost := computed.exception(), RanksLostError):
                await link.send(StageStopped(order.batch, list(lost.ranks), lost.reason))
        finally:
            # The session must not end before.
            await self._barred(computed)
        if lost is None:
            use = group.use(session.number)[self._stage]
            await link.send(StageComputed(order.batch, use), computed.result())
        elif isinstance(lost, RanksLostError):
            await link.send(StageServes())
        else:
            raise lost

    async def _barred(self, computed: "asyncio.Future[Tensor]") -> None:
        """Wait until no rank computes the batch any more.

        Raises:
            RanksLostError: the ranks are lost for good.
        """
        await _ended(computed)
        if isinstance(computed.exception(), RanksLostError):
            loop = asyncio.get_running_loop()
            serving = loop.run_in_executor(self._thread, self._group.on_lost)
            await _ended(serving)
            serving.result()

    # Pages.

    async def _move(self, link: StageLink, order: ReadPages | WritePages, payload: Tensor) -> None:
        part_bytes, pages = self._geometry.page_bytes, order.pages
        last, most = self._group.settings.pages - 1, max_page_payload(part_bytes) // part_bytes
        if not 0 < len(pages) <= most or min(pages) < 0 or max(pages) > last:
            raise StageRefusedError(
                f"{len(pages)} pages {pages[:8]}; allowed: 1 to {most} of 0 to {last}"
            )
        parts: Tensor | None = None
        part = self._part_of(order) if isinstance(order, WritePages) else None
        if isinstance(order, WritePages):
            if part is not None:
                cells = self._geometry.layers * self._geometry.kv_heads
                part_bytes = part_bytes // cells * part.cells
            if len(payload) != len(pages) * part_bytes:
                raise StageRefusedError(
                    f"{len(payload)} bytes of pages; allowed: {len(pages) * part_bytes}"
                )
            parts = payload.view(len(pages), part_bytes)
        found: Tensor | None = None
        try:
            if parts is None:
                found = await self._group.read(pages)
            else:
                await self._group.write(pages, parts, part)
        except TransferError as error:
            await link.send(PagesLost(str(error)))
        else:
            await link.send(PagesDone(), found)

    def _part_of(self, order: WritePages) -> Part | None:
        """Return the cells of each page that the order writes; None: all cells of the stage."""
        if order.layers is None or order.heads is None:
            return None
        part = Part(range(*order.layers), range(*order.heads))
        whole = Part(self._group.pool.layers, range(self._geometry.kv_heads))
        if not part.cells or whole.shared(part) != part:
            layers, heads = whole.layers, whole.heads
            raise StageRefusedError(
                f"layers {list(order.layers)} and heads {list(order.heads)}; allowed: within "
                f"{[layers.start, layers.stop]} and {[heads.start, heads.stop]}"
            )
        return part

    async def _end_rank(self, order: EndRank) -> dict[int, list[tuple[int, int]]]:
        pages, bases = self._group.settings.pages, order.bases
        if len(bases) not in (0, pages) or not {*bases} <= {*range(MAX_RANKS)}:
            raise StageRefusedError(
                f"bases of {len(bases)} pages; allowed: 0 to {MAX_RANKS - 1} of none or {pages}"
            )
        if order.rank not in self._group.pids:
            return {}
        # A borrower's pages lose cells too; the borrower must begin a new loan.
        await self._sessions.end_loan()
        lost = await asyncio.to_thread(self._group.lose_device, order.rank, bases)
        return {base: sorted(cells) for base, cells in lost.items()}

    async def _answered(self, session: StageSession, order: OwnerAnswer) -> PagesDone | PagesLost:
        last = self._group.settings.pages - 1
        match order:
            case LendPages(pages=pages):
                if not pages or not _are_distinct(pages, last) or len(order.tags) > len(pages):
                    raise StageRefusedError(
                        f"a loan of {len(pages)} pages {pages[:8]} with {len(order.tags)} tags; "
                        f"allowed: each of 0 to {last} once, and at most one tag for each"
                    )
                _check_copies(order, last)
                try:
                    await self._copy(order)
                except TransferError as error:
                    return PagesLost(str(error))
            case TakeParts():
                taken = [page for page in order.pages if page not in (IS_HERE, NOT_TAKEN)]
                if not _are_distinct(taken, last):
                    raise StageRefusedError(
                        f"parts in pages {taken[:8]}; allowed: each of 0 to {last} once"
                    )
                session.check_pages(taken)
            case _:
                pass
        if self._sessions.answered(order):
            return PagesDone()
        return PagesLost("the other instance does not wait any more")

    async def _copy(self, order: LendPages) -> None:
        """Copy the used parts into lent pages; raises TransferError if cells are lost."""
        if order.copies:
            sources, targets = zip(*order.copies, strict=True)
            await self._group.write(targets, await self._group.read(sources))


def _check_copies(order: LendPages, last: int) -> None:
    """Raises StageRefusedError if a copy is not from an own page into a lent page."""
    for source, target in order.copies:
        if not 0 <= source <= last or source in order.pages or target not in order.pages:
            raise StageRefusedError(
                f"a copy of page {source} into {target}; allowed: from an unlent page of "
                f"0 to {last}, into a lent page"
            )


def _are_distinct(pages: Sequence[int], last: int) -> bool:
    return len({*pages}) == len(pages) and all(0 <= page <= last for page in pages)


def _check(session: StageSession, order: object) -> None:
    if isinstance(order, Ordered):
        session.check(order)


async def _ended(work: "asyncio.Future[Any]") -> None:
    """Wait for the end of work in a thread, also after cancellations."""
    while not work.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({work})
