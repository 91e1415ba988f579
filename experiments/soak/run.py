"""Streams and random deaths for hours: whether memory, descriptors, threads, tasks or shared memory
grow.

python -m experiments.soak.run --minutes 120
"""

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from itertools import groupby
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any

import aiohttp

from experiments.record import Record
from kvrs.config.file import Config, parse_config
from kvrs.report.student import t975
from kvrs_testkit.processes import Processes, nodes_with_pairs

RESULTS = Path(__file__).parent / "results"
SAMPLE_S = 5.0
BLOCKS = 10
TASKS = "kvrs_event_loop_tasks"
ALLOWED_SHARE_PER_H = 0.01
MEASURED = ("proxy", "p1", "d1", "agent-n1")
VICTIMS = ("p0", "d0", "agent-n0")

Samples = list[tuple[float, dict[str, dict[str, float]]]]  # Seconds since the start, by process.


def settings() -> Config:
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {"nodes": nodes_with_pairs()},
            "backup": {"mode": "both", "capacity_bytes": 64 << 20},
        }
    )


def measure(pid: int) -> dict[str, float]:
    """Memory, threads and descriptors that a process holds now."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "rss_bytes": float(fields["RssAnon"].split()[0]) * 1024,
        "shared_bytes": float(fields["RssShmem"].split()[0]) * 1024,
        "threads": float(fields["Threads"]),
        "descriptors": float(len(os.listdir(f"/proc/{pid}/fd"))),
    }


class Soak:
    def __init__(self, processes: Processes, seed: int, clients: int, every_s: float) -> None:
        self._processes = processes
        self._clients = clients
        self._every_s = every_s
        self._draw = Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.samples: Samples = []

    async def run(self, duration_s: float) -> None:
        until_s = time.monotonic() + duration_s
        async with aiohttp.ClientSession() as http:
            clients = [
                asyncio.create_task(self._client(http, until_s)) for _ in range(self._clients)
            ]
            faults = asyncio.create_task(self._strike(until_s))
            began_s = time.monotonic()
            while time.monotonic() < until_s:
                found = {name: measure(self._processes.pid(name)) for name in MEASURED}
                found["proxy"]["tasks"] = await self._tasks(http)
                self.samples.append((time.monotonic() - began_s, found))
                await asyncio.sleep(SAMPLE_S)
            await asyncio.gather(faults, *clients)

    async def _tasks(self, http: aiohttp.ClientSession) -> float:
        """Tasks of the proxy's event loop."""
        proxy = self._processes.config.proxy
        async with http.get(f"http://{proxy.host}:{proxy.admin_port}/metrics") as response:
            lines = (await response.text()).splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{TASKS} "))

    async def _client(self, http: aiohttp.ClientSession, until_s: float) -> None:
        proxy = self._processes.config.proxy
        url = f"http://{proxy.host}:{proxy.port}/v1/completions"
        start_s = time.monotonic()
        while True:
            # By the clock: what the proxies keep for some minutes follows the rate of streams.
            start_s = max(time.monotonic(), start_s + self._draw.uniform(0, 2 * self._every_s))
            if start_s > until_s:
                return
            await asyncio.sleep(start_s - time.monotonic())
            body = {
                "prompt": [self._draw.randrange(1, 200) for _ in range(self._draw.randint(8, 200))],
                "max_tokens": self._draw.randint(16, 200),
                "temperature": 0,
                "stream": True,
            }
            key = {"Idempotency-Key": f"{self._draw.random()}"} if self._draw.random() < 0.5 else {}
            outcome = "broken"
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with http.post(url, json=body, headers=key) as response:
                    raw = await response.read()
                    whole = raw.endswith(b"data: [DONE]\n\n") and b'"error"' not in raw
                    outcome = "complete" if whole else f"failed: HTTP {response.status}"
            self.outcomes[outcome] += 1

    async def _strike(self, until_s: float) -> None:
        while time.monotonic() < until_s - 20:
            await asyncio.sleep(self._draw.uniform(5, 15))
            name, what = self._draw.choice(VICTIMS), self._draw.choice(["kill", "stop"])
            self.faults[f"{what} {name}"] += 1
            if what == "stop":
                pid = self._processes.pid(name)
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(self._draw.uniform(0.1, 6))
                os.kill(pid, signal.SIGCONT)
                continue
            self._processes.kill(name)
            await asyncio.to_thread(self._processes.start, name)
            await asyncio.to_thread(self._processes.wait_ready, name)


