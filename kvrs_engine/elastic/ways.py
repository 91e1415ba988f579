"""The ways to re-form an instance, and their predicted costs. A new way is named in `Way`, and
listed in `AFTER_LOSS` if it is possible after a loss.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import Final, Protocol

from kvrs.config.cluster import Planner
from kvrs.sums import sum_in_order
from kvrs_engine.elastic import cmm, on_demand
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.moving import LinkRates, schedule
from kvrs_engine.elastic.plans import MovePlan, plan
from kvrs_engine.elastic.units import Unit, Units


class Reshape(Protocol):
    def __call__(
        self,
        before: Layout,
        units: Units,
        ranks: Sequence[Sequence[int]],
        *,
        spread: bool,
        copies: bool = True,
    ) -> Layout: ...


# The next layout by each planner, for the ranks of each stage.
PLANNERS: Final[Mapping[Planner, Reshape]] = MappingProxyType(
    {"on_demand": on_demand.reshaped, "cmm": cmm.reshaped}
)


class Way(StrEnum):
    RESTART = "restart"
    RESHARD = "reshard"
    REPLACE = "replace"
    RESIZE = "resize"
    WAIT = "wait"  # Wait for a new host of a stage that is lost with all its ranks.
    SUBSTITUTE = "substitute"  # The host of another pipeline's stage takes over a lost stage.

    @property
    def pauses(self) -> bool:
        """True if the ranks cannot compute meanwhile, because units or KV are lost."""
        return self is not Way.RESIZE


@dataclass(frozen=True, slots=True)
class StreamAtRisk:
    """The predicted times of a stream, beside the time of the way itself."""

    restore_s: float  # Time to restore the stream's lost cells.
    leave_s: float = inf  # Time until its next token at another instance.


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory of each rank, and its needs beside the weights."""

    capacity_bytes: int
    cell_bytes: int
    pages: int  # Least number of KV pages.

    def missing_bytes(self, layout: Layout, units: Units) -> int:
        """Return the bytes that the fullest rank lacks; 0: the layout fits."""
        return max(0, *(self._needed(layout, units, rank) for rank in layout.ranks))

    def _needed(self, layout: Layout, units: Units, rank: int) -> int:
        kv = self.pages * layout.cells_per_page(rank) * self.cell_bytes
        return layout.weight_bytes(rank, units) + kv - self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Predicted times of the parts of each way."""

    rates: LinkRates
    join_s: float  # New formation and probe.
    restart_s: float  # Start of a process, until it has attached to its memory.
    replace_s: float = inf  # Start of a rank with empty memory; inf: no device is free.
    # Time until a lost rank has rejoined while the others serve; inf: it does not come back.
    back_s: float = inf
    kept_is_readable: bool = False  # Ranks can read the memory of a process that has ended.
    lookahead_tokens: int = 0  # Number of later tokens whose step times count.
    step_s: Callable[[Layout], float] = lambda _: 0.0  # Step time of a layout.


@dataclass(frozen=True, slots=True)
class PossibleWay:
    """One way with its plan and cost."""

    way: Way
    fresh: frozenset[int]
    plan: MovePlan
    ready_s: float
    cost_s: float  # Sum over all streams of the time to the next token and of the look-ahead.


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The state of an instance from which possible ways are derived."""

    units: Units
    layout: Layout  # The layout that serves, or served last.
    room: Room
    costs: Costs
    min_ranks: int
    planner: Planner
    spread: bool
    in_pieces: bool
    dead: AbstractSet[int]  # Ranks whose memory is lost.
    absent: AbstractSet[int]  # Ranks without a process.
    starting: AbstractSet[int]  # Restarted ranks that have not reported yet.
    arrived: Mapping[int, set[Unit]]  # Units of ranks beyond the layout.
    streams: tuple[StreamAtRisk, ...]

    def reshaped(self, groups: Sequence[Sequence[int]]) -> Layout | str:
        """Return the layout for the ranks of each stage, or the reason why they cannot serve."""
        for stage, group in zip(self.layout.stages, groups, strict=True):
            if not group:
                return f"no rank is left for layers [{stage.first}, {stage.last})"
        if (left := sum(map(len, groups))) < self.min_ranks:
            return f"{left} ranks are left, elastic.min_ranks is {self.min_ranks}"
        missing = 0
        for copies in (True, False) if self.layout.copies else (False,):
            for spread in (True, False) if self.spread else (False,):
                after = PLANNERS[self.planner](
                    self.layout, self.units, groups, spread=spread, copies=copies
                )
                if not (missing := self.room.missing_bytes(after, self.units)):
                    return after
        return f"{left} ranks are left, and the fullest lacks {missing} bytes of memory"

    def without(self, gone: AbstractSet[int]) -> Layout | str:
        """Return the layout without the ranks in `gone`, or the reason why it cannot serve."""
        return self.reshaped(on_demand.survivors(self.layout, sorted(gone)))

    def start_s(self, after: Layout, fresh: AbstractSet[int] = frozenset()) -> float:
        """Return the time until all processes of a layout run; `fresh` are started now."""
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
        """Return a way with its plan and cost.

        `start_s` is the time until the ranks can move units. `reads_gone`: a new process can read
        the memory of the ended one. `restores`: streams lose the cells of lost ranks.
        """
        moves = self.moves_to(after, reads_gone=reads_gone)
        ready_s = start_s + schedule(moves, self.costs.rates).makespan_s + self.costs.join_s
        behind_s = self._behind_s(after)
        cost_s = sum_in_order(
            min(stream.leave_s, ready_s + restores * stream.restore_s + behind_s)
            for stream in self.streams
        )
        # Without streams, the fastest way is the cheapest.
        return PossibleWay(way, fresh, moves, ready_s, cost_s if self.streams else ready_s)

    def moves_to(self, after: Layout, *, reads_gone: bool = False) -> MovePlan:
        """Return the moves to a layout; `reads_gone` is as in `weighed`."""
        # The memory of a rank without a process is readable only if the way or the memory allows
        # it.
        is_read = reads_gone or self.costs.kept_is_readable
        gone = self.dead if is_read else self.dead | self.absent
        return plan(
            self.layout,
            after,
            self.units,
            gone,
            arrived=self.arrived,
            in_pieces=self.in_pieces,
        )

    def on_demand_for(self, chosen: Layout) -> MovePlan | None:
        """Return the plan of the planner `on_demand` for the ranks of a layout; None: that planner
        has made the layout, the ranks are those of now, or they lack memory.
        """
        if self.planner == "on_demand" or chosen.stages == self.layout.stages:
            return None
        groups = [stage.ranks for stage in chosen.stages]
        after = dataclasses.replace(self, planner="on_demand").reshaped(groups)
        return self.moves_to(after) if isinstance(after, Layout) else None

    def _behind_s(self, after: Layout) -> float:
        """Return the time of the look-ahead's tokens in a layout that serves until the lost ranks
        are back.
        """
        costs, step_s = self.costs, self.costs.step_s(after)
        behind_s, whole_s = costs.lookahead_tokens * step_s, costs.step_s(self.layout)
        if behind_s <= costs.back_s or step_s <= whole_s:
            return behind_s
        return costs.back_s + (costs.lookahead_tokens - costs.back_s / step_s) * whole_s


