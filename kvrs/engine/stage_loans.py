"""Loans of an instance whose stages are in hosts: what it lends of its own, and what it does with
its pages while a stage of it is another instance's.

A page that is lent has a hard pin and nothing in it, so no stream gets it; a page for which a
borrowed stage has no memory as well.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import ParamSpec

from kvrs.config.engine import ElasticSettings
from kvrs.elastic.lending import Lender, terms
from kvrs.engine.core import EngineCore
from kvrs.engine.hooks import StepHook
from kvrs.engine.ranks.link import LoanAsked
from kvrs.engine.ranks.nodes import RanksOnNodes
from kvrs.engine.ranks.remote import RemoteStage
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.protocol.stages import StageLent
from kvrs.scheduling.pages import PageManager

log = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")

_AGAIN_S = 0.05  # Until pages that were being sent or filled are looked at again.


class StageLoans(StepHook):
    """Belongs to the event loop of the instance. As a hook it comes before the ranks."""

    def __init__(self, ranks: RanksOnNodes, elastic: ElasticSettings, pages: PageManager) -> None:
        self._ranks, self._elastic, self._pages = ranks, elastic, pages
        self._core: EngineCore | None = None
        self._is_draining: Callable[[], bool] = lambda: False
        self._on_change: Callable[[], object] = lambda: None
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
        return len(self._unused) + sum(len(pages) for _, pages in self._lent.values())

    def start(
        self,
        core: EngineCore,
        is_draining: Callable[[], bool],
        on_change: Callable[[], object],
    ) -> None:
        """Lend, borrow and wait from now on; `on_change`: called when what is lent has changed."""
        self._core, self._is_draining, self._on_change = core, is_draining, on_change
        for stage in self._ranks.remote:
            stage.on_cells = in_loop(partial(self._lose, stage))
            stage.on_asked = in_loop(partial(self._asked, stage))
            stage.on_over = in_loop(partial(self._over, stage))
            stage.on_home = in_loop(self._use_all)

    # A stage of ours is lost, or another instance's.

    def _lose(self, stage: RemoteStage, loss: int) -> None:
        assert self._core is not None, "it has started"
        self._core.lose_cells(dict.fromkeys({0, *self._pages.bases}, stage.cells))
        stage.noted(loss)

    def on_restart(self) -> None:
        """While no stream has a page: give up those without memory."""
        loans, total = self._ranks.loans, self._pages.pages
        if not loans:
            self._use_all()
            return
        most = min(len(loan.pages) for loan in loans.values())
        if (missing := total - most - len(self._unused)) > 0:
            if (found := self._pages.allocate(missing)) is None:
                # Some are being sent or filled still.
                for stage in self._ranks.remote:
                    if (loan := stage.loan) is not None and loan.table is None:
                        loop = asyncio.get_running_loop()
                        loop.call_later(_AGAIN_S, self._lose, stage, stage.losses)
                return
            self._unused += found
        kept = sorted({*range(total)} - {*self._unused})
        for loan in loans.values():
            if loan.table is None:
                loan.take(kept)

    def _use_all(self) -> None:
        if not self._ranks.loans and self._unused:
            self._pages.release(self._unused)
            self._unused = []
            if self._core is not None:
                self._core.wake()

    # Another instance would use a stage of ours.

    def _asked(self, stage: RemoteStage, asked: LoanAsked) -> None:
        number, wanted = stage.stages.start, asked.wanted
        answer = terms(self._lender(stage), wanted.pages, wanted.least_pages, wanted.busy)
        if isinstance(answer, str):
            log.info("a loan is refused", extra={"to": asked.borrower, "cause": answer})
            stage.answer(asked.loan, answer)
            return
        pages = self._pages.allocate(answer)
        assert pages is not None, "they are spare"
        self._lent[number, asked.loan] = asked.borrower, pages
        self._changed()
        told = asyncio.wrap_future(stage.answer(asked.loan, pages))
        told.add_done_callback(partial(self._answered, stage, asked.loan))

    def _answered(self, stage: RemoteStage, loan: int, told: "asyncio.Future[None]") -> None:
        if not told.cancelled() and isinstance(told.exception(), TransferError):
            self._over(stage, loan)

    def _lender(self, stage: RemoteStage) -> Lender:
        refusal = None
        if self._is_draining():
            refusal = "it is draining"
        elif self._ranks.now.reforming is not None or self._ranks.loans:
            refusal = "it lacks a stage itself"
        return Lender(
            pages=self._pages.pages,
            spare_pages=self._pages.free_pages - self._pages.leased_pages,
            lent_pages=self.held_pages,
            busy=stage.busy(time.monotonic()),
            lend_pages=self._elastic.lend_pages,
            least_gain=self._elastic.least_gain,
            refusal=refusal,
        )

    def _over(self, stage: RemoteStage, loan: int | None) -> None:
        """That loan is over; None: all of the stage are, with its host or the session there."""
        number = stage.stages.start
        over = [key for key in self._lent if key[0] == number and loan in (None, key[1])]
        for key in over:
            self._pages.release(self._lent.pop(key)[1])
        if over:
            self._changed()

    def _changed(self) -> None:
        self.changes += 1
        if self._core is not None:
            self._core.wake()
        self._on_change()


def in_loop(call: Callable[Arguments, object]) -> Callable[Arguments, None]:
    """The same call, from any thread, carried out later in the running loop."""
    loop = asyncio.get_running_loop()

    def tell(*args: Arguments.args, **options: Arguments.kwargs) -> None:
        loop.call_soon_threadsafe(partial(call, *args, **options))

    return tell
