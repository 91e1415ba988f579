"""The loans of an instance whose stages are in hosts: the pages that it lends, and the use of its
own pages while it borrows a stage.

A lent page has a hard pin and no content, so that no stream gets it; so has a page for which a
borrowed stage has no memory.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec

from kvrs.config.cluster import ElasticSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.net.http import News
from kvrs.protocol.instance import RestartReport, StageLent
from kvrs.protocol.pages import Tag
from kvrs.transfer.puller import RecentReports
from kvrs_engine.elastic.lending import Lender, terms
from kvrs_engine.elastic.ways import Way
from kvrs_engine.engine.core import EngineCore
from kvrs_engine.engine.hooks import Batch, StepHook
from kvrs_engine.engine.ranks.link import LendPages, LoanAsked, RefuseLoan
from kvrs_engine.engine.ranks.nodes import RanksOnNodes
from kvrs_engine.engine.ranks.remote import RemoteStage
from kvrs_engine.engine.ranks.returning import StageLoan
from kvrs_engine.engine.requests import GenerationRun
from kvrs_engine.scheduling import sequences
from kvrs_engine.scheduling.fair_queue import order

log = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")

_AGAIN_S = 0.05  # Delay before a retry while pages are being sent or filled.


@dataclass(slots=True, eq=False)
class _Restart:
    run: GenerationRun
    tokens: int  # Number of tokens at the restart.
    fetched_pages: int  # Number of pages that the run had fetched before the restart.
    adopted_pages: int = 0


class RestartedRuns:
    """Reports on runs that restarted in the same attempt after a loss of cells: the pages that each
    found again, and the tokens that it computed again.
    """

    def __init__(self, page_size_tokens: int, clock: Callable[[], float]) -> None:
        self._page_size = page_size_tokens
        self._waiting: dict[sequences.Sequence, _Restart] = {}  # Runs without a token yet.
        self.adopted_pages = 0  # Total since the start.
        self.recent: RecentReports[RestartReport] = RecentReports(clock)

    def begin(self, runs: Iterable[GenerationRun], adopted: Collection[Tag]) -> None:
        """Note the restart of all runs; a loan has the content of the `adopted` pages."""
        self._waiting = {
            run.sequence: _Restart(
                run,
                len(run.sequence.token_ids),
                run.fetched_pages,
                sum(tag in adopted for tag in run.sequence.tags),
            )
            for run in runs
        }

    def computed(self, batch: Batch) -> None:
        """Report the restarted runs that have a token by this computed batch."""
        for sequence, chunk in batch if self._waiting else ():
            if chunk.logits and (restart := self._waiting.pop(sequence, None)) is not None:
                self.adopted_pages += restart.adopted_pages
                self.recent.note(self._report(restart))

    def ended(self, run: GenerationRun) -> None:
        self._waiting.pop(run.sequence, None)

    def _report(self, restart: _Restart) -> RestartReport:
        sequence, run = restart.run.sequence, restart.run
        fetched = max(0, run.fetched_pages - restart.fetched_pages)
        found = (sequence.cached_tokens or 0) + fetched * self._page_size
        owner_epoch, attempt = sequence.attempt
        return RestartReport(
            sequence.stream,
            attempt,
            owner_epoch,
            restart.adopted_pages,
            max(0, restart.tokens - found),
        )


class StageLoans(StepHook):
    """Lends and borrows pages of stages. Methods run in the event loop of the instance; the hook
    must come before the ranks.
    """

    def __init__(
        self, ranks: RanksOnNodes, elastic: ElasticSettings, core: EngineCore, news: News
    ) -> None:
        """`news` requests a load report when the lent pages have changed."""
        self._ranks, self._elastic, self._core, self._news = ranks, elastic, core, news
        self._pages = core.pages
        self.restarts = RestartedRuns(core.pages.page_size_tokens, time.monotonic)
        # Borrower and pages of each loan, by stage and number of the loan.
        self._lent: dict[tuple[int, int], tuple[InstanceId, list[int]]] = {}
        self._unused: list[int] = []  # Pages for which a borrowed stage has no memory.
        self.changes = 0  # Number of changes of the loans, which change the times of steps.

    @property
    def lends(self) -> list[StageLent]:
        return [StageLent(to, stage, len(pages)) for (stage, _), (to, pages) in self._lent.items()]

    @property
    def held_pages(self) -> int:
        """Number of pages that no stream may use."""
        return len({*self._unused, *self._pages_lent()})

    def _pages_lent(self, stage: int | None = None) -> Counter[int]:
        """Return the number of loans of each lent page, at one stage or (None) at all."""
        lent = self._lent.items()
        found = (pages for (at, _), (_, pages) in lent if stage in (None, at))
        return Counter(page for pages in found for page in pages)

    def start(self) -> None:
        """Begin to lend and to borrow."""
        loop = asyncio.get_running_loop()
        for stage in self._ranks.remote:
            stage.on_tags = lambda: asyncio.run_coroutine_threadsafe(self._tags(), loop)
            stage.on_cells = in_loop(partial(self._lose, stage))
            stage.on_asked = in_loop(partial(self._asked, stage))
            stage.on_over = in_loop(partial(self._over, stage))
            stage.on_home = in_loop(self._use_all)

    # Borrowing: an own stage is lost.

    def _lose(self, stage: RemoteStage, loss: int) -> None:
        self._core.lose_cells(dict.fromkeys({0, *self._pages.bases}, stage.cells))
        stage.noted(loss)

    async def _tags(self) -> list[Tag]:
        """Return the tags of the runs' full pages, computed or not, in the order of the queue."""
        sequences = sorted((run.sequence for run in self._core.under_way), key=order)
        return [tag for sequence in sequences for tag in sequence.tags]

    def admits(self) -> bool:
        """Return False while a loan is requested: new runs would evict pages whose parts the lender
        may have, and could not be computed.
        """
        now = self._ranks.now.reforming
        return now is None or now.way is not Way.SUBSTITUTE

    def on_restart(self) -> None:
        """Restart all runs, which have no pages now: choose the pages to keep, and adopt the
        lenders' content.
        """
        self.restarts.begin(self._core.under_way, self._adopt())

    async def after_logits(self, batch: Batch, took_s: float) -> None:
        self.restarts.computed(batch)

    def ended(self, run: GenerationRun) -> None:
        self.restarts.ended(run)

    def _adopt(self) -> set[Tag]:
        """Choose the pages to keep in new loans; return the tags of pages whose content lenders
        have.
        """
        loans = self._ranks.loans
        if not loans:
            self._use_all()
            return set()
        found: list[tuple[RemoteStage, StageLoan, dict[int, int]]] = [
            (stage, loan, self._damaged(loan))
            for stage in self._ranks.remote
            if (loan := loans.get(stage.stages.start)) is not None and loan.table is None
        ]
        pinned = [page for *_, adopted in found for page in adopted]
        try:
            return self._take(found) if self._give_up_others() else set()
        finally:
            self._pages.release(pinned)

    def _damaged(self, loan: StageLoan) -> dict[int, int]:
        """Pin the own damaged pages whose missing part the lender has; return lender's page by own
        page.
        """
        adopted: dict[int, int] = {}
        for tag, theirs in zip(loan.tags, loan.pages, strict=False):
            own = self._pages.damaged.by_tag.get(tag)
            if own is not None and own not in self._pages.parts.lent and own not in adopted:
                self._pages.pin(own)
                adopted[own] = theirs
        return adopted

    def _give_up_others(self) -> bool:
        """Set aside the pages beyond the smallest loan; False: too many are in use, retry later."""
        most = min(len(loan.pages) for loan in self._ranks.loans.values())
        if (missing := self._pages.pages - self.held_pages - most) > 0:
            if (found := self._pages.allocate(missing)) is None:
                # Some pages are still being sent or filled.
                for stage in self._ranks.remote:
                    if (loan := stage.loan) is not None and loan.table is None:
                        loop = asyncio.get_running_loop()
                        loop.call_later(_AGAIN_S, self._lose, stage, stage.losses)
                return False
            self._unused += found
        return True

    def _take(self, found: Iterable[tuple[RemoteStage, StageLoan, Mapping[int, int]]]) -> set[Tag]:
        taken: set[Tag] = set()
        kept = sorted({*range(self._pages.pages)} - {*self._unused} - {*self._pages_lent()})
        for stage, loan, adopted in found:
            if not stage.take(loan, kept, adopted):
                continue  # The loan has ended.
            tags = dict(zip(loan.pages, loan.tags, strict=False))
            for own, theirs in adopted.items():
                self._pages.parts.brought(own, tags[theirs], stage.cells)
                taken.add(tags[theirs])
        return taken

    def _use_all(self) -> None:
        if not self._ranks.loans and self._unused:
            self._pages.release(self._unused)
            self._unused = []
            self._core.wake()

    # Lending: another instance asks for an own stage.

    def _asked(self, stage: RemoteStage, asked: LoanAsked) -> None:
        number, wanted = stage.stages.start, asked.wanted
        answer = terms(self._lender(stage), wanted.pages, wanted.least_pages, wanted.busy)
        if isinstance(answer, str):
            log.info("a loan is refused", extra={"to": asked.borrower, "cause": answer})
            stage.answer(RefuseLoan(0, 0, asked.loan, answer))
            return
        lending, sources = self._terms(stage, asked, answer)
        self._lent[number, asked.loan] = asked.borrower, lending.pages
        self._changed()
        told = asyncio.wrap_future(stage.answer(lending))
        told.add_done_callback(partial(self._answered, stage, asked.loan, sources))

    def _terms(
        self, stage: RemoteStage, asked: LoanAsked, count: int
    ) -> tuple[LendPages, list[int]]:
        """Choose `count` pages to lend, first those with content that the borrower wants; return
        the answer, and the pinned pages that the host copies.
        """
        held: dict[Tag, int] = {}
        shared: dict[Tag, int] = {}
        lent, again = self._pages_lent(), self._lent_elsewhere(stage)
        spare = count - len(again)  # Number of pages to lend that are not lent at any stage.
        for tag in dict.fromkeys(asked.wanted.tags):
            if len(held) + len(shared) == count:
                break
            found = self._pages.parts.lend(tag, stage.cells, lent, spare=spare > 0)
            if found is not None:
                page, in_use = found
                (shared if in_use else held)[tag] = page
                spare -= not in_use and page not in lent
        taken = {*held.values()}
        others = [page for page in again if page not in taken][: count - len(held)]
        for page in others:
            self._pages.parts.lend_again(page, stage.cells)
        fresh = self._pages.allocate(count - len(held) - len(others))
        assert fresh is not None, "they are spare"
        others += fresh
        copies = list(zip(shared.values(), others, strict=False))
        tags = [*held, *shared]
        pages = [*held.values(), *others]
        return LendPages(0, 0, asked.loan, pages, tags, copies), list(shared.values())

    def _answered(
        self, stage: RemoteStage, loan: int, sources: Sequence[int], told: "asyncio.Future[None]"
    ) -> None:
        self._pages.release(sources)
        if not told.cancelled() and isinstance(told.exception(), TransferError):
            self._over(stage, loan)

    def _lender(self, stage: RemoteStage) -> Lender:
        refusal = None
        if self._core.is_draining:
            refusal = "the instance is draining"
        elif self._ranks.now.reforming is not None or self._ranks.loans or not stage.is_whole:
            refusal = "the instance lacks a stage itself"
        again = len(self._lent_elsewhere(stage))
        return Lender(
            pages=self._pages.pages,
            spare_pages=self._pages.free_pages - self._pages.leased_pages + again,
            lent_pages=self.held_pages - again,
            busy=stage.busy(time.monotonic()),
            least_gain=self._elastic.least_gain,
            refusal=refusal,
        )

    def _lent_elsewhere(self, stage: RemoteStage) -> list[int]:
        """Return the pages that are lent only at other stages, so that this stage's part is
        free.
        """
        lent, here = self._pages_lent(), self._pages_lent(stage.stages.start)
        is_lent_only = self._pages.parts.is_lent_only
        return [page for page in lent if page not in here and is_lent_only(page, lent[page])]

    def _over(self, stage: RemoteStage, loan: int | None) -> None:
        """Handle the end of a loan; None: of all loans, with the end of the host's session."""
        number = stage.stages.start
        over = [key for key in self._lent if key[0] == number and loan in (None, key[1])]
        for key in over:
            _, pages = self._lent.pop(key)
            if self._ranks.loans:  # A borrowed stage has no memory for these pages.
                self._unused += pages
            else:
                self._pages.release(pages)
        if over:
            self._changed()

    def _changed(self) -> None:
        self.changes += 1
        self._core.wake()
        self._news.tell()


def in_loop(call: Callable[Arguments, object]) -> Callable[Arguments, None]:
    """Wrap `call` such that any thread may call it, and it runs in the current event loop."""
    loop = asyncio.get_running_loop()

    def tell(*args: Arguments.args, **options: Arguments.kwargs) -> None:
        loop.call_soon_threadsafe(partial(call, *args, **options))

    return tell
