"""The return of a simulated instance's lost stages, once their own hosts have loaded."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

from kvrs_engine.elastic.lending import FEW_PAGES, MOST_ROUNDS
from kvrs_lab.sim.calls import RankedEngine
from kvrs_lab.sim.hosts import SimHost, SimLoan, StageUser
from kvrs_lab.sim.lost_cells import LostCells
from kvrs_lab.sim.passage import Passage
from kvrs_lab.sim.site import Site


class AwayUser(StageUser):
    """An instance with stages that are not at home."""

    @abstractmethod
    def came_home(self, stage: int) -> None:
        """Handle that the own host has the stage."""

    @abstractmethod
    def find(self, stage: int) -> None:
        """Find another host, since the own host is lost again."""


class StageReturns:
    """Returns of stages. Written pages are copied while the lender computes; batches stop for the
    last copy.
    """

    def __init__(
        self,
        user: AwayUser,
        engine: RankedEngine,
        site: Site,
        hosts: Sequence[SimHost],
        passage: Passage,
        cells: LostCells,
    ) -> None:
        self._user, self._engine, self._site, self._hosts = user, engine, site, hosts
        self._passage, self._cells = passage, cells
        self._under_way: dict[int, SimLoan | None] = {}

    def go(self, stage: int) -> None:
        """Begin the return of a stage to its own host, which is there."""
        host, loan = self._hosts[stage], self._passage.loans.get(stage)
        if not host.is_there or self._passage.at[stage] is host or stage in self._under_way:
            return
        if host.own is not self._user:
            host.begin(self._user)
        self._under_way[stage] = loan
        if loan is not None:
            self._copy(stage, loan, 0)
            return
        come_home = partial(self._come_home, stage, loan)
        self._engine.later(self._site.pipeline_model.session_s, come_home)

    def lose(self, stage: int) -> None:
        """Stop the return, since the stage has no host or its loan is over."""
        self._under_way.pop(stage, None)

    def end_loan_beside(self, host: SimHost) -> bool:
        """End a loan that was being copied to a lost own host, whose successor has no copies.
        Return whether such a loan existed.
        """
        loan = self._under_way.get(host.stage) if host is self._hosts[host.stage] else None
        if loan is not None:
            loan.host.end_loan()
        return loan is not None

    def _copy(self, stage: int, loan: SimLoan, rounds: int) -> None:
        if self._under_way.get(stage) is not loan:
            return  # The stage was lost meanwhile.
        if rounds < MOST_ROUNDS and len(loan.touched) > FEW_PAGES:
            again = partial(self._copy, stage, loan, rounds + 1)
            self._engine.later(self._copy_s(loan), again)
            return
        self._passage.close(stage, partial(self._hand_over, stage, loan))

    def _hand_over(self, stage: int, loan: SimLoan) -> None:
        self._engine.later(self._copy_s(loan), partial(self._come_home, stage, loan))

    def _copy_s(self, loan: SimLoan) -> float:
        part_bytes = self._site.geometry.page_bytes / len(self._hosts)
        return len(loan.copy()) * part_bytes / self._site.links.bytes_per_s

    def _come_home(self, stage: int, loan: SimLoan | None) -> None:
        host = self._hosts[stage]
        if stage not in self._under_way or self._under_way[stage] is not loan:
            return  # The stage was lost meanwhile.
        if host.own is not self._user:  # The own host is lost again.
            if loan is None:
                del self._under_way[stage]
                self._user.find(stage)
            return
        del self._under_way[stage]
        self._passage.at[stage] = host
        if loan is not None:
            # Later writes have waited, and go to the own host.
            loan.copy()
            self._cells.lose_left(loan.copied, frozenset({(stage, 0)}))
            del self._passage.loans[stage]
            loan.host.end_loan()
        self._user.came_home(stage)
        self._passage.open(stage)
