"""Records of ranks as they are, of a re-forming that is under way, and of one that has ended."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.reforming import CarryOut
from kvrs_engine.elastic.ways import Way


@dataclass(frozen=True, slots=True)
class ReformingNow:
    """The re-forming under way."""

    number: int
    way: Way
    ready_at_s: float  # Predicted.
    after: Layout
    lost: tuple[int, ...]
    move_bytes: int
    lost_cells: int  # Of a page, at most.


@dataclass(frozen=True, slots=True)
class RanksNow:
    """The ranks of some stages as they are, within the layout of all."""

    layout: Layout
    pids: dict[int, int]  # Of those that are not lost.
    deaths: int  # Of ranks that computed, since the start.
    number: int  # Of the last re-forming; rises.
    reforming: ReformingNow | None  # None: all ranks of the layout compute.

    def later(self, by_s: float) -> "RanksNow":
        """By a clock that shows so much more: on its way between processes, times count from the
        moment at which it is sent.
        """
        now = self.reforming
        if now is None:
            return self
        return replace(self, reforming=replace(now, ready_at_s=now.ready_at_s + by_s))


@dataclass(frozen=True, slots=True)
class Reformed:
    """The course of a re-forming, beside its prediction."""

    number: int
    way: Way
    began_s: float
    predicted_s: float
    paused: bool  # Whether nothing was computed meanwhile.
    degree: int
    host_bytes: int  # Of the plan, as `peer_bytes`.
    peer_bytes: int
    moved: Mapping[str, int]  # As `RankProcesses.moved`, of this plan.
    phases_s: Mapping[str, float]  # Seconds of its parts, one after the other.


@dataclass(slots=True)
class ReformingBegun:
    """A re-forming as it goes on."""

    began_s: float
    action: CarryOut
    is_first: bool  # Of those that have followed each other without a batch between them.
    start_s: float = 0.0  # Of the slowest process that it has waited for.
    # When the parts of it ended, by name: `plan`, `move`, `join`, `probe`.
    ends_s: dict[str, float] = field(default_factory=dict)

    def loaded(self, rank: int, took_s: float) -> None:
        """A process of that rank has started, perhaps before the loss."""
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
