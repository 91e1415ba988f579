"""One pass over the requests, with or without faults, and what the cluster says of it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrs.replay.admin import AdminPort
from kvrs.replay.faults import Fault, FaultSchedule
from kvrs.replay.load import Dialect, Progress, encode, replay
from kvrs.replay.records import ReplayRequest, StreamRecord


@dataclass(slots=True)
class Run:
    """One pass over the requests. All times count from its start."""

    records: list[StreamRecord]
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    never_due: list[Fault] = field(default_factory=list)  # Whose moment never came.
    cold: bool = False  # It began with empty prefix caches.

    @property
    def faults_left(self) -> int:
        return len(self.never_due)


@dataclass(frozen=True, slots=True)
class Scene:
    """What whoever carries faults out has to work with."""

    port: AdminPort
    schedule: FaultSchedule
    start_s: float  # `time.monotonic()` of the run's start.
    requests_sent: Callable[[], int]
    carried_out: list[dict[str, Any]]  # Where each fault is noted as it is done.


# Looks at the cluster until every fault of the scene was carried out and is over; undoes what lasts when it is cancelled.
Strike = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Target:
    """What is driven, and by whom faults are carried out there."""

    url: str
    dialect: Dialect | None = None
    timeout_s: float = 300.0
    port: AdminPort | None = None  # None: an endpoint of which nothing is known but its API.
    strike: Strike | None = None


async def run_pass(
    target: Target,
    requests: Sequence[ReplayRequest],
    faults: list[Fault],
    seed: int,
    on_progress: Callable[[Progress], None] | None = None,
) -> Run:
    """Replay the requests, on empty caches where that can be had, and carry the faults out when they are due.

    Raises:
        AdminError, and whatever the striker raises: the load is given up then.
    """
    run = Run([])
    if target.port is not None:
        run.cold = await target.port.reset_caches()
    progress, dialect = Progress(len(requests)), target.dialect or Dialect()
    bodies = encode(requests, dialect)
    start_s, start_wall_s = time.monotonic(), time.time()
    load = asyncio.create_task(
        replay(
            target.url,
            requests,
            on_progress,
            dialect=dialect,
            start_s=start_s,
            timeout_s=target.timeout_s,
            progress=progress,
            bodies=bodies,
        )
    )
    if faults:
        assert target.port is not None
        assert target.strike is not None
        schedule = FaultSchedule(faults, seed)
        scene = Scene(target.port, schedule, start_s, lambda: progress.sent, run.faults)
        run.records = await _beside(load, target.strike(scene))
        run.never_due = list(schedule.pending)
    else:
        run.records = await load
    if target.port is not None:
        run.recoveries = _recoveries(await target.port.state(), run.records, start_wall_s)
    return run


async def _beside(load: asyncio.Task[list[StreamRecord]], strike: Awaitable[None]) -> list[StreamRecord]:
    """The load's result; a striker that fails ends the load, and the end of the load ends the striker."""
    striker = asyncio.ensure_future(strike)
    try:
        await asyncio.wait({load, striker}, return_when=asyncio.FIRST_COMPLETED)
        if striker.done() and not load.done():
            striker.result()
        return await load
    finally:
        for task in (load, striker):
            task.cancel()
        await asyncio.gather(load, striker, return_exceptions=True)


def _recoveries(state: Any, records: Sequence[StreamRecord], start_wall_s: float) -> list[dict[str, Any]]:
    own = {record.stream for record in records}
    # The proxy's record tells people the time of day; both clocks are this machine's.
    return [{**row, "at_s": row["at_s"] - start_wall_s} for row in state["recoveries"] if row["stream"] in own]
