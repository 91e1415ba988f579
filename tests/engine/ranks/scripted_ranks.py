"""Ranks that are no processes: they answer the orders of a reformer at once, or when they are told
to, and die when they are told to.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch

from kvrs.config.cluster import ElasticSettings
from kvrs.errors import KvrsError, RanksLostError
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.moving import LinkRates
from kvrs_engine.elastic.plans import HOST, Move
from kvrs_engine.elastic.reforming import Reforming
from kvrs_engine.elastic.units import Unit, Units
from kvrs_engine.elastic.ways import Costs, Room
from kvrs_engine.engine.ranks.processes import RankMessage
from kvrs_engine.engine.ranks.reformed import Reformed
from kvrs_engine.engine.ranks.reformer import Reformer
from kvrs_engine.engine.ranks.seats import Answered, Ended
from kvrs_engine.engine.ranks.wire import Answer, Fetched, Joined, Loaded
from kvrs_testkit.layouts import even

UNITS = Units(2, (128,) * 4, (64,) * 8, (64,) * 4, 32)
PATIENCE_S = 60.0


class ScriptedSeat:
    def __init__(self, rank: int, tell: Callable[[RankMessage], object]) -> None:
        self.rank, self._tell = rank, tell
        self.units: dict[Unit, object] = {}
        self.is_loaded = self.is_closed = False
        self.is_silent = False  # It hangs.
        self.began_s = time.monotonic()
        self.process = SimpleNamespace(has_ended=False)

    def status(self) -> int | None:
        """A script has no process that could have ended in some way."""
        return None

    def kill(self, *, with_device: bool = False) -> None:
        if not self.process.has_ended:
            self.process.has_ended = True
            self._tell(Ended(self))  # type: ignore[arg-type]

    def close(self, patience_s: float = 0.0) -> None:
        self.process.has_ended = self.is_closed = True
        self.units.clear()

    def release(self, units: Iterable[Unit]) -> None:
        for unit in units:
            del self.units[unit]


class ScriptedProcesses:
    """Scripted stand-in for `RankProcesses`."""

    def __init__(self, layout: Layout) -> None:
        self.told: SimpleQueue[RankMessage | None] = SimpleQueue()
        self.moved: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.starts: Counter[int] = Counter()
        self.seats = {rank: self._seat(rank) for rank in layout.ranks}
        for rank, seat in self.seats.items():
            seat.is_loaded = True
            seat.units |= dict.fromkeys(layout.held(rank))
        # Called before the order of that name is answered; its result: whether it is, now.
        self.hooks: dict[str, Callable[[Any], bool | None]] = {}
        self.held_back: list[Answered] = []
        self.room_bytes: float = float("inf")
        self.nices: list[int] = []  # Of each order to fetch.
        self._coming: dict[tuple[int, Unit, int], Move] = {}

    def _seat(self, rank: int) -> ScriptedSeat:
        return ScriptedSeat(rank, self.told.put)

    def answer(self, name: str, what: Any, answers: Sequence[tuple[int, Answer]]) -> None:
        """Report answers of living ranks, unless a hook holds them back; it is called once."""
        hook = self.hooks.pop(name, None)
        told = [
            Answered(self.seats[rank], answer)  # type: ignore[arg-type]
            for rank, answer in answers
        ]
        if hook is not None and hook(what) is False:
            self.held_back += told
            return
        self.tell(told)

    def tell(self, told: Iterable[Answered]) -> None:
        for each in told:
            seat: Any = each.seat
            if not (seat.process.has_ended or seat.is_silent):
                self.told.put(each)

    # What a reformer calls.

    def start(
        self, rank: int, layout: Layout, stage: int, *, proves_ahead: bool = True
    ) -> ScriptedSeat:
        self.starts[rank] += 1
        seat = self._seat(rank)
        hook = self.hooks.pop("load", None)
        if hook is None or hook(seat) is not False:
            self.told.put(Answered(seat, Loaded(b"", {})))  # type: ignore[arg-type]
        return seat

    def loaded(self, seat: ScriptedSeat, answer: Loaded) -> None:
        seat.is_loaded = True

    def fetch(self, epoch: int, moves: Iterable[Move], *, nice: int = 0) -> None:
        moves = list(moves)
        self.nices.append(nice)
        if (wanted := sum(move.bytes for move in moves)) > self.room_bytes:
            raise KvrsError(f"no room for {wanted} bytes")
        for move in moves:
            if move.source != HOST:
                source = self.seats[move.source]
                assert move.unit in source.units, "no move reads what is gone"
            self._coming[move.target, move.unit, epoch] = move
        answers = [(move.target, Fetched(epoch, move.unit, b"", 0, False)) for move in moves]
        self.answer("fetch", moves, answers)

    def fetched(self, seat: ScriptedSeat, answer: Fetched) -> bool:
        move = self._coming.pop((seat.rank, answer.unit, answer.epoch), None)
        if move is None:
            return False
        seat.units[answer.unit] = None
        self.moved[answer.epoch]["host" if move.source == HOST else "peer"] += move.bytes
        return True

    def settle(self, layout: Layout) -> None:
        self._coming.clear()
        for rank in layout.ranks:
            held, seat = layout.held(rank), self.seats[rank]
            seat.release([unit for unit in seat.units if unit not in held])

    def lose_memory(self, rank: int) -> None:
        self.seats[rank].units.clear()

    def attach(self, rank: int, units: dict[Unit, object]) -> None:
        self.seats[rank].units = units


class ScriptedGroup:
    """Scripted stand-in for `RankGroup`."""

    def __init__(self, ranks: int, **elastic: Any) -> None:
        self.layout = self.full = even(UNITS, ranks)
        self.processes = ScriptedProcesses(self.layout)
        self.lost: dict[int, float] = {}
        self.lost_devices: set[int] = set()
        self.streams, self.predict, self.probed = 0, None, torch.zeros(1)
        self.formation = None
        self.ended: RanksLostError | None = None
        self.freezes: list[bool] = []  # Whether each was at once.
        self._news = threading.Condition()
        settings = ElasticSettings(**elastic)
        costs = Costs(
            rates=LinkRates(1e3, 1e4),
            join_s=0.01,
            restart_s=9.0,
            replace_s=9.0,
            back_s=9.0,
            kept_is_readable=True,
        )
        room = Room(capacity_bytes=0, cell_bytes=0, pages=0)
        self.machine = Reforming(
            UNITS, self.layout, room, costs, min_ranks=settings.min_ranks, spread=False
        )
        self.reformer = Reformer(self, self.machine, settings)  # type: ignore[arg-type]

    def freeze(self, *, at_once: bool) -> None:
        self.freezes.append(at_once)

    def form(self, epoch: int, layout: Layout) -> Any:
        joined = [(rank, Joined(epoch)) for rank in layout.ranks]
        self.processes.answer("form", layout, joined)
        return SimpleNamespace(layout=layout, end=lambda: None)

    def probe(self, formation: Any) -> torch.Tensor:
        return self.probed

    def serve(self, formation: Any) -> None:
        self.layout = formation.layout

    def give_up(self, error: RanksLostError) -> None:
        self.ended = error

    def on_change(self) -> None:
        with self._news:
            self._news.notify_all()

    # What a test calls.

    @property
    def done(self) -> list[Reformed]:
        return self.reformer.done

    def lose(self, rank: int, *, device: bool = False) -> None:
        if device:
            self.lost_devices.add(rank)
        self.processes.seats[rank].kill()

    def until(self, what: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        with self._news:
            while not what():
                assert time.monotonic() < until_s
                self._news.wait(0.005)

    def hurry(self, rank: int) -> None:
        """The rank is due now, unless it is back by itself."""
        if (missing := self.machine.waiting.missing.get(rank)) is not None:
            missing.due_s = 0.0
            self.processes.told.put(None)

    def until_serving(self, *ranks: int) -> None:
        self.until(lambda: self.layout.ranks == ranks and self.reformer.now is None)

    def order(self, rank: int, *, leaves: bool) -> str | None:
        return self.reformer.order(rank, leaves=leaves).result(PATIENCE_S)


@contextmanager
def scripted(ranks: int = 4, **elastic: Any) -> Iterator[ScriptedGroup]:
    group = ScriptedGroup(ranks, **elastic)
    group.reformer.start()
    try:
        yield group
    finally:
        group.reformer.stop()
    assert all(seat.is_loaded for seat in group.processes.seats.values())
