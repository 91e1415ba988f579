"""The state machine of an instance whose ranks change. The instance's head drives it.

    SERVING --loss--> (freeze, choose a way) --> MOVING --all arrived--> JOINING --probe--> SERVING
    SERVING --a rank leaves or is offered--> MOVING, while the ranks serve --> JOINING --probe-->
            SERVING
    SERVING --the load of experts has shifted--> MOVING, while the ranks serve --> JOINING -->
            SERVING

A further loss begins a new epoch, in which the units that have arrived are kept; a report of an
older epoch only adds to these units. If no way is possible the instance is GIVEN_UP and its streams
leave.

Pure: no clock and no I/O. The times of a way are predicted from bytes and rates.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import assert_never

from kvrs.config.cluster import Planner
from kvrs_engine.elastic import on_demand, ways
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.plans import MovePlan
from kvrs_engine.elastic.units import Unit, Units
from kvrs_engine.elastic.waiting import AGAIN_S, RankWaits
from kvrs_engine.elastic.ways import Costs, PossibleWay, Room, Situation, StreamAtRisk, Way


class ReformingPhase(StrEnum):
    SERVING = "serving"
    MOVING = "moving"
    JOINING = "joining"
    GIVEN_UP = "given_up"


# Events.


@dataclass(frozen=True, slots=True)
class RanksLost:
    """The processes of these ranks have ended. Each end is reported once."""

    ranks: frozenset[int]
    memory_kept: bool = False  # The memory of all these ranks has survived.
    streams: tuple[StreamAtRisk, ...] = ()


@dataclass(frozen=True, slots=True)
class RankLeaving:
    """The rank is to end; until its release, the rank serves and its memory can be read."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankOffered:
    """A new rank is ready to join the stage."""

    rank: int
    stage: int


@dataclass(frozen=True, slots=True)
class LoadShifted:
    """`rebalance` has found a better set of expert copies."""

    layout: Layout  # With the same ranks and owners.


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
    """All ranks have computed a step with known results; `equal`: the results were right."""

    epoch: int
    equal: bool


@dataclass(frozen=True, slots=True)
class RoomMissing:
    """A rank has no memory for the moves, of which none was made, or for the formation."""

    epoch: int
    reason: str


Event = (
    RanksLost
    | RankLeaving
    | RankOffered
    | LoadShifted
    | UnitArrived
    | RankJoined
    | ProbeEnded
    | RoomMissing
)


# Actions.


@dataclass(frozen=True, slots=True)
class Freeze:
    """Stop computing in lower epochs; the running batch is abandoned."""

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


