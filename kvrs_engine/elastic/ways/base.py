"""The ways in which an instance can re-form, and what they are chosen by."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from kvrs.sums import sum_in_order
from kvrs_engine.elastic import on_demand
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.moving import LinkRates, schedule
from kvrs_engine.elastic.plans import MovePlan, plan
from kvrs_engine.elastic.units import Unit, Units


class Way(StrEnum):
    RESTART = "restart"
    RESHARD = "reshard"
    REPLACE = "replace"
    RESIZE = "resize"
    WAIT = "wait"  # For the host of a stage that is lost with all its ranks.
    SUBSTITUTE = "substitute"  # The host of another pipeline's stage takes over a lost stage.

    @property
    def pauses(self) -> bool:
        """The ranks compute nothing meanwhile, since something of theirs is lost."""
        return self is not Way.RESIZE


@dataclass(frozen=True, slots=True)
class StreamAtRisk:
    """A stream's predicted seconds to its next token, beside those of the way itself."""

    restore_s: float  # Of its lost cells, where they are lost.
    leave_s: float = inf  # At another instance.


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory of each rank, and what it must hold beside weights."""

    capacity_bytes: int
    cell_bytes: int
    pages: int  # That must find room at least.
    buffer_bytes: int = 0

    def missing_bytes(self, layout: Layout, units: Units) -> int:
        """Bytes that the fullest rank lacks; 0: the layout fits."""
        return max(0, *(self._needed(layout, units, rank) for rank in layout.ranks))

    def _needed(self, layout: Layout, units: Units, rank: int) -> int:
        kv = self.pages * layout.cells_per_page(rank) * self.cell_bytes
        return layout.weight_bytes(rank, units) + kv + self.buffer_bytes - self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Predicted seconds of the parts of each way."""

    rates: LinkRates
    join_s: float  # New formation and probe.
    restart_s: float  # A process, until it has attached to its memory.
    replace_s: float = inf  # A rank with empty memory on a device; inf: there is none.
    # Until a lost rank that is started beside the others has joined; inf: it does not come back.
    back_s: float = inf
    # Other ranks can have the memory of a process that is gone.
    kept_is_readable: bool = False
    lookahead_tokens: int = 0  # For which the steps of a layout count.
    step_s: Callable[[Layout], float] = lambda _: 0.0  # Of a layout.


@dataclass(frozen=True, slots=True)
class PossibleWay:
    """One way, and how it compares."""

    way: Way
    fresh: frozenset[int]
    plan: MovePlan
    ready_s: float
    cost_s: float  # Of all streams together, to the next token and with the look-ahead.


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The state of an instance by which ways are found and weighed."""

    units: Units
    layout: Layout  # That serves, or did last.
    room: Room
    costs: Costs
    min_ranks: int
    spread: bool
    in_pieces: bool
    dead: AbstractSet[int]  # Memory of the layout that is gone.
    absent: AbstractSet[int]  # Processes that are gone, with memory or not.
    starting: AbstractSet[int]  # Started again, and not heard of yet.
    arrived: Mapping[int, set[Unit]]  # Units that ranks have beside those of the layout.
    streams: tuple[StreamAtRisk, ...]

    def reshaped(self, groups: Sequence[Sequence[int]]) -> Layout | str:
        """The layout of these ranks, given for each stage, or why they cannot serve."""
        for stage, group in zip(self.layout.stages, groups, strict=True):
            if not group:
                return f"no rank is left for layers [{stage.first}, {stage.last})"
        if (left := sum(map(len, groups))) < self.min_ranks:
            return f"{left} ranks are left, elastic.min_ranks is {self.min_ranks}"
        missing = 0
        for copies in (True, False) if self.layout.copies else (False,):
            for spread in (True, False) if self.spread else (False,):
                after = on_demand.reshaped(
                    self.layout, self.units, groups, spread=spread, copies=copies
                )
                if not (missing := self.room.missing_bytes(after, self.units)):
                    return after
        return f"{left} ranks are left, and the fullest lacks {missing} bytes of memory"

    def without(self, gone: AbstractSet[int]) -> Layout | str:
        """The layout of the other ranks, or why they cannot serve."""
        return self.reshaped(on_demand.survivors(self.layout, sorted(gone)))

    def start_s(self, after: Layout, fresh: AbstractSet[int] = frozenset()) -> float:
        """Seconds until all processes of a layout run, of which `fresh` are started now."""
        return self.costs.restart_s if (fresh | self.starting) & {*after.ranks} else 0.0

    def weighed(
        self,
        way: Way,
        after: Layout,
        fresh: frozenset[int],
        start_s: float,
        *,
        reads_gone: bool = False,
        restores: bool = False,
    ) -> PossibleWay:
        """`start_s`: until the ranks can move units; `reads_gone`: the memory of a process that is
        gone can be read by the next one; `restores`: streams lose their cells of lost ranks.
        """
        # Without them as processes ranks that are gone may not be read, whatever their memory has.
        is_read = reads_gone or self.costs.kept_is_readable
        gone = self.dead if is_read else self.dead | self.absent
        moves = plan(
            self.layout,
            after,
            self.units,
            gone,
            arrived=self.arrived,
            in_pieces=self.in_pieces,
        )
        ready_s = start_s + schedule(moves, self.costs.rates).makespan_s + self.costs.join_s
        behind_s = self._behind_s(after)
        cost_s = sum_in_order(
            min(stream.leave_s, ready_s + restores * stream.restore_s + behind_s)
            for stream in self.streams
        )
        # Without streams the way that is there first.
        return PossibleWay(way, fresh, moves, ready_s, cost_s if self.streams else ready_s)

    def _behind_s(self, after: Layout) -> float:
        """Seconds of the look-ahead's tokens in a layout, which is left as soon as the ranks are
        back.
        """
        costs, step_s = self.costs, self.costs.step_s(after)
        behind_s, whole_s = costs.lookahead_tokens * step_s, costs.step_s(self.layout)
        if behind_s <= costs.back_s or step_s <= whole_s:
            return behind_s
        return costs.back_s + (costs.lookahead_tokens - costs.back_s / step_s) * whole_s
