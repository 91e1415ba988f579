"""The driver of `kvrs_engine.elastic.reforming`: carries out its actions with the ranks' processes.

One thread handles the messages of ranks and watchers in order, and sends orders. The computing
thread waits meanwhile, or goes on if no unit or KV is lost.
"""

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty
from typing import assert_never

from kvrs.config.cluster import ElasticSettings
from kvrs.config.policy import LOOKAHEAD_TOKENS
from kvrs.errors import KvrsError, RanksLostError
from kvrs.process.memory import free_bytes
from kvrs.protocol.pages import Cell
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.reforming import (
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
    RoomMissing,
    Serve,
    UnitArrived,
)
from kvrs_engine.elastic.units import Units
from kvrs_engine.elastic.waiting import AGAIN_S, MAX_STARTS
from kvrs_engine.elastic.ways import Room, StreamAtRisk
from kvrs_engine.engine.layers.proofs import same_bytes
from kvrs_engine.engine.ranks.formation import RankFormation
from kvrs_engine.engine.ranks.processes import RankMessage, SpareRanks, stage_of
from kvrs_engine.engine.ranks.reformed import Reformed, ReformingBegun, ReformingNow
from kvrs_engine.engine.ranks.routed import loads_of
from kvrs_engine.engine.ranks.seats import Answered, Ended, RankOrdered, RankSeat, status_of
from kvrs_engine.engine.ranks.stages import StageRanks, step_factors
from kvrs_engine.engine.ranks.wire import Answer, Fetched, Joined, Loaded, Refused
from kvrs_engine.engine.ranks.yielding import COPY_NICE
from kvrs_engine.scheduling.sequences import Chunk

log = logging.getLogger(__name__)

_ENDED = "the ranks no longer compute; allowed: while the ranks serve"


