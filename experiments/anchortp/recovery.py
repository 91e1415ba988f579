"""Table I: ranks of an instance are lost under load, one at a quarter of the requests and one at
half of them; how long until the first token, and until throughput is at its peak again.
"""

import asyncio
import json
import random
import signal
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import DeviceFault
from kvrs_lab.cluster.fault_injection import rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.cluster.processes import Progress
from kvrs_lab.cluster.victims import open_rank
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.report.metrics import percentile

ENGINE = InstanceId("e0")
SHARES = (0.25, 0.5)  # Of the requests, at which a rank is lost.
WAIT_S = 180.0
STEADY = 0.9  # Of its peak, from which on throughput counts as back.
WINDOW_S, STEP_S = 2.0, 0.1
# Tokens of before the fault may still be on their way for so long.
ON_THEIR_WAY_S = 0.1
AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Way:
    """A fault of the instance, and its means against it."""

    fault: str | None  # The process of a rank, or with it the memory: its device.
    elastic: bool = True
    backup: str = "off"


WAYS = {
    "no failure": Way(None),
    "restart and reload": Way("device", elastic=False),
    "in place, KV recomputed": Way("device"),
    "in place, KV restored": Way("device", backup="local"),
    "in place, KV kept": Way("process"),
}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of a fixed set, so many at a time."""

    requests: int
    at_once: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    seed: int
    disk_bytes_per_s: float | None = None  # Rate at which weights are read, of all ranks.


@dataclass(slots=True)
class Served:
    """One request, by the clock of this machine."""

    ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Passed:
    served: list[Served]
    began_s: float
    ended_s: float
    faults_s: list[float]
    last_sent_s: float  # From then on fewer than `at_once` run.


def config_of(model: Path, ranks: int, load: Load, way: Way) -> Config:
    instance = {"id": ENGINE, "role": "both", "tp": ranks}
    longest = load.prompt_tokens[1] + load.output_tokens[1]
    return parse_config(
        {
            "cluster": {
                "model": str(model),
                "allow_faults": True,
                "engine": {
                    "pages": load.at_once * (longest // 16 + 8),
                    "max_running": load.at_once,
                    "max_model_len": longest + 16,
                    "disk_bytes_per_s": load.disk_bytes_per_s,
                },
                "nodes": [{"id": "n0", "instances": [instance]}],
            },
            "proxy": {"port": 0, "admin_port": 0},
            "backup": {"mode": way.backup, "capacity_bytes": 1 << 29},
            "elastic": {"enabled": way.elastic},
            # Requests and streams wait for their instance, however long it takes.
            "policy": {"admission": {"wait_s": WAIT_S}, "recovery": {"wait_s": WAIT_S}},
        }
    )


def passed(model: Path, ranks: int, load: Load, way: Way, tell: Progress) -> Passed:
    with Cluster(config_of(model, ranks, load, way), tell) as cluster:
        return asyncio.run(_pass(cluster, model.name, load, way))


async def _pass(cluster: Cluster, model: str, load: Load, way: Way) -> Passed:
    served = [Served() for _ in range(load.requests)]
    waiting, began_s = iter(enumerate(served)), time.monotonic()
    finished, last_sent_s = 0, began_s
    one_more = asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=None)

    async def one_after_the_other(http: aiohttp.ClientSession) -> None:
        nonlocal finished, last_sent_s
        for number, own in waiting:
            last_sent_s = time.monotonic()
            await _serve(http, cluster.url, body_of(model, number, load), own)
            finished += 1
            one_more.set()

    async def lose(at: int) -> float:
        while finished < SHARES[at] * load.requests:
            one_more.clear()
            await one_more.wait()
        return await _lose(cluster, way)

    async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as tasks:
        for _ in range(load.at_once):
            tasks.create_task(one_after_the_other(http))
        faults = []
        if way.fault is not None:
            faults = [tasks.create_task(lose(at)) for at in range(len(SHARES))]
    faults_s = [fault.result() for fault in faults]
    return Passed(served, began_s, time.monotonic(), faults_s, last_sent_s)


def body_of(model: str, number: int, load: Load) -> dict[str, Any]:
    """Half of them greedy, half drawn with a seed of their own."""
    choose = random.Random(load.seed * 100_003 + number)
    return {
        "model": model,
        "prompt": [choose.randrange(2, 500) for _ in range(choose.randint(*load.prompt_tokens))],
        "max_tokens": choose.randint(*load.output_tokens),
        "temperature": 0.9 * (number % 2),
        "seed": number,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }


async def _serve(http: aiohttp.ClientSession, url: str, body: dict[str, Any], into: Served) -> None:
    async with http.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(event["error"])
            found = event["choices"][0].get("token_ids") or []
            into.ids += found
            into.at_s += [time.monotonic()] * len(found)


async def _lose(cluster: Cluster, way: Way) -> float:
    """The last rank, for good; returns when."""
    async with AdminPort(cluster.proxies[0].admin, cluster.secret) as port:
        row = rows_of(await port.state())[ENGINE]
        rank = max(one["rank"] for one in row["ranks"])
        at_s = time.monotonic()
        if way.fault == "device" and way.elastic:
            await port.inject(ENGINE, row["url"], DeviceFault(rank))
        else:
            process = open_rank(row, rank)
            at_s = time.monotonic()
            signal.pidfd_send_signal(process, signal.SIGKILL)
    if way.elastic:
        await _keep_away(f"{cluster.admin_url}/kvrs/v1/leave/{ENGINE}/{rank}")
    return at_s


async def _keep_away(url: str) -> None:
    """The lost rank has no other device."""
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.post(url) as answer:
                if answer.status != 409:
                    answer.raise_for_status()
                    return
            await asyncio.sleep(AGAIN_S)


# What a pass shows.


def row_of(passed: Passed, clean: Passed) -> dict[str, Any]:
    """`clean`: the same requests without a failure."""
    pairs = list(zip(passed.served, clean.served, strict=True))
    at_s = sorted(at for one in passed.served for at in one.at_s)
    ends_s = [*passed.faults_s, passed.last_sent_s][1:]
    return {
        "total_s": passed.ended_s - passed.began_s,
        "losses": [
            loss_of(passed.served, at_s, fault_s, end_s)
            for fault_s, end_s in zip(passed.faults_s, ends_s, strict=True)
        ],
        "tokens": len(at_s),
        "unlike": sum(ours.ids != theirs.ids for ours, theirs in pairs),
    }


def loss_of(
    served: Sequence[Served], at_s: Sequence[float], fault_s: float, end_s: float
) -> dict[str, Any]:
    """Figures of one loss; until `end_s` the load is the same."""
    first_s = first_after(at_s, fault_s)
    rates = [(start_s, rate(at_s, start_s)) for start_s in _steps(first_s, end_s - WINDOW_S)]
    later = [each for _, each in rates[len(rates) // 2 :]]
    peak = median(later) if later else None
    back_s = next((start for start, each in rates if each >= STEADY * (peak or 0.0)), None)
    gaps = [
        after - before
        for one in served
        for before, after in pairwise(one.at_s)
        if before < first_s and after > fault_s + ON_THEIR_WAY_S
    ]
    return {
        "tfs_s": first_s - fault_s,
        "ttp_s": None if back_s is None else back_s - first_s,
        "peak_tokens_per_s": peak,
        "streams": len(gaps),
        "pause_s": {f"p{share}": percentile(gaps, share) for share in (50, 99)},
    }


def first_after(at_s: Sequence[float], fault_s: float) -> float:
    """The first token behind the pause: the longest one that begins before what was on its way has
    arrived.
    """
    first = max(0, bisect_left(at_s, fault_s) - 1)
    pauses = [
        (after - max(before, fault_s), after)
        for before, after in pairwise(at_s[first:])
        if before < fault_s + ON_THEIR_WAY_S
    ]
    return max(pauses)[1]


def rate(at_s: Sequence[float], start_s: float) -> float:
    """Tokens per second in the window that begins there."""
    return (bisect_left(at_s, start_s + WINDOW_S) - bisect_left(at_s, start_s)) / WINDOW_S


def _steps(first_s: float, last_s: float) -> list[float]:
    return [first_s + at * STEP_S for at in range(int(max(0.0, last_s - first_s) / STEP_S) + 1)]
