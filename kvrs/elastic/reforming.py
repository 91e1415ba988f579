"""The state machine of an instance whose ranks change, which its head drives.

    SERVING --loss--> (freeze, choose a way) --> MOVING --all is there--> JOINING --probe--> SERVING
    SERVING --a rank leaves or is offered--> MOVING, while the others serve --> JOINING --> SERVING

A further loss at any point starts again with what has arrived, in a new epoch; reports of an older
epoch still count as bytes that are there, and as nothing else. Where no way is left the instance is
GIVEN_UP and its streams leave.

Pure: no clock and no I/O. The seconds of a way are predicted from bytes and rates.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import assert_never

from kvrs.elastic import on_demand
from kvrs.elastic.layouts import Layout
from kvrs.elastic.moving import LinkRates, schedule
from kvrs.elastic.plans import MovePlan, plan
from kvrs.elastic.units import Unit, Units


class ReformingPhase(StrEnum):
    SERVING = "serving"
    MOVING = "moving"
    JOINING = "joining"
    GIVEN_UP = "given_up"


class Way(StrEnum):
    RESTART = "restart"  # The lost processes again, whose memory outlived them.
    RESHARD = "reshard"  # The survivors, with what was lost from the host.
    REPLACE = "replace"  # The lost ranks again, with empty memory.
    RESIZE = "resize"  # A rank leaves on purpose, or joins: nothing is lost.


@dataclass(frozen=True, slots=True)
class StreamAtRisk:
    """A stream's predicted seconds to its next token, beside those of the way itself."""

    restore_s: float  # Of its lost cells, where they are lost.
    leave_s: float = inf  # At another instance.


# What happened.


@dataclass(frozen=True, slots=True)
class RanksLost:
    """Each end of a process is reported once."""

    ranks: frozenset[int]
    memory_kept: bool = False  # Of all of them.
    streams: tuple[StreamAtRisk, ...] = ()