@dataclass(slots=True)
class Reforming:
    units: Units
    layout: Layout  # The layout that serves, or served last.
    room: Room
    costs: Costs
    min_ranks: int = 1
    planner: Planner = "on_demand"
    spread: bool = True  # Spread the remaining KV heads if there is room.
    in_pieces: bool = True  # Ranks read pieces of a unit and exchange them; else whole units.
    # The stages of this instance, if other instances have the other stages; None: all stages.
    stages: range | None = None
    epoch: int = 1
    phase: ReformingPhase = ReformingPhase.SERVING
    waiting: RankWaits = field(init=False)
    _dead: set[int] = field(default_factory=set)  # Ranks whose memory is lost.
    _absent: set[int] = field(default_factory=set)  # Ranks without a process.
    _starting: set[int] = field(default_factory=set)  # Restarted ranks that have not reported yet.
    _arrived: dict[int, set[Unit]] = field(default_factory=dict)
    _started: dict[int, int] = field(default_factory=dict)  # First valid epoch of a rank's reports.
    _doing: PossibleWay | None = None
    _awaited: dict[int, set[Unit]] = field(default_factory=dict)
    _unjoined: set[int] = field(default_factory=set)
    _streams: tuple[StreamAtRisk, ...] = ()

    def __post_init__(self) -> None:
        self.waiting = RankWaits(self.costs.back_s)

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
            case LoadShifted():
                return self._shift(event.layout)
            case UnitArrived():
                return self._arrived_at(event)
            case RankJoined():
                if event.epoch != self.epoch or self.phase is not ReformingPhase.JOINING:
                    return []
                self._starting.discard(event.rank)
                self._unjoined.discard(event.rank)
                return [] if self._unjoined else self._joined()
            case ProbeEnded():
                return self._probed(event)
            case RoomMissing():
                return self._room_missing(event)
            case _:
                assert_never(event)

    def why_it_stays(self, rank: int) -> str | None:
        """Return the reason why a rank cannot leave on purpose now; None: the rank can leave."""
        ranks = self.ranks_of(self.layout)
        if rank not in ranks:
            return f"rank: got {rank}; allowed: {', '.join(map(str, ranks))}"
        if self.phase is not ReformingPhase.SERVING:
            return (
                f"the ranks are {self.phase}; allowed: while the ranks are {ReformingPhase.SERVING}"
            )
        after = self._situation.without({rank})
        return after if isinstance(after, str) else None

    def ranks_of(self, layout: Layout) -> list[int]:
        """Return the ranks of the instance's own stages."""
        stages = self.stages or range(len(layout.stages))
        return [rank for stage in stages for rank in layout.stages[stage].ranks]

    @property
    def awaited(self) -> frozenset[int]:
        """Ranks whose reports are due now, without those that wait for another of these ranks."""
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

    def note_start(self, took_s: float, ahead_s: float = 0.0) -> None:
        """Predict the time of later starts by this one. `ahead_s` is the part for units that the
        rank may need after losses; a rank for which others wait skips that part.
        """
        alone_s = took_s - ahead_s
        self.costs = replace(
            self.costs, restart_s=alone_s, replace_s=alone_s, back_s=AGAIN_S + took_s
        )

    def note_join(self, took_s: float) -> None:
        """Include the time of this formation, without moves, in the prediction of the next one."""
        self.costs = replace(self.costs, join_s=(self.costs.join_s + max(0.0, took_s)) / 2)

    def choices(self) -> list[PossibleWay]:
        """Return the possible ways, the cheapest first."""
        return ways.choices(self._situation)

    def on_demand_for(self, chosen: Layout) -> MovePlan | None:
        """Return the plan that `Situation.on_demand_for` has beside the current one."""
        return self._situation.on_demand_for(chosen)

    @property
    def _situation(self) -> Situation:
        return Situation(
            units=self.units,
            layout=self.layout,
            room=self.room,
            costs=self.costs,
            min_ranks=self.min_ranks,
            planner=self.planner,
            spread=self.spread,
            in_pieces=self.in_pieces,
            dead=self._dead,
            absent=self._absent,
            starting=self._starting,
            arrived=self._arrived,
            streams=self._streams,
        )

    def _lost(self, event: RanksLost) -> list[Action]:
        # A rank that was to join is outside the layout and may have units that others read.
        known = {*self.layout.ranks, *self._arrived}
        if self._doing is not None:
            known |= {*self._doing.plan.after.ranks}
            self._absent -= self._doing.fresh
        lost = event.ranks & (known - self._absent)
        if not event.memory_kept:  # An ended process may lose its memory later.
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
            after = self._situation.without(self._absent)
            assert isinstance(after, str), "the survivors can serve"
            return self._give_up(after)
        return [Freeze(self.epoch), *self._begin(choices[0])]

    def _resize(self, groups: list[list[int]], fresh: frozenset[int] = frozenset()) -> list[Action]:
        """Change the ranks while the others serve; ignored unless the phase is SERVING."""
        if self.phase is not ReformingPhase.SERVING or fresh & set(self.layout.ranks):
            return []
        return self._change_to(ways.resized(self._situation, groups, fresh))

    def _shift(self, after: Layout) -> list[Action]:
        """Move copies while the ranks serve; ignored unless the phase is SERVING and the stages are
        those of the current layout.
        """
        if self.phase is not ReformingPhase.SERVING or after.stages != self.layout.stages:
            return []
        return self._change_to(ways.shifted(self._situation, after))

    def _change_to(self, choice: PossibleWay | None) -> list[Action]:
        if choice is None:
            return []
        self.epoch += 1
        return self._begin(choice)

    def _begin(self, choice: PossibleWay) -> list[Action]:
        self.phase, self._doing = ReformingPhase.MOVING, choice
        # Reports of an absent rank count from the epoch in which it is restarted.
        self._started |= dict.fromkeys(self._absent, self.epoch + 1)
        self._started |= dict.fromkeys(choice.fresh, self.epoch)
        if choice.way.pauses:
            self._starting |= choice.fresh
        self._awaited = {}
        for move in choice.plan.moves:
            self._awaited.setdefault(move.target, set()).add(move.unit)
        began = CarryOut(self.epoch, choice.way, choice.fresh, choice.plan, choice.ready_s)
        return [began, *self._go_on()]

    def _arrived_at(self, event: UnitArrived) -> list[Action]:
        if event.epoch < self._started.get(event.rank, 0):
            return []  # A report of an earlier process, whose memory is lost.
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
        self.phase, self._unjoined = ReformingPhase.JOINING, set(self.ranks_of(after))
        return [Freeze(self.epoch), FormRanks(self.epoch, after)]

    def _joined(self) -> list[Action]:
        # A shift of copies needs no probe, which would take as long as a batch: the copies were
        # compared by hash when they arrived.
        doing = self._doing
        assert doing is not None
        is_shift = not doing.way.pauses and doing.plan.after.stages == self.layout.stages
        return self._serve() if is_shift else [ProbeStep(self.epoch)]

    def _probed(self, event: ProbeEnded) -> list[Action]:
        if event.epoch != self.epoch or self.phase is not ReformingPhase.JOINING or self._unjoined:
            return []
        if not event.equal:
            return self._give_up("the probe step gave wrong bits")
        return self._serve()

    def _serve(self) -> list[Action]:
        assert self._doing is not None
        self.layout, self.phase = self._doing.plan.after, ReformingPhase.SERVING
        self._doing, self._streams = None, ()
        self._dead, self._absent, self._starting, self._arrived = set(), set(), set(), {}
        return [Serve(self.epoch, self.layout)]

    def _room_missing(self, event: RoomMissing) -> list[Action]:
        if event.epoch != self.epoch or self.phase is ReformingPhase.SERVING:
            return []
        assert self._doing is not None
        if self._doing.way.pauses or self._doing.plan.after is self.layout:
            return self._give_up(event.reason)
        # No unit is lost: the ranks go on with the current layout.
        if self.phase is ReformingPhase.JOINING:
            self.epoch += 1
            return self._begin(ways.stay(self._situation))
        self.phase, self._doing, self._awaited = ReformingPhase.SERVING, None, {}
        return []

    def _give_up(self, reason: str) -> list[Action]:
        self.phase = ReformingPhase.GIVEN_UP
        return [EndInstance(reason)]
