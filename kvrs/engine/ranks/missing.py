"""Ranks of the full layout that do not compute, and the processes that are to take their places."""

import logging
import time
from dataclasses import dataclass

from kvrs.elastic.layouts import Layout
from kvrs.engine.ranks.processes import RankProcesses
from kvrs.engine.ranks.seats import RankSeat
from kvrs.errors import KvrsError

log = logging.getLogger(__name__)

# A lost rank is started again after so long; each time that it dies before it serves, twice as
# long.
AGAIN_S = 0.5
_AGAIN_MOST_S = 60.0


@dataclass(slots=True)
class Missing:
    """One of these ranks."""

    stage: int
    due_s: float
    wait_s: float = AGAIN_S
    spare: RankSeat | None = None  # Ready to join once it is loaded.

    def put_off(self, now_s: float) -> None:
        """Its next start, should the one before have been in vain."""
        self.due_s = now_s + self.wait_s
        self.wait_s = min(2 * self.wait_s, _AGAIN_MOST_S)


class MissingRanks:
    """Used by one thread at a time."""

    def __init__(self, processes: RankProcesses, full: Layout, load_most_s: float) -> None:
        """`load_most_s`: a process that takes longer hangs, and another one is started."""
        self._processes, self._full, self._load_most_s = processes, full, load_most_s
        self.ranks: dict[int, Missing] = {}

    def add(self, rank: int, in_s: float) -> None:
        """To be started after so long, unless it is known already."""
        if rank not in self.ranks:
            self.ranks[rank] = Missing(stage_of(self._full, rank), time.monotonic() + in_s)

    def drop(self, rank: int) -> None:
        """It computes, or is not to come back."""
        missing = self.ranks.pop(rank, None)
        if missing is not None and missing.spare is not None:
            missing.spare.close()

    def take(self, rank: int) -> RankSeat | None:
        """The process for it, which is to join now, if there is one."""
        missing = self.ranks.get(rank)
        if missing is None or missing.spare is None:
            return None
        seat, missing.spare = missing.spare, None
        missing.put_off(time.monotonic())  # Should it die before it serves.
        return seat

    def has(self, seat: RankSeat) -> bool:
        """The seat is a process for one of these ranks, which has not been taken."""
        missing = self.ranks.get(seat.rank)
        return missing is not None and missing.spare is seat

    def end(self, seat: RankSeat) -> None:
        """Another one is started in place of this one."""
        missing = self.ranks[seat.rank]
        missing.spare = None
        missing.put_off(time.monotonic())
        seat.close()

    def next_s(self) -> float | None:
        """When `look` is to be called at the latest; None: when something else has happened."""
        moments_s = [
            missing.due_s if missing.spare is None else missing.spare.began_s + self._load_most_s
            for missing in self.ranks.values()
            if missing.spare is None or not missing.spare.is_loaded
        ]
        return min(moments_s, default=None)

    def look(self) -> None:
        """Start ranks that are due, and end processes that hang as they load."""
        now_s = time.monotonic()
        for rank, missing in self.ranks.items():
            spare = missing.spare
            if spare is not None:
                if not spare.is_loaded and spare.began_s + self._load_most_s <= now_s:
                    log.error("a rank hangs as it loads", extra={"rank": rank})
                    self.end(spare)
            elif missing.due_s <= now_s:
                try:
                    missing.spare = self._processes.start(rank, self._full, missing.stage)
                except (KvrsError, OSError) as error:
                    log.warning("a rank is not started", extra={"cause": str(error)})
                    missing.put_off(now_s)

    def close(self) -> None:
        for rank in list(self.ranks):
            self.drop(rank)


def stage_of(layout: Layout, rank: int) -> int:
    return next(at for at, stage in enumerate(layout.stages) if rank in stage.ranks)
