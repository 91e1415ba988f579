"""Loans of a simulated instance's stages, by the terms of `kvrs_engine.elastic.lending`."""

from functools import partial

from kvrs_engine.elastic.lending import Lender, terms
from kvrs_engine.scheduling.sequences import pages_for
from kvrs_lab.sim.calls import RankedEngine
from kvrs_lab.sim.hosts import SimHost, SimLoan, StageUser
from kvrs_lab.sim.passage import Passage
from kvrs_lab.sim.site import LATENCY_S, Site


class LentStages:
    def __init__(self, engine: RankedEngine, site: Site, passage: Passage) -> None:
        self.loans: list[SimLoan] = []
        self.changes = 0  # Step times change with each loan.
        self._engine, self._site, self._passage = engine, site, passage

    def lend(
        self, host: SimHost, owner: StageUser, borrower: StageUser, busy: float, unused_pages: int
    ) -> SimLoan | str:
        """Lend pages; return the loan, or the reason of a refusal. `busy` is the share of time in
        which the borrower's stage computed; `unused_pages` are pages that the lender itself lacks
        memory for. Pages lent at other stages are lent first.
        """
        engine, elastic = self._site.config.cluster.engine, self._site.config.elastic
        own, refusal = self._engine.pages, None
        if not self._engine.is_running:
            refusal = "the instance does not answer"
        elif self._engine.draining:
            refusal = "the instance is draining"
        elif not all(self._passage.at) or self._passage.loans:
            refusal = "the instance lacks a stage itself"
        lent = {page for loan in self.loans for page in loan.pages}
        here = {page for loan in self.loans if loan.host.stage == host.stage for page in loan.pages}
        again = sorted(lent - here)
        lender = Lender(
            pages=own.pages,
            spare_pages=own.free_pages - own.leased_pages + len(again),
            lent_pages=unused_pages + len(here),
            busy=self._passage.busy(host.stage),
            least_gain=elastic.least_gain,
            refusal=refusal,
        )
        longest = pages_for(engine.max_model_len, own.page_size_tokens)
        answer = terms(lender, engine.pages, min(engine.pages, longest), busy)
        if isinstance(answer, str):
            return answer
        pages = again[:answer]
        for page in pages:
            own.pin(page)
        fresh = own.allocate(answer - len(pages))
        assert fresh is not None, "they are spare"
        pages += fresh
        host.loan = loan = SimLoan(host, owner, borrower, pages)
        self.loans.append(loan)
        self._changed()
        return loan

    def over(self, loan: SimLoan) -> None:
        self._engine.later(LATENCY_S, partial(self._take_back, loan))

    def _take_back(self, loan: SimLoan) -> None:
        if loan in self.loans:
            self.loans.remove(loan)
            self._engine.pages.release(loan.pages)
            self._changed()

    def _changed(self) -> None:
        self.changes += 1
        self._engine.look()
        self._engine.report()
