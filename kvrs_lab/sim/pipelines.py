"""A simulated instance with a host for each stage, which the instances of a group lend each other.

Each stage has a batch. A lost stage is borrowed, or waited for, until its own host is there:

    at home --the host is lost--> away --a donor lends--> borrowed --copied--> at home
    away --the own host has loaded--> at home
    borrowed --the donor's host, or the donor's session with it, is lost--> away

The terms of a loan and the pages are real objects; a host's work is only a delay.
"""

from collections.abc import Sequence
from functools import partial

from kvrs.ids import InstanceId
from kvrs.protocol.instance import ReformingReport
from kvrs.protocol.pages import Cell
from kvrs_engine.elastic.ways import Way
from kvrs_lab.sim.calls import Batch, RankedEngine
from kvrs_lab.sim.hosts import SimHost, SimLoan, StageUser
from kvrs_lab.sim.lent_stages import LentStages
from kvrs_lab.sim.lost_cells import LostCells
from kvrs_lab.sim.passage import Passage
from kvrs_lab.sim.process import Step, require
from kvrs_lab.sim.returning import AwayUser, StageReturns
from kvrs_lab.sim.site import LATENCY_S, Site

_SETTLED_S = 0.05  # Retry interval while pages are being sent.


class SimPipeline(AwayUser):
    def __init__(self, engine: RankedEngine, site: Site, hosts: Sequence[SimHost]) -> None:
        self.id = engine.id
        self.count = self.degree = self.page_cells = len(hosts)
        self._engine, self._site, self._hosts = engine, site, list(hosts)
        self._model = site.pipeline_model
        self._cells = LostCells(engine, site)
        self._passage = Passage(engine, len(hosts), self._model.computing_share)
        self._at, self._loans = self._passage.at, self._passage.loans
        self.lent = LentStages(engine, site, self._passage)
        self._returns = StageReturns(self, engine, site, self._hosts, self._passage, self._cells)
        self._moves = 0  # Moves of stages to another host and home.
        self._losses = 0
        self._away: dict[int, tuple[float, Way]] = {}  # Time of return and way.
        self._unused: list[int] = []  # Pages for which a borrowed stage has no memory.
        self._is_settled = True  # The unused pages have been found.
        self._is_over = False

    # Sessions.

    def begin(self) -> None:
        """Begin a session with each host; wait for hosts that do not serve yet."""
        for stage, host in enumerate(self._hosts):
            host.begin(self)
            if host.is_there:
                self._at[stage] = host
            else:
                self._announce(stage, Way.WAIT, host.load_s)

    def close(self) -> None:
        """End all sessions, since the process has ended."""
        self._is_over = True
        for hosts in self._site.hosts.values():
            for host in hosts:
                host.end(self)

    # Calls of the instance.

    @property
    def serves(self) -> bool:
        return all(self._at) and self._is_settled

    @property
    def layout_number(self) -> int:
        """A number that changes with the step times."""
        return self._moves + self.lent.changes

    def host_of(self, stage: int) -> SimHost:
        """The host that has the stage, or the own host if none has it."""
        return self._at[stage] or self._hosts[stage]

    def gone(self, page: int) -> frozenset[Cell]:
        return self._cells.gone(page)

    def filled(self, page: int) -> None:
        self._cells.filled(page)
        for loan in self._loans.values():
            loan.write([page])

    def load(self) -> ReformingReport | None:
        """Report a loss until all stages serve again."""
        if self.serves:
            return None
        cells = self._cells
        ready_s, way = max(self._away.values(), default=(0.0, Way.SUBSTITUTE))
        return ReformingReport(
            self._losses,
            way.value,
            max(0.0, ready_s - self._site.clock.now_s),
            self.count,
            sorted(self._away),
            self._site.rank_model.units.total_bytes // self.count * len(self._away),
            cells.missing,
            cells.page_s,
            1.0,
            1.0,
            held_pages=cells.held,
            held_page_s=cells.held_page_s,
        )

    # Batches.

    def compute(self, batch: Batch, seconds: float, done: Step) -> None:
        self._passage.go(batch, seconds, done)

    # Loss of a stage.

    def host_lost(self, host: SimHost) -> None:
        if not self._is_over:
            self._engine.later(LATENCY_S, partial(self._lost, host))

    def _lost(self, host: SimHost) -> None:
        stage = host.stage
        if self._returns.end_loan_beside(host) or self._at[stage] is not host:
            return
        if not self._site.config.elastic.enabled:
            assert self._engine.given_up is not None
            self._engine.given_up()
            return
        self._passage.lose(stage)
        self._returns.lose(stage)
        self._lose_cells(stage)
        way, in_s = Way.WAIT, self._hosts[stage].load_s
        if self._donors and self._model.session_s < in_s:
            way, in_s = Way.SUBSTITUTE, self._model.session_s
        self._losses += 1
        self._announce(stage, way, in_s)
        self.find(stage)

    def _lose_cells(self, stage: int) -> None:
        self._cells.lose(lambda page: frozenset({(stage, 0)}))
        self._cells.note_missing(len({*self._away, stage}) / self.count)
        self._cells.restart()

    def _announce(self, stage: int, way: Way, in_s: float) -> None:
        self._away[stage] = self._site.clock.now_s + in_s, way
        self._engine.places.pause(self._site.clock.now_s)
        self._engine.report()

    @property
    def _donors(self) -> list[InstanceId]:
        return [each.id for _, each in self._site.config.cluster.donors(self.id)]

    def find(self, stage: int) -> None:
        """Ask the donors in their order, unless the own host is there."""
        if self._at[stage] is not None:
            return
        if self._hosts[stage].is_there:
            self.host_there(stage)
            return
        for donor in self._donors if self._model.session_s < self._hosts[stage].load_s else ():
            loan = self.ask(self._site.hosts[donor][stage])
            if isinstance(loan, SimLoan):
                borrow = partial(self._borrow, stage, loan)
                self._engine.later(self._model.session_s, borrow)
                return
        if self._away[stage][1] is not Way.WAIT:
            self._announce(stage, Way.WAIT, self._hosts[stage].load_s)
        self._engine.later(self._model.ask_again_s, partial(self.find, stage))

    def ask(self, host: SimHost) -> SimLoan | str:
        """Ask the host's owner for a loan; return the loan, or the reason of a refusal."""
        lender = host.own
        if not host.is_there or not isinstance(lender, SimPipeline):
            return "it does not answer"
        if host.loan is not None:
            return "another instance has a loan"
        return lender.lend(host, self, self._passage.busy(host.stage))

    def _borrow(self, stage: int, loan: SimLoan) -> None:
        if loan.host.loan is not loan or self._hosts[stage].is_there:
            if loan.host.loan is loan:
                loan.host.end_loan()
            self.find(stage)
            return
        self._loans[stage] = loan
        self._at[stage] = loan.host
        self._moved(stage)
        # Pages without memory must be given up before pages are used.
        self._is_settled = False
        self._lose_cells(stage)
        self._settle()

    def _moved(self, stage: int) -> None:
        self._away.pop(stage, None)
        self._moves += 1

    def _settle(self) -> None:
        """Give up pages without memory; continue if all stages are there."""
        pages = self._engine.pages
        if not self._loans:
            unused, self._unused = self._unused, []
            pages.release(unused)
        else:
            most = min(len(loan.pages) for loan in self._loans.values())
            missing = max(0, pages.pages - most - len(self._unused))
            if (found := pages.allocate(missing)) is None:
                self._engine.later(_SETTLED_S, self._settle)  # Some pages are being sent.
                return
            self._unused += found
            kept = sorted({*range(pages.pages)} - {*self._unused})
            for loan in self._loans.values():
                if loan.table is None:
                    loan.take(kept)
        self._is_settled = True
        if self.serves:
            self._cells.missing, self._cells.held = {}, {}
            self._engine.places.go_on(self._site.clock.now_s)
        self._engine.look()
        self._engine.report()

    # Return of the own host.

    def host_there(self, stage: int) -> None:
        if not self._is_over:
            self._engine.later(LATENCY_S, partial(self._returns.go, stage))

    def came_home(self, stage: int) -> None:
        self._moved(stage)
        self._settle()

    # Loans to others.

    def lend(self, host: SimHost, borrower: StageUser, busy: float) -> SimLoan | str:
        return self.lent.lend(host, self, borrower, busy, len(self._unused))

    def loan_over(self, loan: SimLoan) -> None:
        if not self._is_over:
            self.lent.over(loan)

    def check_at_rest(self) -> None:
        """Check that every stage is at home, and all pages are returned."""
        require(
            self._at == self._hosts
            and not self._loans
            and not self.lent.loans
            and not self._unused,
            f"{self.id} borrows {[*self._loans]}, lends {self.lent.loans}, lacks {self._unused}",
        )
