"""One pass over the requests, with or without faults, and the later state of the cluster."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from kvrs_lab.faults.language import Fault
from kvrs_lab.faults.schedule import FaultSchedule
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.open_loop import Dialect, Progress, encode, replay
from kvrs_lab.traces.records import ReplayRequest, StreamRecord


@dataclass(slots=True)
class Run:
    """One pass over the requests. All times count from the start of the pass."""

    records: list[StreamRecord]
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    losses: list[dict[str, Any]] = field(default_factory=list)  # Noticed by the proxy, if faults.
    never_due: list[Fault] = field(default_factory=list)  # Faults whose conditions were never met.
    cold: bool = False  # The prefix caches were empty at the start.
    proxy: dict[str, Any] = field(default_factory=dict)  # The proxy's row in its state.
    interrupted: bool = False  # Only ended streams have records.
    # Share of the time in which a process of this machine waited for a CPU; None: unknown.
    cpu_pressure: float | None = None

    @property
    def faults_left(self) -> int:
        return len(self.never_due)


@dataclass(frozen=True, slots=True)
class Injection:
    """The input of a fault injector: the faults of one pass."""

    port: AdminPort
    schedule: FaultSchedule
    start_s: float  # `time.monotonic()` of the run's start.
    requests_sent: Callable[[], int]
    carried_out: list[dict[str, Any]]  # Record of each fault that is done.


# Carries out every fault of the injection when it is due, until all are over. A cancellation undoes
# lasting faults.
FaultInjector = Callable[[Injection], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Target:
    """The endpoint, and the means of injecting faults."""

    url: str
    dialect: Dialect | None = None
    timeout_s: float = 300.0
    port: AdminPort | None = None  # None: an endpoint without an admin port.
    inject_faults: FaultInjector | None = None


async def run_pass(
    target: Target,
    requests: Sequence[ReplayRequest],
    faults: list[Fault],
    seed: int,
    on_progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> Run:
    """Replay the requests, on empty caches if possible, and carry out the due faults. `stop` gives
    up the rest.

    Raises:
        AdminError, and the injector's errors: the load is given up.
    """
    run = Run([])
    if target.port is not None:
        run.cold = await target.port.reset_caches()
    progress, dialect = Progress(len(requests)), target.dialect or Dialect()
    bodies = encode(requests, dialect)
    start_s, start_wall_s = time.monotonic(), time.time()
    waited_before_s = _cpu_waits_s()
    ended: list[StreamRecord] = []
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
            ended=ended,
        )
    )
    stopping = asyncio.create_task(_stop(load, stop))
    try:
        if faults:
            assert target.port is not None
            assert target.inject_faults is not None
            schedule = FaultSchedule(faults, seed, Random)
            injection = Injection(target.port, schedule, start_s, lambda: progress.sent, run.faults)
            run.records = await _beside(load, target.inject_faults(injection))
            run.never_due = list(schedule.pending)
        else:
            run.records = await load
    except asyncio.CancelledError:
        if stop is None or not stop.is_set():
            raise
        run.records = sorted(ended, key=lambda record: record.index)
        run.interrupted = True
    finally:
        stopping.cancel()
    if waited_before_s is not None and (waited_s := _cpu_waits_s()) is not None:
        run.cpu_pressure = (waited_s - waited_before_s) / (time.monotonic() - start_s)
    if target.port is not None:
        state = await target.port.state()
        own = {record.stream for record in run.records}
        recoveries = [row for row in state["recoveries"] if row["stream"] in own]
        run.recoveries = _since(start_wall_s, recoveries)
        run.losses = _since(start_wall_s, await target.port.losses()) if run.faults else []
        run.proxy = next(iter(state.get("proxies", ())), {})
    return run


def _cpu_waits_s() -> float | None:
    """Seconds so far in which a process of this machine waited for a CPU (pressure stall
    information of Linux); None: the kernel does not count them.
    """
    try:
        some = Path("/proc/pressure/cpu").read_text().partition("\n")[0]
    except OSError:
        return None
    return int(some.rpartition("total=")[2]) / 1e6


async def _stop(load: asyncio.Task[list[StreamRecord]], stop: asyncio.Event | None) -> None:
    if stop is not None:
        await stop.wait()
        load.cancel()


async def _beside(
    load: asyncio.Task[list[StreamRecord]], inject_faults: Awaitable[None]
) -> list[StreamRecord]:
    """Return the load's result. A failed fault injector ends the load, and the end of the load ends
    the injector.
    """
    injector = asyncio.ensure_future(inject_faults)
    try:
        await asyncio.wait({load, injector}, return_when=asyncio.FIRST_COMPLETED)
        if injector.done() and not load.done():
            injector.result()
        return await load
    finally:
        for task in (load, injector):
            task.cancel()
        await asyncio.gather(load, injector, return_exceptions=True)


def _since(start_wall_s: float, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the proxy, whose wall clock is that of this machine, with times of the pass."""
    return [{**row, "at_s": row["at_s"] - start_wall_s} for row in rows]
