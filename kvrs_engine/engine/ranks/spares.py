"""Processes that are to take the places of ranks that are missing from the layout that serves."""

import logging
import time

from kvrs.errors import KvrsError
from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.waiting import RankWaits
from kvrs_engine.engine.ranks.processes import RankProcesses
from kvrs_engine.engine.ranks.seats import RankSeat

log = logging.getLogger(__name__)


class SpareRanks:
    """Starts and ends them as `RankWaits` says. Used by one thread at a time."""

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
        """The process for a rank that is to join now, if there is one."""
        seat = self.seats.pop(rank, None)
        if seat is not None:
            self._waiting.missing[rank].put_off(time.monotonic())  # Should it die before it serves.
        return seat

    def end(self, rank: int) -> None:
        """Another one is started in place of this one."""
        seat = self.seats.pop(rank)
        self._waiting.missing[rank].put_off(time.monotonic())
        seat.close()

    def drop(self, rank: int) -> None:
        """The rank computes, or is not to come back."""
        self._waiting.missing.pop(rank, None)
        if (seat := self.seats.pop(rank, None)) is not None:
            seat.close()

    def close(self) -> None:
        for rank in list(self._waiting.missing):
            self.drop(rank)


def stage_of(layout: Layout, rank: int) -> int:
    return next(at for at, stage in enumerate(layout.stages) if rank in stage.ranks)