def slope(points: list[tuple[float, float]]) -> dict[str, float]:
    """Change an hour over the second half, with its 95 % interval over blocks of samples."""
    half = points[len(points) // 2 :]
    size = max(2, len(half) // BLOCKS)
    blocks = [half[at : at + size] for at in range(0, len(half) - size + 1, size)]
    means = [(fmean(x for x, _ in block), fmean(y for _, y in block)) for block in blocks]
    mean_x, mean_y = fmean(x for x, _ in means), fmean(y for _, y in means)
    spread = sum((x - mean_x) ** 2 for x, _ in means)
    per_s = sum((x - mean_x) * (y - mean_y) for x, y in means) / spread
    rest = [y - mean_y - per_s * (x - mean_x) for x, y in means]
    freedom = len(means) - 2
    error = stdev(rest) * ((len(rest) - 1) / freedom) ** 0.5 / spread**0.5
    margin = t975(freedom) * error
    return {
        "mean": mean_y,
        "per_h": per_s * 3600,
        "from_per_h": (per_s - margin) * 3600,
        "to_per_h": (per_s + margin) * 3600,
    }


def by_minute(samples: Samples) -> dict[str, dict[str, list[float]]]:
    """The mean of every minute, by process and quantity."""
    minutes = [
        [found for _, found in group] for _, group in groupby(samples, lambda at: at[0] // 60)
    ]
    return {
        name: {
            what: [round(fmean(each[name][what] for each in minute), 1) for minute in minutes]
            for what in rows
        }
        for name, rows in samples[0][1].items()
    }


def as_text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['minutes']} min, {result['clients']} clients, each with a stream every "
        f"{result['every_s']} s",
        f"streams {result['outcomes']}, faults {result['faults']}",
        f"{'process':10} {'what':13} {'mean':>14} {'change an hour':>16} {'95 % interval':>34}",
    ]
    for name, slopes in result["slopes"].items():
        for what, row in slopes.items():
            interval = f"{row['from_per_h']:.1f} .. {row['to_per_h']:.1f}"
            lines.append(
                f"{name:10} {what:13} {row['mean']:14.1f} {row['per_h']:16.1f} {interval:>34}"
            )
    lines += [f"grows: {each}" for each in result["growing"]]
    return "\n".join([*lines, "PASSED" if result["passed"] else "FAILED"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument(
        "--every-s", type=float, default=6.0, help="mean time between two streams of a client"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    record = Record(arguments.seed, timed=False)
    names = [*VICTIMS, *MEASURED[1:]]
    with Processes(settings()) as processes:
        processes.start(*names)
        processes.wait_ready(*names)
        processes.start_proxy()
        soak = Soak(processes, arguments.seed, arguments.clients, arguments.every_s)
        asyncio.run(soak.run(arguments.minutes * 60))
    slopes = {
        name: {
            what: slope([(at_s, found[name][what]) for at_s, found in soak.samples])
            for what in soak.samples[0][1][name]
        }
        for name in MEASURED
    }
    growing = [
        f"{name} {what}"
        for name, rows in slopes.items()
        for what, row in rows.items()
        if row["from_per_h"] > ALLOWED_SHARE_PER_H * max(1.0, row["mean"])
    ]
    result = {
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        "every_s": arguments.every_s,
        "outcomes": dict(soak.outcomes),
        "faults": dict(soak.faults),
        "slopes": slopes,
        "samples": by_minute(soak.samples),
        "growing": growing,
        "passed": not growing and set(soak.outcomes) == {"complete"},
    }
    print(as_text(result), end="")
    record.keep(arguments.out, "soak", result, as_text(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
