"""The processes of an instance's ranks: their start, their weights, and their formations."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue

from kvrs.config.cluster import ElasticSettings, EngineSettings
from kvrs.errors import KvrsError, RanksLostError
from kvrs.transfer.shared_memory import Region
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.plans import HOST, Move
from kvrs_engine.elastic.units import Unit
from kvrs_engine.elastic.waiting import RankWaits
from kvrs_engine.engine.model_config import ModelConfig
from kvrs_engine.engine.models.digests import unit_name
from kvrs_engine.engine.models.reading import reading_of
from kvrs_engine.engine.models.unit_blocks import UnitBlocks
from kvrs_engine.engine.models.weights import Weights
from kvrs_engine.engine.nursery import Nursery
from kvrs_engine.engine.ranks.exchange import Areas
from kvrs_engine.engine.ranks.formation import RankFormation
from kvrs_engine.engine.ranks.seats import (
    Answered,
    Ended,
    RankOrdered,
    RankSeat,
    UnitAt,
    give_back,
)
from kvrs_engine.engine.ranks.wire import (
    Attach,
    Fetched,
    FetchUnits,
    Join,
    Load,
    Loaded,
    Order,
    Settle,
    UnitMove,
    UnitPlace,
)

log = logging.getLogger(__name__)

_MAX_SOURCES = 200  # Limit of source memories per order; other units are read from files.

# The process that forks the ranks of this process, and ends with this process.
RANKS = Nursery(["kvrs_engine.engine.ranks.rank"])

RankMessage = Answered | Ended | RankOrdered


@dataclass(frozen=True, slots=True)
class _Coming:
    """A unit that a rank was ordered to fetch."""

    at: UnitAt
    size_bytes: int
    source: int  # A rank or HOST.
    is_there: bool  # The unit stays in place, in the memory of a lost rank.


class RankProcesses:
    """The processes of an instance's ranks and their memory. Only one thread at a time may use
    it.
    """

    def __init__(
        self,
        directory: Path,
        settings: EngineSettings,
        config: ModelConfig,
        cells: Region,
        elastic: ElasticSettings,
        *,
        yields: bool = False,
    ) -> None:
        """`yields`: the first starts run at a lowered priority."""
        self.seats: dict[int, RankSeat] = {}
        self.told: SimpleQueue[RankMessage | None] = SimpleQueue()
        self.hashes: dict[str, bytes] = {}
        self.arithmetic: bytes | None = None
        # Moved weights by epoch, in bytes: from `host`, from a `peer`, `kept` in the memory of a
        # lost rank, and `read` from files; `damaged` counts units.
        self.moved: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.read_bytes: Counter[int] = Counter()  # Bytes of weights read from files, by rank.
        self._directory, self._settings = directory, settings
        self._config, self._cells, self._elastic = config, cells, elastic
        self._start_yields = yields
        # The ranks that read at the same time share the rate of the disk.
        rate = settings.disk_bytes_per_s
        self._disk_bytes_per_s = reading_of(directory, rate, settings.pace).bytes_per_s
        self._fetch_nice = 0  # Niceness of the newest order.
        self._blocks = UnitBlocks(config, Weights(directory))
        self._coming: dict[tuple[int, int, Unit], _Coming] = {}
        # Ranks that wait to copy a unit from its reader, by epoch, reading rank and unit.
        self._behind: defaultdict[tuple[int, int, Unit], list[int]] = defaultdict(list)
        # Lost rank in whose memory a rank uses a unit, by rank and unit, until the next layout
        # serves.
        self._lent: dict[tuple[int, Unit], int] = {}

    def begun(self) -> None:
        """End the lowered priority of starts, because later starts are awaited."""
        self._start_yields = False

    def start(
        self,
        rank: int,
        layout: Layout,
        stage: int,
        *,
        proves_ahead: bool = True,
        readers: int = 1,
    ) -> RankSeat:
        """Start a process for a rank of the stage. `proves_ahead`: prove forms for layouts after
        losses too, which makes the start longer. `readers` ranks start at the same time.

        Raises:
            KvrsError: the process cannot be started.
        """
        seat = RankSeat(rank, RANKS, self.told.put)
        layers = layout.stages[stage].layers
        order = Load(
            rank=rank,
            model=str(self._directory),
            settings=self._settings.model_dump(mode="json"),
            first=layers.start,
            last=layers.stop,
            is_first=stage == 0,
            is_last=stage == len(layout.stages) - 1,
            layout=layout if proves_ahead else None,
            spreads=self._elastic.spread_heads,
            planner=self._elastic.planner,
            yields=self._start_yields,
            bytes_per_s=self._rate_of(readers),
        )
        _order(seat, order, [seat.lives.descriptor, self._cells.descriptor])
        return seat

    def loaded(self, seat: RankSeat, answer: Loaded) -> None:
        """Note that a rank has loaded; raises KvrsError if its arithmetic or weights differ."""
        if self.arithmetic is None:
            self.arithmetic = answer.arithmetic
        if answer.arithmetic != self.arithmetic:
            raise KvrsError(
                f"rank {seat.rank} computes with other results than the others; allowed: ranks "
                f"of one arithmetic"
            )
        self._note(seat.rank, answer.leaves.items())
        self.read_bytes[seat.rank] += answer.read_bytes
        seat.watch()

    def fetched(self, seat: RankSeat, answer: Fetched) -> bool:
        """Note an arrived unit; return False if its order was dropped.

        Raises:
            KvrsError: the rank has other weights.
        """
        name = unit_name(answer.unit)
        self._note(seat.rank, [(name, answer.hash)])
        coming = self._coming.pop((seat.pid, answer.epoch, answer.unit), None)
        if coming is None:
            return False
        before = seat.units.get(answer.unit)
        seat.units[answer.unit] = coming.at
        if before is not None:  # The unit was ordered twice, and both arrivals are reported.
            self._replaced(seat.rank, answer.unit, before)
        if coming.is_there:
            self._lent[seat.rank, answer.unit] = coming.source
        self._pass_on(seat, answer, coming.at)
        is_read = coming.source == HOST or answer.was_damaged
        how = "host" if is_read else "kept" if coming.is_there else "peer"
        moved = self.moved[answer.epoch]
        moved[how] += coming.size_bytes
        moved["read"] += answer.read_bytes
        self.read_bytes[seat.rank] += answer.read_bytes
        if answer.was_damaged:
            moved["damaged"] += 1
            log.warning("a unit was damaged in a rank's memory", extra={"unit": name})
        return True

    def fetch(self, epoch: int, moves: Collection[Move], *, nice: int = 0) -> None:
        """Order each target to fetch its units, first those that other ranks copy from it. All
        memory is allocated before the first move. `nice` lowers the priority.

        Raises:
            KvrsError: there is not enough memory.
        """
        self._behind.clear()
        self._fetch_nice = nice
        awaited = {(move.source, move.unit) for move in moves}
        ordered = sorted(
            moves, key=lambda move: (move.target, (move.target, move.unit) not in awaited)
        )
        of_targets = {
            target: list(own) for target, own in groupby(ordered, lambda move: move.target)
        }
        readers = len({move.target for move in ordered if move.source == HOST})
        rooms = {}
        left = {rank for rank, seat in self.seats.items() if seat.has_died}
        taken: set[tuple[int, Unit]] = set()  # Units of lost ranks that are used in place.
        try:
            for target, own in of_targets.items():
                there = {
                    move.unit
                    for move in own
                    if move.source in left
                    and move.unit in self.seats[move.source].units
                    and (move.source, move.unit) not in taken
                }
                taken |= {(move.source, move.unit) for move in own if move.unit in there}
                rooms[target] = self._room(epoch, target, own, there, readers)
        except KvrsError:
            self.drop_coming(epoch)
            raise
        for target, (order, descriptors) in rooms.items():
            _order(self.seats[target], order, descriptors)

    def _room(
        self,
        epoch: int,
        target: int,
        moves: list[Move],
        kept: Collection[Unit],
        readers: int,
    ) -> tuple[FetchUnits, list[int]]:
        seat = self.seats[target]
        # Units in the memory of lost ranks stay in place; their descriptors come first.
        there = [move for move in moves if move.unit in kept]
        others = [move for move in moves if move.unit not in kept]
        places, size = self._blocks.places([move.unit for move in others])
        descriptors: list[int] = []
        if others:
            memory = Region.anonymous(f"kvrs-units-{target}", size)
            descriptors = [memory.descriptor]
        else:  # Without new memory, the first descriptor is not used.
            descriptors = [self.seats[there[0].source].units[there[0].unit].memory.descriptor]
        sources: dict[int, int] = {}
        wire = []
        stops = [*places.values(), size][1:]
        shared: dict[int, Region] = {}
        for move in there:
            theirs = self.seats[move.source].units[move.unit]
            key = theirs.memory.descriptor
            if key not in sources:
                assert len(sources) < _MAX_SOURCES, "a rank's units lie in few memories"
                sources[key] = len(descriptors)
                descriptors.append(key)
                shared[key] = theirs.memory.shared()
            at, number = UnitAt(shared[key], theirs.offset, theirs.stop), sources[key]
            wire.append(UnitMove(move.unit, number, at.offset, number, at.offset))
            coming = _Coming(at, move.bytes, move.source, is_there=True)
            self._coming[seat.pid, epoch, move.unit] = coming
        for move, stop in zip(others, stops, strict=True):
            at = UnitAt(memory, places[move.unit], stop)
            is_behind = move.source != HOST and move.unit not in self.seats[move.source].units
            source, source_offset = 0, 0
            if is_behind:
                self._behind[epoch, move.source, move.unit].append(target)
            else:
                source, source_offset = self._source(move, sources, descriptors)
                wire.append(UnitMove(move.unit, 0, at.offset, source, source_offset))
            known_source = move.source if source or is_behind else HOST
            coming = _Coming(at, move.bytes, known_source, is_there=False)
            self._coming[seat.pid, epoch, move.unit] = coming
        names = [unit_name(move.unit) for move in moves]
        known = {name: self.hashes[name] for name in names if name in self.hashes}
        rate = self._rate_of(readers)
        return FetchUnits(epoch, wire, known, self._fetch_nice, rate), descriptors

    def _source(
        self, move: Move, sources: dict[int, int], descriptors: list[int]
    ) -> tuple[int, int]:
        """Return the index of the descriptor and the offset from which a unit is copied; index 0:
        the unit is read from files.
        """
        if move.source == HOST:
            return 0, 0
        theirs = self.seats[move.source].units[move.unit]
        key = theirs.memory.descriptor
        if key not in sources and len(sources) < _MAX_SOURCES:
            sources[key] = len(descriptors)
            descriptors.append(key)
        return sources.get(key, 0), theirs.offset

    def _pass_on(self, seat: RankSeat, answer: Fetched, theirs: UnitAt) -> None:
        """Order the waiting ranks to copy a unit that this rank has now."""
        for target in self._behind.pop((answer.epoch, seat.rank, answer.unit), ()):
            waiting = self.seats[target]
            at = self._coming[waiting.pid, answer.epoch, answer.unit].at
            move = UnitMove(answer.unit, 0, at.offset, 1, theirs.offset)
            known = {unit_name(answer.unit): answer.hash}
            order = FetchUnits(answer.epoch, [move], known, self._fetch_nice)
            _order(waiting, order, [at.memory.descriptor, theirs.memory.descriptor])

    def drop_coming(self, of_epoch: int | None = None) -> None:
        """Free the memory of units that have not arrived, of the order of one epoch or of all
        orders.
        """
        gone = [key for key in self._coming if of_epoch in (None, key[1])]
        coming = [self._coming.pop(key) for key in gone]
        held = [at for seat in self.seats.values() for at in seat.units.values()]
        give_back([each.at for each in coming if not each.is_there], held)
        _close_unused([each.at for each in coming if each.is_there], held)

    def settle(self, layout: Layout) -> None:
        """Free all memory that the serving layout does not use."""
        self.drop_coming()
        held = {rank: layout.held(rank) for rank in layout.ranks if rank in self.seats}
        for (rank, unit), owner in list(self._lent.items()):
            if unit in held.get(rank, ()):
                del self._lent[rank, unit]
                self.seats[owner].units.pop(unit, None)
        for rank in self.seats:
            self._return(rank)
        for rank, own in held.items():
            seat = self.seats[rank]
            seat.release([unit for unit in seat.units if unit not in own])
            _order(seat, Settle(), [])

    def lose_memory(self, rank: int) -> None:
        """Free the memory of a rank that is lost with its device, but not the units that the rank
        used in other ranks' memory.
        """
        self._return(rank)
        seat = self.seats[rank]
        seat.release(list(seat.units))

    def _return(self, rank: int) -> None:
        """Return the units that a rank uses in other ranks' memory."""
        lent = [unit for of, unit in self._lent if of == rank]
        units = self.seats[rank].units
        returned = []
        for unit in lent:
            del self._lent[rank, unit]
            if (at := units.pop(unit, None)) is not None:
                returned.append(at)
        _close_unused(returned, units.values())

    def _replaced(self, rank: int, unit: Unit, before: UnitAt) -> None:
        used = [at for seat in self.seats.values() for at in seat.units.values()]
        used += [coming.at for coming in self._coming.values()]
        if self._lent.pop((rank, unit), None) is None:
            give_back([before], used)
        else:
            _close_unused([before], used)

    def attach(self, rank: int, units: dict[Unit, UnitAt]) -> None:
        """Give a new process the memory of its rank's previous process."""
        seat = self.seats[rank]
        seat.units = units
        memories = {id(at.memory): at.memory for at in units.values()}
        for key, memory in memories.items():
            places = [
                UnitPlace(unit, at.offset) for unit, at in units.items() if id(at.memory) == key
            ]
            _order(seat, Attach(places), [memory.descriptor])

    def form(self, epoch: int, layout: Layout, stages: range, areas: Areas) -> RankFormation:
        """Order the ranks of the local stages to join a formation with new shared memory; each rank
        answers when it has joined.

        Raises:
            KvrsError: there is not enough memory.
        """
        shared = Region.anonymous("kvrs-formation", areas.size_bytes)
        try:
            formation = RankFormation(epoch, layout, self.seats, areas, shared)
            order = Join(epoch, layout, (stages.start, stages.stop))
            for rank in areas.ranks:
                _order(self.seats[rank], order, [shared.descriptor])
        finally:
            shared.close()
        return formation

    def close(self, patience_s: float) -> None:
        for seat in self.seats.values():
            seat.close(patience_s)

    def _rate_of(self, readers: int) -> float | None:
        """Return the rate of one of several ranks that read at the same time; None: no limit."""
        rate = self._disk_bytes_per_s
        return None if rate is None else rate / max(1, readers)

    def _note(self, rank: int, found: Iterable[tuple[str, bytes]]) -> None:
        for name, leaf in found:
            if self.hashes.setdefault(name, leaf) != leaf:
                raise KvrsError(f"rank {rank} has read other weights than the others: {name}")


