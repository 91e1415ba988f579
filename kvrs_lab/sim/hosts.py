"""Hosts of stages of simulated instances, with the sessions of the owner and of a borrower."""

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
        """Handle the loss of a host or of the session with it."""

    @abstractmethod
    def host_there(self, stage: int) -> None:
        """Handle that the own host of this stage has loaded the stage."""

    @abstractmethod
    def loan_over(self, loan: "SimLoan") -> None:
        """Take back the pages of a loan."""


@dataclass(slots=True, eq=False)
class SimLoan:
    """Pages of a stage that an instance lends to another instance."""

    host: "SimHost"
    lender: StageUser
    borrower: StageUser
    pages: list[int]  # Page numbers of the lender.
    withdrawn: frozenset[int] = field(init=False)  # The lender's pages as a set.
    # The lender's page by the borrower's page; None: not known yet.
    table: dict[int, int] | None = None
    # Pages of the borrower that were written since their last copy, and copied pages.
    touched: set[int] = field(default_factory=set)
    copied: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.withdrawn = frozenset(self.pages)

    def take(self, kept: Iterable[int]) -> None:
        """Map the borrower's pages that stay in use to the lent pages."""
        self.table = dict(zip(kept, self.pages, strict=False))

    def has(self, user: InstanceId, batch: Batch) -> bool:
        """Return whether the user's session may use all pages of the batch."""
        if user == self.borrower.id:
            table = self.table
            return table is not None and all(table.keys() >= {*chunk.pages} for _, chunk in batch)
        return all(self.withdrawn.isdisjoint(chunk.pages) for _, chunk in batch)

    def write(self, pages: Iterable[int]) -> None:
        """Note pages of the borrower that have been written."""
        self.touched.update(pages)
        self.copied.difference_update(pages)

    def copy(self) -> set[int]:
        """Begin to copy the written pages."""
        pages, self.touched = self.touched, set()
        self.copied |= pages
        return pages


class SimHost:
    """The process that has a stage, which outlives the instances' processes. Its two sessions take
    turns, and each computes one batch at a time.
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
        self._clear()  # Sets the other attributes.

    def _clear(self) -> None:
        self.worked_s = 0.0
        self._batches: dict[InstanceId, deque[tuple[float, Step]]] = {}
        self._turns: deque[InstanceId] = deque()
        self._computes = False

    # Sessions.

    def begin(self, user: StageUser) -> None:
        """Begin a session of the owner, without a loan."""
        self.end_loan()
        self.own = user

    def end(self, user: StageUser) -> None:
        """End the session of a process that has ended."""
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

    # Life of the host.

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
            # The waiting process, or its successor.
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
        """Drop the batches of a session that has ended, except the first one."""
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
