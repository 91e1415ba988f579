"""The path of a simulated instance's batches through the hosts of its stages, one batch in each."""

from dataclasses import dataclass, field
from functools import partial

from kvrs_engine.elastic.lending import BusyShare
from kvrs_lab.sim.calls import Batch, RankedEngine
from kvrs_lab.sim.hosts import SimHost, SimLoan
from kvrs_lab.sim.process import Step, require


@dataclass(slots=True)
class _Gate:
    """A stage that is closed to batches."""

    emptied: Step | None  # Called once the stage is empty.
    waiting: list[Step] = field(default_factory=list)


class Passage:
    def __init__(self, engine: RankedEngine, stages: int, computing_share: float) -> None:
        self.at: list[SimHost | None] = [None] * stages
        self.loans: dict[int, SimLoan] = {}  # Loan by borrowed stage.
        self._engine, self._share = engine, computing_share
        self._page_size = engine.pages.page_size_tokens
        self._inside: list[list[Batch]] = [[] for _ in self.at]
        self._gates: dict[int, _Gate] = {}
        self._busy = [BusyShare(ranks=1) for _ in self.at]

    def busy(self, stage: int) -> float:
        """The share of the last seconds in which the stage computed."""
        return self._busy[stage].share(self._engine.clock.now_s)

    def go(self, batch: Batch, seconds: float, done: Step) -> None:
        """Compute a batch; each stage takes an equal part of the time."""
        self._pass(0, batch, seconds / len(self.at), done)

    def lose(self, stage: int) -> None:
        """Remove a lost host and its batch; the caller gives up all batches."""
        self.at[stage], self._inside[stage] = None, []
        self._gates.pop(stage, None)
        self.loans.pop(stage, None)

    def close(self, stage: int, emptied: Step) -> None:
        self._gates[stage] = _Gate(emptied)
        self._look(stage)

    def open(self, stage: int) -> None:
        for go_on in self._gates.pop(stage, _Gate(None)).waiting:
            go_on()

    def _look(self, stage: int) -> None:
        gate = self._gates.get(stage)
        if gate is not None and gate.emptied is not None and not self._inside[stage]:
            emptied, gate.emptied = gate.emptied, None
            emptied()

    def _pass(self, stage: int, batch: Batch, seconds: float, done: Step) -> None:
        if not any(batch is each for each in self._engine.flights):
            return  # The batch was given up.
        if stage == len(self.at):
            done()
            return
        if (gate := self._gates.get(stage)) is not None:
            gate.waiting.append(partial(self._pass, stage, batch, seconds, done))
            return
        host = self.at[stage]
        assert host is not None, "batches are given up as a stage is lost"
        require(
            host.loan is None or host.loan.has(self._engine.id, batch),
            f"{self._engine.id} computes in pages of stage {stage} that another one has",
        )
        self._inside[stage].append(batch)
        passed = partial(self._passed, stage, batch, seconds, done)
        sent = partial(self._engine.later, seconds * (1 - self._share), passed)
        host.compute(self._engine.id, seconds * self._share, sent)

    def _passed(self, stage: int, batch: Batch, seconds: float, done: Step) -> None:
        self._inside[stage] = [each for each in self._inside[stage] if each is not batch]
        if (host := self.at[stage]) is not None:
            self._busy[stage].note(self._engine.clock.now_s, host.worked_s)
        if (loan := self.loans.get(stage)) is not None:
            for _, chunk in batch:
                first, end = chunk.first_position, chunk.first_position + len(chunk.token_ids)
                loan.write(chunk.pages[first // self._page_size : -(-end // self._page_size)])
        self._look(stage)
        self._pass(stage + 1, batch, seconds, done)