class SpareRanks:
    """Starts and ends processes of missing ranks as `RankWaits` says. Only one thread at a time may
    use it.
    """

    def __init__(self, processes: RankProcesses, full: Layout, waiting: RankWaits) -> None:
        self._processes, self._full, self._waiting = processes, full, waiting
        self.seats: dict[int, RankSeat] = {}

    def has(self, seat: RankSeat) -> bool:
        return self.seats.get(seat.rank) is seat

    def start(self, rank: int) -> None:
        now_s = time.monotonic()
        try:
            self.seats[rank] = self._processes.start(rank, self._full, stage_of(self._full, rank))
        except (KvrsError, OSError) as error:
            log.warning("a rank is not started", extra={"cause": str(error)})
            self._waiting.missing[rank].put_off(now_s)
        else:
            self._waiting.started(rank, now_s)

    def take(self, rank: int) -> RankSeat | None:
        """Take the spare process for a rank that joins now; None: there is none."""
        seat = self.seats.pop(rank, None)
        if seat is not None:
            # Delay the next start, in case the process dies before it serves.
            self._waiting.missing[rank].put_off(time.monotonic())
        return seat

    def end(self, rank: int) -> None:
        """End a rank's process, so that another one is started later."""
        seat = self.seats.pop(rank)
        self._waiting.missing[rank].put_off(time.monotonic())
        seat.close()

    def drop(self, rank: int) -> None:
        """Stop starting a rank that computes, or that must not come back."""
        self._waiting.missing.pop(rank, None)
        if (seat := self.seats.pop(rank, None)) is not None:
            seat.close()

    def close(self) -> None:
        for rank in list(self._waiting.missing):
            self.drop(rank)


def stage_of(layout: Layout, rank: int) -> int:
    return next(at for at, stage in enumerate(layout.stages) if rank in stage.ranks)


def _order(seat: RankSeat, order: Order, descriptors: list[int]) -> None:
    """Send an order; kill a rank that takes no orders, which is then reported like any end."""
    try:
        seat.order(order, descriptors)
    except RanksLostError as lost:
        log.warning("a rank takes no orders", extra={"cause": str(lost)})
        seat.kill()


def _close_unused(units: Iterable[UnitAt], kept: Iterable[UnitAt]) -> None:
    """Close unused mappings of other owners' memory, without freeing the units in it."""
    used = {id(at.memory) for at in kept}
    for memory in {id(at.memory): at.memory for at in units if id(at.memory) not in used}.values():
        memory.close()