class Reformer:
    def __init__(
        self,
        group: StageRanks,
        machine: Reforming,
        settings: ElasticSettings,
    ) -> None:
        self._group, self._processes, self._machine = group, group.processes, machine
        self._settings = settings
        machine.costs = replace(
            machine.costs,
            back_s=AGAIN_S + machine.costs.back_s,
            lookahead_tokens=LOOKAHEAD_TOKENS,
            step_s=self._step_s,
        )
        self.deaths = 0  # Number of deaths of computing ranks.
        self.now: ReformingNow | None = None
        self.done: list[Reformed] = []
        self._begun: ReformingBegun | None = None
        self._formation: RankFormation | None = None
        self._waiting = machine.waiting
        self._spares = SpareRanks(group.processes, group.full, self._waiting)
        self.loads = loads_of(machine.units, settings.experts, group.full)
        self._left: set[int] = set()  # Ranks that have left, or are leaving, on purpose.
        self._first_lost_s = 0.0
        self._is_stopping = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="reformer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        if self._formation is not None:
            self._formation.end()  # Ends a running probe.
        self._processes.told.put(None)
        self._thread.join()

    def order(self, rank: int, *, leaves: bool) -> "Future[str | None]":
        """Let a rank leave on purpose, or take back a rank that has left. The result is the reason
        of a refusal; None: carried out.

        A leaving rank serves until the others have its units; a lost rank is not restarted.
        """
        refused: Future[str | None] = Future()
        self._processes.told.put(RankOrdered(rank, leaves, refused))
        return refused

    def factors(self, layout: Layout) -> tuple[float, float]:
        """Return the step times of decode and prefill relative to the full layout."""
        tiles = () if self.loads is None else self.loads.tiles
        return step_factors(layout, self._group.full, self._machine.units, tiles)

    def _step_s(self, layout: Layout) -> float:
        """Return the predicted time of a decode step."""
        predict = self._group.predict
        step_s = 0.0 if predict is None else predict([Chunk([0], 0, [0], logits=1)])
        return step_s * self.factors(layout)[0]

    # Messages from ranks.

    def _run(self) -> None:
        while True:
            try:
                told = self._processes.told.get(timeout=self._patience_s())
            except Empty:
                told = None
            if self._is_stopping:
                break
            if self._has_ended and not isinstance(told, RankOrdered):
                continue
            try:
                self._take(told)
                self._look()
            except Exception as error:
                log.exception("the ranks cannot go on")
                self._end(f"cannot go on: {error}")
        self._spares.close()

    def _patience_s(self) -> float | None:
        """Return the time until `_look` must be called; None: no limit."""
        if self._has_ended:
            return None
        moments_s = [self._waiting.next_s(), None if self.loads is None else self.loads.next_s]
        next_s = min((each for each in moments_s if each is not None), default=None)
        return None if next_s is None else max(0.0, next_s - time.monotonic())

    def _take(self, told: RankMessage | None) -> None:
        match told:
            case Ended(seat=seat):
                self._ended(seat)
            case Answered(seat=seat, answer=answer):
                if self._is_known(seat):
                    self._answered(seat, answer)
            case RankOrdered():
                if told.refused.set_running_or_notify_cancel():
                    carry_out = self._leave if told.leaves else self._have_back
                    # Several proxies may send the same order.
                    is_done = told.leaves and told.rank in self._left
                    refused = None if is_done or self._has_ended else carry_out(told.rank)
                    told.refused.set_result(_ENDED if self._has_ended else refused)
            case None:
                pass  # The timeout has ended.

    def _leave(self, rank: int) -> str | None:
        if not self._settings.enabled:
            return "elastic.enabled: got false; allowed: true"
        layout = self._group.layout if self.now is None else self.now.after
        if rank in self._group.full.ranks and rank not in layout.ranks:
            self._left.add(rank)
            self._spares.drop(rank)
            return None
        self._machine.room = _room_of(self._group.layout, self._machine.units)
        if (reason := self._machine.why_it_stays(rank)) is None:
            self._left.add(rank)
            self._handle(RankLeaving(rank))
        return reason

    def _have_back(self, rank: int) -> str | None:
        if rank not in self._left:
            left = ", ".join(map(str, sorted(self._left))) or "none, no rank has left"
            return f"rank: got {rank}; allowed: {left}"
        self._left.discard(rank)
        if rank not in self._group.layout.ranks:
            self._waiting.miss(rank, time.monotonic(), at_once=True)
        return None

    def _is_known(self, seat: RankSeat) -> bool:
        return self._spares.has(seat) or self._processes.seats.get(seat.rank) is seat

    def _answered(self, seat: RankSeat, answer: Answer) -> None:
        self._waiting.heard(time.monotonic())
        news: Event | None = None
        try:
            match answer:
                case Loaded():
                    self._processes.loaded(seat, answer)
                    took_s = time.monotonic() - seat.began_s
                    self._machine.note_start(took_s, answer.ahead_s)
                    if self._spares.has(seat):
                        self._waiting.missing[seat.rank].is_loaded = True
                    if self._begun is not None:
                        self._begun.loaded(seat.rank, took_s)
                case Fetched():
                    if self._processes.fetched(seat, answer):
                        news = UnitArrived(answer.epoch, seat.rank, answer.unit)
                case Joined():
                    news = RankJoined(answer.epoch, seat.rank)
                case Refused():
                    log.error("a rank refuses", extra={"rank": seat.rank, "why": answer.faults})
        except KvrsError as error:
            log.error("a rank cannot be used", extra={"rank": seat.rank, "cause": str(error)})
            seat.kill()
            return
        # Outside the `try`: a failure here is not this rank's.
        if news is not None:
            self._handle(news)
        elif isinstance(answer, Loaded):
            self._offer()

    def _ended(self, seat: RankSeat) -> None:
        if not self._is_known(seat):
            return
        if self._spares.has(seat):
            self._spares.end(seat.rank)
            return
        if seat.rank in self._group.lost:
            return  # Already reported, by another thread.
        seat.kill()
        now_s = time.monotonic()
        self._group.lost[seat.rank] = now_s
        self.deaths += 1
        if self._begun is None or not self._begun.action.way.pauses:
            self._first_lost_s = now_s
        if not self._settings.enabled:
            self._group.freeze(at_once=True)
            self._end("has died", [seat.rank])
            return
        is_kept = seat.rank not in self._group.lost_devices
        if not is_kept:
            self._processes.lose_memory(seat.rank)
        self._machine.room = _room_of(self._group.layout, self._machine.units)
        streams = (StreamAtRisk(0.0),) * self._group.streams
        self._handle(RanksLost(frozenset({seat.rank}), is_kept, streams))

    # Actions.

    def _handle(self, event: Event) -> None:
        is_loss = isinstance(event, RanksLost)
        for action in self._machine.handle(event):
            match action:
                case Freeze():
                    self._group.freeze(at_once=is_loss)
                case CarryOut():
                    self._begin(action)
                case FormRanks():
                    _note(self._begun, "move")
                    self._form(action)
                case ProbeStep():
                    _note(self._begun, "join")
                    self._probe(action)
                case Serve():
                    self._serve(action)
                case EndInstance():
                    self._end(action.reason)
                case _:
                    assert_never(action)

    def _begin(self, action: CarryOut) -> None:
        now_s = time.monotonic()
        is_first = self._begun is None
        began_s = self._first_lost_s if action.way.pauses else now_s
        self._begun = ReformingBegun(began_s, action, is_first)
        self._waiting.begin(action.ready_s, now_s)
        _note(self._begun, "plan")
        self.now = ReformingNow(
            number=action.epoch,
            way=action.way,
            ready_at_s=now_s + action.ready_s,
            after=action.plan.after,
            lost=tuple(sorted(self._group.lost)),
            move_bytes=action.plan.moved_bytes,
            lost_cells=max(
                sum(
                    len(cells_of(self._group.layout, rank, base))
                    for rank in self._group.lost_devices & self._group.lost.keys()
                )
                for base in range(self._group.layout.bases)
            ),
        )
        log.warning(
            "the ranks re-form",
            extra={"way": action.way, "ready_in_s": action.ready_s, "lost": self.now.lost},
        )
        self._group.on_change()
        for rank in sorted(action.fresh):
            if not self._seat(rank, action):
                return
        try:
            # Copies of a resize without new ranks are not urgent.
            nice = 0 if action.way.pauses or action.fresh else COPY_NICE
            self._processes.fetch(action.epoch, action.plan.moves, nice=nice)
            # The ranks work meanwhile.
            self._begun.on_demand = self._machine.on_demand_for(action.plan.after)
        except KvrsError as error:
            self._handle(RoomMissing(action.epoch, str(error)))
            if self._machine.phase is ReformingPhase.SERVING:
                self._call_off(action, str(error))

    def _call_off(self, action: CarryOut, reason: str) -> None:
        """Cancel a change that has not begun; the ranks go on serving."""
        log.warning("the ranks stay as they are", extra={"way": action.way, "cause": reason})
        for rank in action.fresh:
            self._processes.seats.pop(rank).close()
        if self.loads is not None:
            self.loads.put_off(time.monotonic(), reason)
        self._begun, self.now = None, None
        self._waiting.end()
        self._group.on_change()

    def _seat(self, rank: int, action: CarryOut) -> bool:
        """Give a rank a new process, a spare one if there is one; return False if the rank has been
        started too often.
        """
        seat = self._spares.take(rank)
        if seat is None:
            if not self._waiting.may_start(rank):
                self._end(f"was started {MAX_STARTS} times and has died each time", [rank])
                return False
            stage = stage_of(self._group.full, rank)
            # The other ranks wait, so skip the proofs for later losses.
            seat = self._processes.start(rank, self._group.full, stage, proves_ahead=False)
        old = self._processes.seats.pop(rank, None)
        self._group.lost.pop(rank, None)
        self._group.lost_devices.discard(rank)
        self._processes.seats[rank] = seat
        if old is not None:
            kept, old.units = old.units, {}
            old.close()
            if kept:
                self._processes.attach(rank, kept)
        return True

    def _form(self, action: FormRanks) -> None:
        try:
            self._formation = self._group.form(action.epoch, action.layout)
        except KvrsError as error:
            log.error("the ranks cannot join", extra={"cause": str(error)})
            # Leaving ranks stay; otherwise they would be released again and again.
            self._left.difference_update(self._group.layout.ranks)
            self._handle(RoomMissing(action.epoch, str(error)))

    def _probe(self, action: ProbeStep) -> None:
        assert self._formation is not None, "the ranks have joined"
        try:
            # `probe` kills a hanging rank, as in any batch.
            found = self._group.probe(self._formation)
        except RanksLostError:
            self._formation.end()  # The other ranks wait for the lost ones.
            return
        _note(self._begun, "probe")
        self._handle(ProbeEnded(action.epoch, same_bytes(found, self._group.probed)))

    def _serve(self, action: Serve) -> None:
        assert self._formation is not None, "the ranks have joined"
        assert self._begun is not None, "a re-forming has begun"
        seats = self._processes.seats
        self._processes.settle(action.layout)
        for rank in action.layout.ranks:
            self._spares.drop(rank)
        # The order matters: a reader of `done` must see the new layout, and a reader that sees no
        # re-forming must see both.
        self._group.serve(self._formation)
        self._note_cost(action)
        self._begun, self.now = None, None
        self._waiting.end()
        # Ending a process takes time, during which the other ranks already compute.
        for rank in [rank for rank in seats if rank not in action.layout.ranks]:
            seats.pop(rank).close()
            self._group.lost.pop(rank, None)
        for rank in self._group.full.ranks:
            if rank not in action.layout.ranks and rank not in self._left:
                self._waiting.miss(rank, time.monotonic())
        self._group.on_change()
        self._offer()

    def _note_cost(self, action: Serve) -> None:
        """Record the course and the cost of a re-forming, for later predictions."""
        assert self._begun is not None, "a re-forming has begun"
        begun, now_s = self._begun, time.monotonic()
        moved = dict(self._processes.moved.pop(action.epoch, {}))
        # Late bytes of abandoned plans do not count.
        self._processes.moved.clear()
        way, plan = begun.action.way, begun.action.plan
        done = Reformed(
            number=action.epoch,
            way=way,
            began_s=begun.began_s,
            predicted_s=begun.action.ready_s,
            paused=way.pauses,
            degree=len(action.layout.ranks),
            host_bytes=plan.host_bytes,
            peer_bytes=plan.peer_bytes,
            on_demand=begun.on_demand,
            moved=moved,
            phases_s=begun.phases_s,
        )
        self.done = [*self.done[-99:], done]
        if self.loads is not None:
            self.loads.changed(done, plan.after, now_s)
        if done.paused and begun.is_first and not plan.moves:
            self._machine.note_join(now_s - begun.began_s - begun.start_s)
        log.warning(
            "the ranks compute again",
            extra={
                "way": way,
                "degree": done.degree,
                "seconds": now_s - begun.began_s,
                **_bytes_of(done),
            },
        )

    def _end(self, reason: str, ranks: list[int] | None = None) -> None:
        self._has_ended = True
        self._group.freeze(at_once=True)
        self.now = None
        ranks = ranks or sorted(self._group.lost)
        seats = self._processes.seats
        status = status_of([seats[rank] for rank in ranks if rank in seats])
        self._group.give_up(RanksLostError(ranks, reason, status))
        self._group.on_change()

    # Missing ranks.

    def _look(self) -> None:
        """Start and end ranks that are due, and re-balance the copies of experts."""
        if self._has_ended:
            return
        due = self._waiting.due(time.monotonic())
        for rank in due.end:
            log.error("a rank hangs as it loads", extra={"rank": rank})
            self._spares.end(rank)
        for rank in due.start:
            self._spares.start(rank)
        if due.is_silent:
            for rank in sorted(self._machine.awaited):
                log.error("a rank hangs as the ranks re-form", extra={"rank": rank})
                self._processes.seats[rank].kill()
        if self.loads is None or self._machine.phase is not ReformingPhase.SERVING:
            return
        group, is_balanced = self._group, self._settings.enabled
        # The layout must not change before the prefill is measured, at the start.
        is_balanced &= group.predict is not None
        layout = self.loads.look(group.layout, group.formation, time.monotonic())
        if layout is not None and is_balanced:
            self._machine.room = _room_of(self._group.layout, self._machine.units)
            self._handle(LoadShifted(layout))

    def _offer(self) -> None:
        """Begin the next pending change, if the phase is SERVING: first of leaving ranks, then of
        ranks that are ready to join.
        """
        for rank in sorted(self._left.intersection(self._group.layout.ranks)):
            self._leave(rank)
        for rank, missing in list(self._waiting.missing.items()):
            if self._machine.phase is not ReformingPhase.SERVING:
                return
            if missing.is_loaded:
                self._machine.room = _room_of(self._group.layout, self._machine.units)
                self._handle(RankOffered(rank, stage_of(self._group.full, rank)))


def _note(begun: ReformingBegun | None, part: str) -> None:
    assert begun is not None, "a re-forming has begun"
    begun.note(part)


def _bytes_of(done: Reformed) -> dict[str, int]:
    """Return the planned bytes for a log line, beside those of RaidServe's plan if that was not
    carried out.
    """
    found = {"host_bytes": done.host_bytes, "peer_bytes": done.peer_bytes}
    if (other := done.on_demand) is not None:
        found["on_demand_host_bytes"] = other.host_bytes
        found["on_demand_peer_bytes"] = other.peer_bytes
    return found


def _room_of(layout: Layout, units: Units) -> Room:
    """Return the memory limit of a rank: the most that a rank has now, plus its share of the free
    memory.
    """
    most = max(layout.weight_bytes(rank, units) for rank in layout.ranks)
    each = free_bytes() // len(layout.ranks)
    return Room(capacity_bytes=most + each, cell_bytes=0, pages=0)


def cells_of(layout: Layout, rank: int, base: int) -> frozenset[Cell]:
    """Return a rank's cells of a page with this base; empty if the rank is outside the layout or
    has no KV head.
    """
    return frozenset(layout.cells(rank, base)) if rank in layout.ranks else frozenset()