@dataclass(frozen=True, slots=True)
class RankLeaving:
    """It will end, but serves and can be read until it is released."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankOffered:
    """A new rank, ready to join that stage."""

    rank: int
    stage: int


@dataclass(frozen=True, slots=True)
class UnitArrived:
    epoch: int
    rank: int
    unit: Unit


@dataclass(frozen=True, slots=True)
class RankJoined:
    epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class ProbeEnded:
    """A step with known results was computed by all ranks."""

    epoch: int
    equal: bool


@dataclass(frozen=True, slots=True)
class RoomMissing:
    """There is no memory for what was to be moved, and nothing was; or none for the formation."""

    epoch: int
    reason: str


Event = RanksLost | RankLeaving | RankOffered | UnitArrived | RankJoined | ProbeEnded | RoomMissing


# What to do.


@dataclass(frozen=True, slots=True)
class Freeze:
    """Compute nothing more in lower epochs; the batch under way is abandoned."""

    epoch: int


@dataclass(frozen=True, slots=True)
class CarryOut:
    """Start the ranks `fresh`, then make these moves; the instance is predicted to serve again
    after `ready_s`.
    """

    epoch: int
    way: Way
    fresh: frozenset[int]
    plan: MovePlan
    ready_s: float


@dataclass(frozen=True, slots=True)
class FormRanks:
    epoch: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class ProbeStep:
    epoch: int


@dataclass(frozen=True, slots=True)
class Serve:
    epoch: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class EndInstance:
    reason: str


Action = Freeze | CarryOut | FormRanks | ProbeStep | Serve | EndInstance


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


@dataclass(slots=True)
class Reforming:
    units: Units
    layout: Layout  # That serves, or did last.
    room: Room
    costs: Costs
    min_ranks: int = 1
    spread: bool = True  # Whether heads that are left over are spread, where there is room for it.
    in_pieces: bool = True  # Whether ranks read pieces of a unit and exchange them; else units.
    epoch: int = 1
    phase: ReformingPhase = ReformingPhase.SERVING
    _dead: set[int] = field(default_factory=set)  # Memory of the layout that is gone.
    _absent: set[int] = field(default_factory=set)  # Processes that are gone, with memory or not.
    _starting: set[int] = field(default_factory=set)  # Started again, and not heard of yet.
    _arrived: dict[int, set[Unit]] = field(default_factory=dict)
    _started: dict[int, int] = field(default_factory=dict)  # Epoch from which a rank's word counts.
    _doing: PossibleWay | None = None
    _awaited: dict[int, set[Unit]] = field(default_factory=dict)
    _unjoined: set[int] = field(default_factory=set)
    _streams: tuple[StreamAtRisk, ...] = ()

    def handle(self, event: Event) -> list[Action]:
        """Apply one event; return the actions that it calls for, in order."""
        if self.phase is ReformingPhase.GIVEN_UP:
            return []
        match event:
            case RanksLost():
                return self._lost(event)
            case RankLeaving():
                if self.why_it_stays(event.rank) is not None:
                    return []
                return self._resize(on_demand.survivors(self.layout, [event.rank]))
            case RankOffered():
                return self._resize(
                    [
                        [*stage.ranks, event.rank] if at == event.stage else list(stage.ranks)
                        for at, stage in enumerate(self.layout.stages)
                    ],
                    frozenset({event.rank}),
                )
            case UnitArrived():
                return self._arrived_at(event)
            case RankJoined():
                if event.epoch != self.epoch or self.phase is not ReformingPhase.JOINING:
                    return []
                self._starting.discard(event.rank)
                self._unjoined.discard(event.rank)
                return [] if self._unjoined else [ProbeStep(self.epoch)]
            case ProbeEnded():
                return self._probed(event)
            case RoomMissing():
                return self._room_missing(event)
            case _:
                assert_never(event)

    def why_it_stays(self, rank: int) -> str | None:
        """Why a rank cannot leave on purpose now; None: it can."""
        ranks = self.layout.ranks
        if rank not in ranks:
            return f"rank: got {rank}; allowed: {', '.join(map(str, ranks))}"
        if self.phase is not ReformingPhase.SERVING:
            return f"the ranks are {self.phase}; allowed: while they are {ReformingPhase.SERVING}"
        after = self._possible(on_demand.survivors(self.layout, [rank]))
        return after if isinstance(after, str) else None

    @property
    def awaited(self) -> frozenset[int]:
        """Ranks that must report before it goes on; none that waits for another of them first."""
        if self.phase is ReformingPhase.JOINING:
            return frozenset(self._unjoined)
        if self.phase is not ReformingPhase.MOVING:
            return frozenset()
        assert self._doing is not None
        return frozenset(
            move.target
            for move in self._doing.plan.moves
            if move.unit in self._awaited[move.target]
            and move.unit not in self._awaited.get(move.source, ())
        )

    def choices(self) -> list[PossibleWay]:
        """The ways that are possible now, the cheapest first."""
        found = [*self._again(), *self._survivors()]
        return sorted(found, key=lambda choice: choice.cost_s)

    def _lost(self, event: RanksLost) -> list[Action]:
        # One that was to join has no part in the layout, and may have units that others read.
        known = {*self.layout.ranks, *self._arrived}
        if self._doing is not None:
            known |= {*self._doing.plan.after.ranks}
            self._absent -= self._doing.fresh
        lost = event.ranks & (known - self._absent)
        if not event.memory_kept:  # The memory of one that is not running may go too.
            lost |= event.ranks & self._absent - self._dead
        if not lost:
            return []
        self._absent |= lost
        self._starting -= lost
        if not event.memory_kept:
            self._dead |= lost
        for rank in self._absent:
            self._arrived.pop(rank, None)
        self._streams = event.streams or self._streams
        self.epoch += 1
        choices = self.choices()
        if not choices:
            after = self._possible(on_demand.survivors(self.layout, sorted(self._absent)))
            assert isinstance(after, str), "the survivors are no way"
            return self._give_up(after)
        return [Freeze(self.epoch), *self._begin(choices[0])]

    def _resize(self, groups: list[list[int]], fresh: frozenset[int] = frozenset()) -> list[Action]:
        """Ranks change while the others serve; only from the calm."""
        if self.phase is not ReformingPhase.SERVING or fresh & set(self.layout.ranks):
            return []
        after = self._possible(groups)
        if isinstance(after, str):
            return []
        self.epoch += 1
        return self._begin(self._choice(Way.RESIZE, after, fresh))

    def _begin(self, choice: PossibleWay) -> list[Action]:
        self.phase, self._doing = ReformingPhase.MOVING, choice
        # Those that are gone count again from the epoch in which they are started.
        self._started |= dict.fromkeys(self._absent, self.epoch + 1)
        self._started |= dict.fromkeys(choice.fresh, self.epoch)
        if choice.way is not Way.RESIZE:
            self._starting |= choice.fresh
        self._awaited = {}
        for move in choice.plan.moves:
            self._awaited.setdefault(move.target, set()).add(move.unit)
        began = CarryOut(self.epoch, choice.way, choice.fresh, choice.plan, choice.ready_s)
        return [began, *self._go_on()]

    def _arrived_at(self, event: UnitArrived) -> list[Action]:
        if event.epoch < self._started.get(event.rank, 0):
            return []  # Of an earlier process, whose memory is not that of this one.
        self._starting.discard(event.rank)
        self._arrived.setdefault(event.rank, set()).add(event.unit)
        if event.epoch != self.epoch or self.phase is not ReformingPhase.MOVING:
            return []
        self._awaited.get(event.rank, set()).discard(event.unit)
        return self._go_on()

    def _go_on(self) -> list[Action]:
        if any(self._awaited.values()):
            return []
        assert self._doing is not None
        after = self._doing.plan.after
        self.phase, self._unjoined = ReformingPhase.JOINING, set(after.ranks)
        return [Freeze(self.epoch), FormRanks(self.epoch, after)]

    def _probed(self, event: ProbeEnded) -> list[Action]:
        if event.epoch != self.epoch or self.phase is not ReformingPhase.JOINING or self._unjoined:
            return []
        if not event.equal:
            return self._give_up("the probe step has other bits than it must have")
        assert self._doing is not None
        self.layout, self.phase = self._doing.plan.after, ReformingPhase.SERVING
        self._doing, self._streams = None, ()
        self._dead, self._absent, self._starting, self._arrived = set(), set(), set(), {}
        return [Serve(self.epoch, self.layout)]

    def _room_missing(self, event: RoomMissing) -> list[Action]:
        if event.epoch != self.epoch or self.phase is ReformingPhase.SERVING:
            return []
        assert self._doing is not None
        if self._doing.way is not Way.RESIZE or self._doing.plan.after is self.layout:
            return self._give_up(event.reason)
        # Nothing is lost: the ranks serve as before.
        if self.phase is ReformingPhase.JOINING:
            self.epoch += 1
            return self._begin(self._choice(Way.RESIZE, self.layout, frozenset()))
        self.phase, self._doing, self._awaited = ReformingPhase.SERVING, None, {}
        return []

    def _give_up(self, reason: str) -> list[Action]:
        self.phase = ReformingPhase.GIVEN_UP
        return [EndInstance(reason)]

    # Ways.

    def _again(self) -> Iterable[PossibleWay]:
        """The same layout, with new processes for the lost ranks."""
        fresh = frozenset(self._absent & set(self.layout.ranks))
        if not self._dead & set(self.layout.ranks):
            yield self._choice(Way.RESTART, self.layout, fresh)
        elif self.costs.replace_s < inf:
            yield self._choice(Way.REPLACE, self.layout, fresh)

    def _survivors(self) -> Iterable[PossibleWay]:
        without = [self._absent]
        if self._starting:
            without.append(self._absent | self._starting)
        for gone in without:
            after = self._possible(on_demand.survivors(self.layout, sorted(gone)))
            if isinstance(after, Layout):
                yield self._choice(Way.RESHARD, after, frozenset())

    def _choice(self, way: Way, after: Layout, fresh: frozenset[int]) -> PossibleWay:
        start_s = 0.0
        if way is Way.REPLACE:
            start_s = self.costs.replace_s
        elif way is not Way.RESIZE and (fresh | self._starting).intersection(after.ranks):
            start_s = self.costs.restart_s
        # Without them as processes ranks that are gone may not be read, whatever their memory has.
        is_read = way is Way.RESTART or self.costs.kept_is_readable
        gone = self._dead if is_read else self._dead | self._absent
        moves = plan(
            self.layout,
            after,
            self.units,
            gone,
            arrived=self._arrived,
            in_pieces=self.in_pieces,
        )
        ready_s = start_s + schedule(moves, self.costs.rates).makespan_s + self.costs.join_s
        behind_s = self._behind_s(after)
        restores = way in (Way.RESHARD, Way.REPLACE)
        cost_s = sum(
            min(stream.leave_s, ready_s + restores * stream.restore_s + behind_s)
            for stream in self._streams
        )
        # Without streams the way that is there first.
        return PossibleWay(way, fresh, moves, ready_s, cost_s if self._streams else ready_s)

    def _behind_s(self, after: Layout) -> float:
        """Seconds of the look-ahead's tokens in a layout, which is left as soon as the ranks are
        back.
        """
        costs, step_s = self.costs, self.costs.step_s(after)
        behind_s, whole_s = costs.lookahead_tokens * step_s, costs.step_s(self.layout)
        if behind_s <= costs.back_s or step_s <= whole_s:
            return behind_s
        return costs.back_s + (costs.lookahead_tokens - costs.back_s / step_s) * whole_s

    def _possible(self, groups: Sequence[Sequence[int]]) -> Layout | str:
        """The layout of these ranks, given for each stage, or why they cannot serve."""
        for stage, group in zip(self.layout.stages, groups, strict=True):
            if not group:
                return f"no rank is left for layers [{stage.first}, {stage.last})"
        if (left := sum(map(len, groups))) < self.min_ranks:
            return f"{left} ranks are left, elastic.min_ranks is {self.min_ranks}"
        missing = 0
        for spread in (True, False) if self.spread else (False,):
            after = on_demand.reshaped(self.layout, self.units, groups, spread=spread)
            if not (missing := self.room.missing_bytes(after, self.units)):
                return after
        return f"{left} ranks are left, and the fullest lacks {missing} bytes of memory"
