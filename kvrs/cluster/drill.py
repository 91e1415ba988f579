"""A drill: load through the proxy of a running cluster, and faults carried out on its processes when they are due."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrs.cluster.launcher import Cluster
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role
from kvrs.protocol.secrets import http_token
from kvrs.replay.faults import Fault, FaultSchedule, What
from kvrs.replay.load import Progress as LoadProgress
from kvrs.replay.load import replay
from kvrs.replay.records import ReplayRequest, StreamRecord

WATCH_INTERVAL_S = 0.02
SIGNALS = {What.KILL: signal.SIGKILL}
NEAR_THE_END_TOKENS = 8


@dataclass(slots=True)
class Run:
    """One pass over the requests. All times count from its start."""

    records: list[StreamRecord]
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    faults_left: int = 0  # Whose moment never came.


def run_load(
    cluster: Cluster, requests: Sequence[ReplayRequest], faults: list[Fault], seed: int, console: Console, title: str
) -> Run:
    """Replay the requests through the proxy on an empty cache, and carry the faults out when they are due."""
    with Progress(
        TextColumn("  {task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task(title, total=len(requests))
        return asyncio.run(_replay(cluster, requests, faults, seed, lambda p: bar.update(task, completed=p.ended)))


async def _replay(
    cluster: Cluster,
    requests: Sequence[ReplayRequest],
    faults: list[Fault],
    seed: int,
    on_progress: Callable[[LoadProgress], None],
) -> Run:
    seen = LoadProgress(len(requests))

    def progress(now: LoadProgress) -> None:
        nonlocal seen
        seen = now
        on_progress(now)

    async with aiohttp.ClientSession() as session:
        await _reset_caches(cluster, session)
        start_s, start_wall_s = time.monotonic(), time.time()
        schedule = FaultSchedule(faults, seed)
        run = Run([])
        striker = asyncio.create_task(_strike(cluster, session, schedule, start_s, lambda: seen.sent, run.faults))
        run.records = await replay(cluster.url, requests, progress, start_s=start_s)
        striker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await striker
        state = await _state(cluster, session)
    own = {record.stream for record in run.records}
    # The proxy's record tells people the time of day; both clocks are this machine's.
    run.recoveries = [{**row, "at_s": row["at_s"] - start_wall_s} for row in state["recoveries"] if row["stream"] in own]
    run.faults_left = len(schedule.pending)
    return run


async def _strike(
    cluster: Cluster,
    session: aiohttp.ClientSession,
    schedule: FaultSchedule,
    start_s: float,
    sent: Callable[[], int],
    carried_out: list[dict[str, Any]],
) -> None:
    """Look at the cluster until every fault was carried out."""
    while schedule.pending:
        state = await _state(cluster, session)
        up = {InstanceId(row["id"]): row for row in state["instances"] if row["health"] == "up"}
        roles = {name: Role(row["role"]) for name, row in up.items()}
        inflight = _inflight(state, list(up))
        for due in schedule.due(time.monotonic() - start_s, sent(), inflight, roles):
            pid = int(up[due.whom]["pid"])
            at_s = time.monotonic() - start_s
            os.kill(pid, SIGNALS[due.fault.what])
            row = {"at_s": at_s, "what": due.fault.what.value, "whom": due.whom, "pid": pid, "inflight": due.inflight}
            carried_out.append({**row, "phases": _phases(state, due.whom)})
        await asyncio.sleep(WATCH_INTERVAL_S)


def _inflight(state: Mapping[str, Any], up: list[InstanceId]) -> dict[InstanceId, int]:
    """Streams that each instance is working on right now."""
    busy = Counter(stream[stream["stage"]] for stream in state["streams"] if stream["stage"] in ("prefill", "decode"))
    return {name: busy[name] for name in up}


def _phases(state: Mapping[str, Any], victim: InstanceId) -> dict[str, int]:
    """Where the streams that count on `victim` were when it was hit."""
    return dict(Counter(_phase(stream) for stream in state["streams"] if victim in (stream["prefill"], stream["decode"])))


def _phase(stream: Mapping[str, Any]) -> str:
    if stream["stage"] == "prefill":
        return "before the hand-off"
    if stream["output_tokens"] == 0:
        return "hand-off"
    left = stream["max_tokens"] - stream["output_tokens"]
    return "near the end" if left <= NEAR_THE_END_TOKENS else "between tokens"


async def _state(cluster: Cluster, session: aiohttp.ClientSession) -> Any:
    async with session.get(f"{cluster.admin_url}/kvrs/v1/state") as answer:
        return await answer.json()


async def _reset_caches(cluster: Cluster, session: aiohttp.ClientSession) -> None:
    """Both runs start cold, or the second would only look faster."""
    headers = {"Authorization": f"Bearer {http_token(cluster.secret)}"}
    for _, instance in cluster.config.cluster.instances():
        async with session.post(f"{instance.url}/reset_prefix_cache", headers=headers) as answer:
            answer.raise_for_status()