def choices(now: Situation) -> list[PossibleWay]:
    """Return the possible ways after a loss, the cheapest first."""
    found = [choice for possible in AFTER_LOSS for choice in possible(now)]
    return sorted(found, key=lambda choice: choice.cost_s)


def restart(now: Situation) -> Iterator[PossibleWay]:
    """The lost processes are started again, and attach to their memory, which survived."""
    ranks = frozenset(now.layout.ranks)
    if not now.dead & ranks:
        fresh = ranks & now.absent
        start_s = now.start_s(now.layout, fresh)
        yield now.weighed(Way.RESTART, now.layout, fresh, start_s, reads_gone=True)


def replace(now: Situation) -> Iterator[PossibleWay]:
    """The lost ranks are started again with empty memory."""
    ranks = frozenset(now.layout.ranks)
    if now.dead & ranks and now.costs.replace_s < inf:
        fresh, start_s = ranks & now.absent, now.costs.replace_s
        yield now.weighed(Way.REPLACE, now.layout, fresh, start_s, restores=True)


def reshard(now: Situation) -> Iterator[PossibleWay]:
    """The survivors go on, and read the lost units from the host: one way with the ranks that are
    starting, and one without them.
    """
    gone = [now.absent]
    if now.starting:
        gone.append(now.absent | now.starting)
    for each in gone:
        after = now.without(each)
        if isinstance(after, Layout):
            start_s = now.start_s(after)
            yield now.weighed(Way.RESHARD, after, frozenset(), start_s, restores=True)


AFTER_LOSS = (restart, replace, reshard)


# A rank leaves on purpose or joins, or copies of experts move, while the others serve.


def resized(
    now: Situation, groups: Sequence[Sequence[int]], fresh: frozenset[int]
) -> PossibleWay | None:
    """Return the way to the given ranks of each stage, `fresh` being new; None: they cannot
    serve.
    """
    after = now.reshaped(groups)
    return now.weighed(Way.RESIZE, after, fresh, 0.0) if isinstance(after, Layout) else None


def shifted(now: Situation, after: Layout) -> PossibleWay | None:
    """Return the way to other copies of experts on the same ranks; None: no room for them."""
    if now.room.missing_bytes(after, now.units):
        return None
    return now.weighed(Way.RESIZE, after, frozenset(), 0.0)


def stay(now: Situation) -> PossibleWay:
    """Return the way back to the current layout, in a new formation."""
    return now.weighed(Way.RESIZE, now.layout, frozenset(), 0.0)
