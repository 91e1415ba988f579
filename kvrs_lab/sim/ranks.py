"""The ranks of a simulated instance: layouts, plans and states of `kvrs_engine.elastic` in virtual
time, and lost cells.

The simulated parts are each rank's units (`kvrs_lab/sim/rank_model.py`) and their arrival times.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import assert_never

import msgspec

from kvrs.config.policy import LOOKAHEAD_TOKENS
from kvrs.protocol.instance import ReformingReport
from kvrs.protocol.pages import Cell
from kvrs_engine.elastic.experts import rebalance
from kvrs_engine.elastic.layouts import Layout, hybrid, staged, validate
from kvrs_engine.elastic.moving import schedule
from kvrs_engine.elastic.reforming import (
    Action,
    CarryOut,
    EndInstance,
    Event,
    FormRanks,
    Freeze,
    LoadShifted,
    ProbeEnded,
    ProbeStep,
    RankJoined,
    RankLeaving,
    RankOffered,
    RanksLost,
    Reforming,
    ReformingPhase,
    Serve,
    UnitArrived,
)
from kvrs_engine.elastic.speed import shares
from kvrs_engine.elastic.units import Unit
from kvrs_engine.elastic.ways import Costs, Room, StreamAtRisk, Way
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_lab.sim.calls import Batch, RankedEngine
from kvrs_lab.sim.lost_cells import LostCells
from kvrs_lab.sim.process import Step, require
from kvrs_lab.sim.site import Site

_PAGES = 1  # Pages that need room beside the weights; cells take no simulated memory.


class SimRanks:
    def __init__(self, engine: RankedEngine, site: Site, count: int) -> None:
        self.count = count
        self.number = 0
        self.report: ReformingReport | None = None
        self.late_factor = 1.0  # Factor of predicted durations.
        self._engine = engine
        self._site = site
        self._model = model = site.rank_model
        self._ready_s = 0.0
        layout = hybrid(model.units, staged(model.units.layers, [range(count)]), split=model.split)
        # The pace assumes that all experts are chosen equally often.
        self._shares = partial(shares, units=model.units, tiles=model.tiles)
        self._full = shares(layout, model.units)
        # The factors belong to `_paced`.
        self._paced, self._factors = layout, self._shares(layout).factors(self._full)
        whole = model.units.total_bytes
        self._machine = Reforming(
            model.units,
            layout,
            Room(capacity_bytes=whole * 3 // 4, cell_bytes=0, pages=_PAGES),
            Costs(
                rates=model.rates,
                join_s=model.join_s,
                restart_s=model.restart_s,
                back_s=model.grows_after_s + model.join_s,
                lookahead_tokens=LOOKAHEAD_TOKENS,
                step_s=self._step_s,
            ),
            planner=site.config.elastic.planner,
        )
        self._layout = layout  # Layout of the present cells.
        self._cells = LostCells(engine, site)
        self._start_s = 0.0  # Delay until the ranks of this plan run.
        self._lost: list[int] = []
        self._left: set[int] = set()  # Ranks that left on purpose, or are about to leave.

    def begin(self) -> None:
        """Schedule the first balancing."""
        self._balance_later(self._layout)

    # Calls of the instance.

    @property
    def serves(self) -> bool:
        """Return whether the instance serves, also while units move to or from a rank."""
        phase = self._machine.phase
        moves = phase is ReformingPhase.MOVING and self.report is None
        return moves or phase is ReformingPhase.SERVING

    @property
    def degree(self) -> int:
        return len(self._machine.layout.ranks)

    @property
    def layout(self) -> Layout:
        """The layout that serves, or served last."""
        return self._machine.layout

    @property
    def page_cells(self) -> int:
        return sum(map(len, self._layout.attention))

    @property
    def layout_number(self) -> int:
        return self._machine.layout.number

    def load(self) -> ReformingReport | None:
        """Return the current report."""
        if self.report is None:
            return None
        ready_in_s = max(0.0, self._ready_s - self._site.clock.now_s)
        return msgspec.structs.replace(self.report, ready_in_s=ready_in_s)

    @property
    def factors(self) -> tuple[float, float]:
        """Step times of decoding and of prefill, divided by those of all ranks."""
        if self._paced is not self._machine.layout:
            self._paced = self._machine.layout
            self._factors = self._shares(self._paced).factors(self._full)
        return self._factors

    def compute(self, batch: Batch, seconds: float, done: Step) -> None:
        decodes = all(len(chunk.token_ids) - chunk.drafts == 1 for _, chunk in batch)
        decode, prefill = self.factors
        self._engine.later(seconds * (decode if decodes else prefill), done)

    def filled(self, page: int) -> None:
        """Note that all cells of the page have been written."""
        self._cells.filled(page)

    def gone(self, page: int) -> frozenset[Cell]:
        return self._cells.gone(page)

    # Events of the instance.

    def lose(self, ranks: Iterable[int], memory_kept: bool) -> None:
        lost = frozenset(ranks)
        if not memory_kept:
            self._cells.lose(lambda page: self._cells_of(page, lost))
        share = len(self._cells_of(0, lost)) / self.page_cells
        restore_s = self._cells.note_missing(share, memory_kept=memory_kept)
        at_risk = tuple(map(StreamAtRisk, restore_s.values()))
        self._lost = sorted(lost)
        self._handle(RanksLost(lost, memory_kept, at_risk))

    def order(self, rank: int, *, leaves: bool) -> bool:
        """Let a rank leave on purpose, or join again; return whether the order is carried out."""
        if not leaves:
            self._left.discard(rank)
            self._later(self._model.grows_after_s, RankOffered(rank, 0))
            return True
        if self._machine.why_it_stays(rank) is not None:
            return False
        self._left.add(rank)
        self._handle(RankLeaving(rank))
        return True

    def _cells_of(self, page: int, ranks: frozenset[int]) -> frozenset[Cell]:
        """The cells of a page on these ranks."""
        layout = self._layout
        own = ranks.intersection(layout.ranks)
        return frozenset(cell for rank in own for cell in layout.cells(rank, page))

    def _step_s(self, layout: Layout) -> float:
        """Seconds of a decoding step, as an engine predicts them for its layouts."""
        step_s = self._site.pace.pace.batch_s([Chunk([0], 0, [0], logits=1)])
        decode_factor, _ = self._shares(layout).factors(self._full)
        return step_s * decode_factor

    def _handle(self, event: Event) -> None:
        for action in self._machine.handle(event):
            self._do(action)

    def _do(self, action: Action) -> None:
        late = self.late_factor
        match action:
            case Freeze():
                self._cells.restart()
            case CarryOut():
                self._carry_out(action)
            case FormRanks():
                self._engine.places.pause(self._site.clock.now_s)  # The instance may have served.
                for rank in action.layout.ranks:
                    joined = RankJoined(action.epoch, rank)
                    self._later((self._start_s + self._model.join_s) * late, joined)
                self._start_s = 0.0
            case ProbeStep():
                self._later(0.0, ProbeEnded(action.epoch, equal=True))
            case Serve():
                self._serve(action.layout)
            case EndInstance():
                if self._engine.given_up is not None:
                    self._engine.given_up()
            case _:
                assert_never(action)

    def _carry_out(self, action: CarryOut) -> None:
        self._start_s = 0.0
        if not action.way.pauses:
            require(
                action.plan.host_bytes == 0,
                f"{self._engine.id} reads what ranks have that leave or stay",
            )
        else:
            self._announce(action)
        if action.way is Way.RESTART:
            self._start_s = self._model.restart_s
        ends_s: dict[tuple[int, Unit], float] = {}
        for timed in schedule(action.plan, self._model.rates).timed:
            key = timed.move.target, timed.move.unit
            ends_s[key] = max(ends_s.get(key, 0.0), timed.end_s)
        for (rank, unit), end_s in ends_s.items():
            arrived = UnitArrived(action.epoch, rank, unit)
            self._later((self._start_s + end_s) * self.late_factor, arrived)
        if ends_s:
            self._start_s = 0.0

    def _announce(self, action: CarryOut) -> None:
        self.number += 1
        self._engine.places.pause(self._site.clock.now_s)
        self._ready_s = self._site.clock.now_s + action.ready_s
        self.report = ReformingReport(
            self.number,
            action.way.value,
            action.ready_s,
            len(action.plan.after.ranks),
            self._lost,
            action.plan.moved_bytes,
            self._cells.missing,
            self._cells.page_s,
            *self._shares(action.plan.after).factors(self._full),
            held_pages=self._cells.held,
            held_page_s=self._cells.held_page_s,
        )
        self._engine.report()

    def _serve(self, layout: Layout) -> None:
        stage = layout.stages[0]
        self._layout, self.report = layout, None
        self._cells.missing, self._cells.held = {}, {}
        self.late_factor = 1.0
        self._engine.places.go_on(self._site.clock.now_s)
        self._engine.look()
        self._engine.report()
        for rank in sorted(self._left.intersection(stage.ranks)):
            self._handle(RankLeaving(rank))  # A loss came before the order to leave.
        if absent := set(range(self.count)).difference(stage.ranks, self._left):
            self._later(self._model.grows_after_s, RankOffered(min(absent), 0))
        self._balance_later(layout)

    def _balance_later(self, layout: Layout) -> None:
        model = self._model
        if model.balances_after_s is not None:
            self._engine.later(model.balances_after_s, lambda: self._balance(layout))

    def _balance(self, served: Layout) -> None:
        """Give experts the copies that pay, unless the layout has changed."""
        model, layout = self._model, self._machine.layout
        if layout is not served:
            return
        bare = replace(layout, copies=())
        room = {
            rank: int(model.copy_room * bare.weight_bytes(rank, model.units))
            for rank in layout.ranks
        }
        found = rebalance(layout, model.units, model.tiles, room).layout
        if found is not layout:
            # Check that every row of an expert has a present holder.
            validate(found, model.units)
            self._handle(LoadShifted(found))

    def _later(self, delay_s: float, event: Event) -> None:
        self._engine.later(delay_s, lambda: self._handle(event))
