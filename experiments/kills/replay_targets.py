"""Real vLLM under a proxy: the instance that a replay goes to hangs or dies as well.

Each round has a stream of each kind of `replayed.py`. A decode server hangs or is killed while the
worker of the other one stands for longer than a stream may be silent, or the other one is killed
during the replay. A stream has to equal the one of the undisturbed run, to be marked in its head,
or to end with an error.
"""

import argparse
import asyncio
import math
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from experiments.kills.replayed import FLAGS, KINDS, Said, Series, alike, make_requests
from experiments.kills.vllm import STREAM_TIMEOUT_S, UP_TIMEOUT_S
from experiments.record import Record
from kvrs.net.admin import AdminClient
from kvrs_lab.load.admin_port import AdminPort
from kvrs_testkit.vllm_servers import PYTHON_ENV, Part, VllmServers, vllm_config

STANDS_S = 13.0
_REPLAYS_FOR_S = 2.0  # The target is killed this long after its victim hangs.
_LOOK_AGAIN_S = 0.05


class Fate(StrEnum):
    """The fate of the two decode servers in a round."""

    STOPPED = "stopped"  # One hangs; the worker of the other one stands meanwhile.
    KILLED = "killed"  # One hangs, the other one is killed, and the first one goes on.
    BOTH = "both"  # One is killed; the worker of the other one stands meanwhile.


FATES = (*[Fate.STOPPED] * 3, Fate.KILLED, Fate.BOTH)


class TargetSeries(Series):
    """Rounds of streams whose replays meet a second fault."""

    _servers: VllmServers

    async def rounds(self, count: int, until_s: float) -> list[dict[str, Any]]:
        """The rows of the table; no round begins later than `until_s` of the monotonic clock."""
        timeout = aiohttp.ClientTimeout(total=STREAM_TIMEOUT_S)
        rows: list[dict[str, Any]] = []
        async with (
            aiohttp.ClientSession(timeout=timeout) as self._http,
            AdminPort(AdminClient(self._admin_url)) as self._port,
        ):
            await self._port.wait_all_up(UP_TIMEOUT_S, _LOOK_AGAIN_S, tested=True)
            while len(rows) < count and time.monotonic() < until_s:
                rows.append(row := await self._round(FATES[len(rows) % len(FATES)]))
                self._console.print(f"  {row}", style="dim", markup=False)
        return rows

    async def _round(self, fate: Fate) -> dict[str, Any]:
        kinds = list(KINDS)
        requests = [make_requests(KINDS[kind], self._choose)[0] for kind in kinds]
        start_s = time.time()
        asked = [asyncio.create_task(self._ask(request, Said())) for request in requests]
        there = await self._under_way(asked)
        target, victim = sorted(("d0", "d1"), key=lambda name: there[name])
        await self._strike(fate, victim, target)
        said = await asyncio.gather(*asked)
        recoveries = [
            row for row in (await self._port.state())["recoveries"] if row["at_s"] >= start_s
        ]
        await self._mend(fate, victim, target)
        calm = await self._calm(requests, 0)
        verdicts = [
            verdict(kind, *pair)
            for kind, pair in zip(kinds, zip(said, calm, strict=True), strict=True)
        ]
        return {
            "fate": fate.value,
            "cut": there[victim],
            "recoveries": dict(Counter(row["option"] for row in recoveries)),
            "verdicts": dict(Counter(verdicts)),
            "wrong": [kind for kind, each in zip(kinds, verdicts, strict=True) if each == "wrong"],
            "errors": [str(each.errors[0])[:200] for each in said if each.errors],
        }

    async def _under_way(self, asked: Sequence[asyncio.Task[Said]]) -> Counter[str]:
        """Wait until each stream that has not ended has tokens; return how many each decode server
        has.
        """
        while not all(task.done() for task in asked):
            streams = (await self._port.state())["streams"]
            under_way = [each for each in streams if each["output_tokens"] >= 3]
            if len(under_way) == sum(not task.done() for task in asked):
                return Counter(each["decode"] for each in under_way)
            await asyncio.sleep(_LOOK_AGAIN_S)
        return Counter()

    async def _strike(self, fate: Fate, victim: str, target: str) -> None:
        servers = self._servers
        if fate is Fate.KILLED:
            servers.signal(victim, signal.SIGSTOP)
            await asyncio.sleep(_REPLAYS_FOR_S)
            servers.kill(target)
            servers.signal(victim, signal.SIGCONT)
            return
        servers.signal(target, signal.SIGSTOP, Part.WORKER)
        if fate is Fate.BOTH:
            servers.kill(victim)
        else:
            servers.signal(victim, signal.SIGSTOP)
        await asyncio.sleep(STANDS_S)
        servers.signal(target, signal.SIGCONT, Part.WORKER)

    async def _mend(self, fate: Fate, victim: str, target: str) -> None:
        if fate is Fate.STOPPED:
            self._servers.signal(victim, signal.SIGCONT)
        else:
            dead = target if fate is Fate.KILLED else victim
            await asyncio.to_thread(self._servers.start, dead)
            await asyncio.to_thread(self._servers.wait_ready, dead)
        await self._port.wait_all_up(UP_TIMEOUT_S, _LOOK_AGAIN_S, tested=True)


def verdict(kind: str, said: Said, calm: Said) -> str:
    """Return whether the stream kept what its head promised, in a word of the table."""
    if said.errors:
        return "error"
    if alike(vars(said), vars(calm)):
        return "equal"
    is_json = kind.startswith(("JSON", "tools"))
    if not said.exact and not (is_json and said.has_ended and not said.is_json):
        return "marked"
    return "wrong"


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "the replay's target", "rounds", "equal", "error", "marked", "wrong", "recoveries"
    )
    for fate in Fate:
        there = [row for row in rows if row["fate"] == fate]
        verdicts, recoveries = Counter[str](), Counter[str]()
        for row in there:
            verdicts.update(row["verdicts"])
            recoveries.update(row["recoveries"])
        counts = [verdicts[each] for each in ("equal", "error", "marked", "wrong")]
        table.add_row(fate.value, str(len(there)), *map(str, counts), str(dict(recoveries)))
    return table


def run(options: argparse.Namespace) -> int:
    console, record = Console(record=True, width=130), Record(options.seed, timed=False)
    until_s = time.monotonic() + (options.limit_s or math.inf)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = VllmServers(vllm_config(directory), os.environ[PYTHON_ENV], *FLAGS)
        stack.enter_context(servers).start_all()
        servers.start_proxy(servers.config)
        series = TargetSeries(servers, KINDS, console, options.seed)
        rows = asyncio.run(series.rounds(options.kills or 15, until_s))
        servers.stop_proxy()
    wrong = sum(len(row["wrong"]) for row in rows)
    console.print(table_of(rows))
    console.print(f"{wrong} wrong of {len(rows) * len(KINDS)} streams", markup=False)
    document = {"stands_s": STANDS_S, "kinds": list(KINDS), "rounds": rows}
    record.keep(options.out, "vllm-replay-targets", document, console.export_text())
    return 1 if wrong else 0
