"""Hosts of stages of simulated instances, with the sessions of their owner and of a borrower."""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from kvrs.ids import InstanceId, NodeId
from kvrs_lab.sim.calls import Batch
from kvrs_lab.sim.process import Clock, Step


class StageUser:
    """The process of an instance, which has sessions with hosts."""

    id: InstanceId

    @abstractmethod
    def host_lost(self, host: "SimHost") -> None:
        """The host is gone, or has ended the session."""

    @abstractmethod
    def host_there(self, stage: int) -> None:
        """The own host of this stage has loaded it."""

    @abstractmethod
    def loan_over(self, loan: "SimLoan") -> None:
        """The lender may use the pages itself again."""


@dataclass(slots=True, eq=False)
class SimLoan:
    """Pages of a stage that another instance lends."""

    host: "SimHost"
    lender: StageUser
    borrower: StageUser
    pages: list[int]  # By the lender's numbers.
    withdrawn: frozenset[int] = field(init=False)  # The same.
    # By the borrower's numbers; None: it is not known yet which of its pages stay in use.
    table: dict[int, int] | None = None
    # The borrower's that were written since they were copied last, and those that were not.
    touched: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.withdrawn = frozenset(self.pages)

    def take(self, kept: Iterable[int]) -> None:
        """These of the borrower's pages stay in use."""
        self.table = dict(zip(kept, self.pages, strict=False))

    def has(self, user: InstanceId, batch: Batch) -> bool:
        """All pages of the batch are those of that session."""
        if user == self.borrower.id:
            table = self.table
            return table is not None and all(table.keys() >= {*chunk.pages} for _, chunk in batch)
        return all(self.withdrawn.isdisjoint(chunk.pages) for _, chunk in batch)

    def write(self, pages: Iterable[int]) -> None:
        """These of the borrower's pages have other cells than before."""
        self.touched.update(pages)
        self.copied.difference_update(pages)

    def copy(self) -> set[int]:
        """Begin to copy what was written."""
        pages, self.touched = self.touched, set()
        self.copied |= pages
        return pages


class SimHost:
    """The process that has a stage, which outlives those of instances. Batches of its two sessions
    are computed as they come, of each one at a time: in turns, where both have some.
    """

    def __init__(
        self, owner: InstanceId, stage: int, node: NodeId, clock: Clock, load_s: float
    ) -> None:
        self.owner, self.stage, self.node = owner, stage, node
        self.load_s = load_s
        self.is_there = True
        self.own: StageUser | None = None  # The owner's process, while it has a session.
        self.loan: SimLoan | None = None
        self._clock = clock
        self._life = 0
        self._clear()  # Sets the rest.

    def _clear(self) -> None:
        self.worked_s = 0.0
        self._batches: dict[InstanceId, deque[tuple[float, Step]]] = {}
        self._turns: deque[InstanceId] = deque()
        self._computes = False

    # Sessions.

    def begin(self, user: StageUser) -> None:
        """Every session of the owner begins without a loan."""
        self.end_loan()
        self.own = user

    def end(self, user: StageUser) -> None:
        """The process has ended, and with it its session, if it has one."""
        if self.own is user:
            self.own = None
            self._leave_out(user.id)
        if self.loan is not None and self.loan.borrower is user:
            self.end_loan()

    def end_loan(self) -> None:
        if (loan := self.loan) is not None:
            self.loan = None
            self._leave_out(loan.borrower.id)
            loan.lender.loan_over(loan)
            loan.borrower.host_lost(self)

    # Its life.

    def kill(self) -> None:
        if not self.is_there:
            return
        self.is_there, self._life = False, self._life + 1
        own, self.own = self.own, None
        self.end_loan()
        self._clear()
        if own is not None:
            own.host_lost(self)
        self._clock.after(self.load_s, partial(self._load, self._life, own))

    def _load(self, life: int, own: StageUser | None) -> None:
        if life == self._life:
            self.is_there = True
            # The process that waits for it, or the next one.
            waiting = self.own or own
            if waiting is not None:
                waiting.host_there(self.stage)

    # Batches.

    def compute(self, user: InstanceId, seconds: float, done: Step) -> None:
        if not self.is_there:
            return  # The connection is reset.
        batches = self._batches.setdefault(user, deque())
        batches.append((seconds, done))
        if len(batches) == 1:
            self._turns.append(user)
        self._next()

    def _leave_out(self, user: InstanceId) -> None:
        """The session has ended; at most its first batch is computed still."""
        if batches := self._batches.get(user):
            self._batches[user] = deque([batches[0]])

    def _next(self) -> None:
        if self._turns and not self._computes:
            user = self._turns.popleft()
            seconds, _ = self._batches[user][0]
            self._computes = True
            self._clock.after(seconds, partial(self._end, self._life, user))

    def _end(self, life: int, user: InstanceId) -> None:
        if life != self._life:
            return
        seconds, done = self._batches[user].popleft()
        self._computes = False
        self.worked_s += seconds
        if self._batches[user]:
            self._turns.append(user)
        self._next()
        done()
