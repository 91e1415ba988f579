"""Loans of an instance whose stages are in hosts: what it lends of its own, and what it does with
its pages while a stage of it is another instance's.

A page that is lent has a hard pin and nothing in it, so no stream gets it; a page for which a
borrowed stage has no memory as well.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec

from kvrs.config.engine import ElasticSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.net.http import News
from kvrs.protocol.stages import RestartReport, StageLent
from kvrs.protocol.tags import Tag
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

_AGAIN_S = 0.05  # Until pages that were being sent or filled are looked at again.


@dataclass(slots=True, eq=False)
class _Restart:
    run: GenerationRun
    tokens: int  # That it had.
    fetched_pages: int  # By the run, before.
    adopted_pages: int = 0


class RestartedRuns:
    """Runs that began again in the same attempt, since cells of a stage were lost: what each found
    again, and what it computed once more.
    """

    def __init__(self, page_size_tokens: int, clock: Callable[[], float]) -> None:
        self._page_size = page_size_tokens
        self._waiting: dict[sequences.Sequence, _Restart] = {}  # For their next token.
        self.adopted_pages = 0  # Since the start.
        self.recent: RecentReports[RestartReport] = RecentReports(clock)

    def begin(self, runs: Iterable[GenerationRun], adopted: Collection[Tag]) -> None:
        """All runs begin again; the `adopted` pages are there by a loan."""
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
        """A batch was computed."""
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
    """Belongs to the event loop of the instance. As a hook it comes before the ranks."""

    def __init__(
        self, ranks: RanksOnNodes, elastic: ElasticSettings, core: EngineCore, news: News
    ) -> None:
        """`news`: of load reports, which are due when what is lent has changed."""
        self._ranks, self._elastic, self._core, self._news = ranks, elastic, core, news
        self._pages = core.pages
        self.restarts = RestartedRuns(core.pages.page_size_tokens, time.monotonic)
        # The borrower and the pages of each loan, by the stage and the loan's number.
        self._lent: dict[tuple[int, int], tuple[InstanceId, list[int]]] = {}
        self._unused: list[int] = []  # Pages for which a borrowed stage has no memory.
        self.changes = 0  # Of what is lent: steps take other times after each.

    @property
    def lends(self) -> list[StageLent]:
        return [StageLent(to, stage, len(pages)) for (stage, _), (to, pages) in self._lent.items()]

    @property
    def held_pages(self) -> int:
        """Pages that no stream may use."""
        return len({*self._unused, *self._pages_lent()})

    def _pages_lent(self, stage: int | None = None) -> Counter[int]:
        """Pages that are lent, with their loans; `stage`: at that one only."""
        lent = self._lent.items()
        found = (pages for (at, _), (_, pages) in lent if stage in (None, at))
        return Counter(page for pages in found for page in pages)

    def start(self) -> None:
        """Lend, borrow and wait from now on."""
        loop = asyncio.get_running_loop()
        for stage in self._ranks.remote:
            stage.on_tags = lambda: asyncio.run_coroutine_threadsafe(self._tags(), loop)
            stage.on_cells = in_loop(partial(self._lose, stage))
            stage.on_asked = in_loop(partial(self._asked, stage))
            stage.on_over = in_loop(partial(self._over, stage))
            stage.on_home = in_loop(self._use_all)

    # A stage of ours is lost, or another instance's.

    def _lose(self, stage: RemoteStage, loss: int) -> None:
        self._core.lose_cells(dict.fromkeys({0, *self._pages.bases}, stage.cells))
        stage.noted(loss)

    async def _tags(self) -> list[Tag]:
        """Tags of the full pages that runs have, computed or not, in the order of their turns."""
        sequences = sorted((run.sequence for run in self._core.under_way), key=order)
        return [tag for sequence in sequences for tag in sequence.tags]

    def admits(self) -> bool:
        """Not while a donor is asked: what would be given up for pages that nothing can be computed
        into may be what it has.
        """
        now = self._ranks.now.reforming
        return now is None or now.way is not Way.SUBSTITUTE

    def on_restart(self) -> None:
        """While no stream has a page: give up those without memory, and go on with what lenders
        have of ours.
        """
        self.restarts.begin(self._core.under_way, self._adopt())

    async def after_logits(self, batch: Batch, took_s: float) -> None:
        self.restarts.computed(batch)

    def ended(self, run: GenerationRun) -> None:
        self.restarts.ended(run)

    def _adopt(self) -> set[Tag]:
        """Returns the tags of our pages that lenders have."""
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
        """Our pages, with a hard pin each, of which the lender has the part beside."""
        adopted: dict[int, int] = {}
        for tag, theirs in zip(loan.tags, loan.pages, strict=False):
            own = self._pages.damaged.by_tag.get(tag)
            if own is not None and own not in self._pages.parts.lent and own not in adopted:
                self._pages.pin(own)
                adopted[own] = theirs
        return adopted

    def _give_up_others(self) -> bool:
        """Keep as many pages as have memory in all loans; False: some are in use still."""
        most = min(len(loan.pages) for loan in self._ranks.loans.values())
        if (missing := self._pages.pages - self.held_pages - most) > 0:
            if (found := self._pages.allocate(missing)) is None:
                # Some are being sent or filled still.
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
                continue  # It has gone home, without what the lender has.
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

    # Another instance would use a stage of ours.

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
        """So many pages, those first that have what the borrower's streams have; and with a hard
        pin those that are copied.
        """
        held: dict[Tag, int] = {}
        shared: dict[Tag, int] = {}
        lent, again = self._pages_lent(), self._lent_elsewhere(stage)
        spare = count - len(again)  # Pages that may be lent and are not, at any stage.
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
            refusal = "it is draining"
        elif self._ranks.now.reforming is not None or self._ranks.loans or not stage.is_whole:
            refusal = "it lacks a stage itself"
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
        """Pages that are lent at other stages: of this one nothing uses them."""
        lent, here = self._pages_lent(), self._pages_lent(stage.stages.start)
        is_lent_only = self._pages.parts.is_lent_only
        return [page for page in lent if page not in here and is_lent_only(page, lent[page])]

    def _over(self, stage: RemoteStage, loan: int | None) -> None:
        """That loan is over; None: all of the stage are, with its host or the session there."""
        number = stage.stages.start
        over = [key for key in self._lent if key[0] == number and loan in (None, key[1])]
        for key in over:
            _, pages = self._lent.pop(key)
            if self._ranks.loans:  # What is borrowed has no memory for them.
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
    """The same call, from any thread, carried out later in the running loop."""
    loop = asyncio.get_running_loop()

    def tell(*args: Arguments.args, **options: Arguments.kwargs) -> None:
        loop.call_soon_threadsafe(partial(call, *args, **options))

    return tell
