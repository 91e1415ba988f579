"""Records of the current state of ranks, of a running re-forming, and of a finished one."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.plans import MovePlan
from kvrs_engine.elastic.reforming import CarryOut
from kvrs_engine.elastic.ways import Way


@dataclass(frozen=True, slots=True)
class ReformingNow:
    """The current re-forming."""

    number: int
    way: Way
    ready_at_s: float  # Predicted end.
    after: Layout
    lost: tuple[int, ...]
    move_bytes: int
    lost_cells: int  # The largest number of lost cells of a page.


@dataclass(frozen=True, slots=True)
class RanksNow:
    """The current state of the ranks of some stages, within the layout of all stages."""

    layout: Layout
    pids: dict[int, int]  # Process ids of the ranks that are not lost.
    deaths: int  # Number of deaths of computing ranks since the start.
    number: int  # Number of the last re-forming.
    reforming: ReformingNow | None  # None: all ranks of the layout compute.

    def later(self, by_s: float) -> "RanksNow":
        """Return the state with times shifted by `by_s`, to convert between the clocks of two
        processes: in a message, times are relative to its sending.
        """
        now = self.reforming
        if now is None:
            return self
        return replace(self, reforming=replace(now, ready_at_s=now.ready_at_s + by_s))


@dataclass(frozen=True, slots=True)
class Reformed:
    """The course of a finished re-forming, and its prediction."""

    number: int
    way: Way
    began_s: float
    predicted_s: float
    paused: bool  # The ranks computed no batch meanwhile.
    degree: int
    host_bytes: int  # Planned bytes, as `peer_bytes`.
    peer_bytes: int
    # RaidServe's plan for the same ranks, which was not carried out; None: its planner made this.
    on_demand: MovePlan | None
    moved: Mapping[str, int]  # `RankProcesses.moved` for this plan.
    phases_s: Mapping[str, float]  # Durations of its phases, in order.


@dataclass(slots=True)
class ReformingBegun:
    """The measurements of a running re-forming."""

    began_s: float
    action: CarryOut
    is_first: bool  # A batch was computed since the previous re-forming.
    on_demand: MovePlan | None = None  # The later `Reformed.on_demand`.
    start_s: float = 0.0  # Start time of the slowest awaited process.
    # Ends of the phases by name: `plan`, `move`, `join`, `probe`.
    ends_s: dict[str, float] = field(default_factory=dict)

    def loaded(self, rank: int, took_s: float) -> None:
        """Note the start of a rank's process, which may have begun before the loss."""
        if rank in self.action.fresh:
            self.start_s = max(self.start_s, min(took_s, time.monotonic() - self.began_s))

    def note(self, part: str) -> None:
        self.ends_s[part] = time.monotonic()

    @property
    def phases_s(self) -> dict[str, float]:
        moments_s = [self.began_s, *self.ends_s.values()]
        return {
            part: end_s - start_s
            for part, (start_s, end_s) in zip(self.ends_s, pairwise(moments_s), strict=True)
        }
