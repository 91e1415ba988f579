"""A soak: mixed load on one machine for as long as asked. Each minute a process is killed; each ten
minutes the processes are restarted one after the other, and a reload changes the policy.

    python -m experiments.soak.run [--minutes 120]
"""

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
import yaml

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.soak.growth import (
    MOST_DESCRIPTORS,
    MOST_GROWTH,
    Growth,
    Sample,
    growths,
    kind_of,
    read,
)
from experiments.soak.load import Load, Sums, requests
from experiments.two_pairs import LINK_BYTES_PER_S, PACE
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.net.admin import AdminError
from kvrs_lab.cluster.fault_injection import rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_testkit.resuming import BARS, Clients, quiet_run

MINUTE_S = 60.0
SAMPLE_S = 10.0
ROUND_MINUTES = 10
ROLL_AT, RELOAD_AT = 2, 4  # Minutes of each round.
BACK_S = 300.0  # A killed process, on a busy machine.
DRAIN_S = 2.0  # Of an instance: shorter than a long stream, so that some are moved.
POLICIES = ("rom", "always_recompute", "auto")
PAIRS = 3
# The last pair with its agent and proxy is never ended: it shows what grows over hours.
KEPT = ("p2", "d2", "agent-n2", "proxy-2")
VICTIMS = [
    name for n in range(PAIRS - 1) for name in (f"d{n}", f"p{n}", f"agent-n{n}", f"proxy-{n}")
]
JUDGED = ("proxies", "agents", "proxy-2", "agent-n2")
COLUMNS = ("", "lives", "MiB first", "later", "growth", "fds first", "later")


def settings(seed: int) -> Config:
    nodes = [
        {
            "id": f"n{n}",
            "instances": [{"id": f"p{n}", "role": "prefill"}, {"id": f"d{n}", "role": "decode"}],
        }
        for n in range(PAIRS)
    ]
    return parse_config(
        {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {"engine": {"seed": seed, "pace": PACE}, "nodes": nodes},
            "transfer": {"link_bytes_per_s": LINK_BYTES_PER_S, "probe_interval_s": 1.0},
            "backup": {"mode": "both", "capacity_bytes": 64 << 20},
            "gossip": {"enabled": True},
        }
    )


class Soak:
    """The run: its load, its events in turn, and its samples."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession, seed: int) -> None:
        self._cluster = cluster
        self._session = session
        self._seed = seed
        self._rng = random.Random(seed)
        self.events: Counter[str] = Counter()
        self.hit: Counter[str] = Counter()  # Streams that depended on killed processes, by kind.
        self.samples: list[Sample] = []
        self.wrong: list[dict[str, Any]] = []

    async def run(self, minutes: float) -> dict[str, Any]:
        asked = requests(self._seed)
        clients = Clients(self._session, lambda: self._cluster.urls, asked)
        self.sums = Sums(await quiet_run(clients, len(asked)))
        self._load = Load(clients, len(asked), self._seed)
        self._began_s = time.monotonic()
        loading = asyncio.create_task(self._load.run())
        sampling = asyncio.create_task(self._sample())
        try:
            await self._disturb(minutes)
        finally:
            sampling.cancel()
        took_s = self._now_s()
        self._load.stop()
        await loading
        self._take()
        await asyncio.to_thread(self._cluster.wait_all_up, BACK_S)
        left = len(await self._streams())
        found = growths(self.samples, KEPT)
        return {
            "minutes": round(took_s / MINUTE_S, 1),
            "events": dict(self.events),
            "streams_hit": dict(self.hit),
            **{key: self.sums.counts[key] for key in ("streams", "tokens", "broke", "breaks")},
            **{bar: self.sums.counts[bar] for bar in BARS},
            "failures": dict(self.sums.failures),
            "refusals": dict(self.sums.refusals),
            "left_at_the_end": left,
            "growth": {name: growth.as_figures() for name, growth in found.items()},
            "missed": misses(self.sums, left, found),
            "wrong": self.wrong[:20],
        }

    async def _disturb(self, minutes: float) -> None:
        """The events of each minute. A long one delays the next, so that no two overlap: two copies
        of a stream survive one death.
        """
        for minute in range(int(minutes)):
            await self._until((minute + self._rng.uniform(0.2, 0.5)) * MINUTE_S)
            await self._kill(VICTIMS[minute % len(VICTIMS)])
            if minute % ROUND_MINUTES == ROLL_AT:
                await self._roll()
            if minute % ROUND_MINUTES == RELOAD_AT:
                await self._reload(POLICIES[minute // ROUND_MINUTES % len(POLICIES)])
            await self._print_progress()
        await self._until(minutes * MINUTE_S)

    async def _kill(self, name: str) -> None:
        if kind_of(name) == "proxies":
            hit = len((await self._state(int(name.rpartition("-")[2])))["streams"])
        else:
            hit = sum(
                name in (row["prefill"], row["decode"], *row.get("protected", {}))
                for row in await self._streams()
            )
        await self._end(name, signal.SIGKILL)
        self.events[f"kills of {kind_of(name)}"] += 1
        self.hit[kind_of(name)] += hit

    async def _roll(self) -> None:
        """Restart everything but what is kept, each process when the one before is back
        (docs/guide/operating.md).
        """
        for name in VICTIMS:
            is_instance = kind_of(name) in ("prefill", "decode")
            if is_instance:
                await self._ask("POST", f"drain/{name}?drain_s={DRAIN_S}")
                await self._wait(f"{name} is drained", partial(self._is_empty, name))
            await self._end(name, signal.SIGTERM)
            if is_instance:
                await self._ask("DELETE", f"drain/{name}")
        self.events["rolling restarts"] += 1

    async def _reload(self, policy: str) -> None:
        """Change the policy in the file of each proxy, and tell it to read the file."""
        for proxy in self._cluster.proxies:
            path = self._cluster.run_directory / f"{proxy.settings.id}.yaml"
            document = yaml.safe_load(path.read_text())
            document["policy"]["name"] = policy
            path.write_text(yaml.safe_dump(document))
            proxy.signal(signal.SIGHUP)
        await self._wait(f"the policy is {policy}", partial(self._has_policy, policy))
        self.events["reloads"] += 1

    async def _end(self, name: str, number: signal.Signals) -> None:
        """Signal a process, and wait until its successor is up and known to all proxies."""
        before = self._served(name)
        if kind_of(name) == "proxies":
            self._cluster.proxies[int(name.rpartition("-")[2])].signal(number)
        else:
            kill = partial(self._cluster.kill, InstanceId(name), number=number)
            await asyncio.to_thread(kill)
        await self._wait(f"{name} is back", partial(self._is_back, name, before))
        await asyncio.to_thread(self._cluster.wait_all_up, BACK_S)

    async def _wait(self, what: str, holds: Callable[[], Awaitable[bool]]) -> None:
        give_up_s = time.monotonic() + BACK_S
        while not await holds():
            assert time.monotonic() < give_up_s, f"not within {BACK_S:.0f} s: {what}"
            await asyncio.sleep(0.1)

    async def _is_back(self, name: str, before: int) -> bool:
        return self._served(name) > before

    async def _is_empty(self, name: str) -> bool:
        return not any(name in (row["prefill"], row["decode"]) for row in await self._streams())

    async def _has_policy(self, policy: str) -> bool:
        states = [await self._state(number) for number in range(PAIRS)]
        return all(state["proxies"][0]["policy"] == policy for state in states)

    def _served(self, name: str) -> int:
        """The number of the start of this process that served last."""
        proxies = {proxy.settings.id: proxy.status for proxy in self._cluster.proxies}
        return (proxies.get(name) or self._cluster.supervisor.status()[InstanceId(name)]).served

    async def _ask(self, method: str, path: str) -> None:
        for url in self._cluster.admin_urls:
            async with self._session.request(method, f"{url}/kvrs/v1/{path}") as answer:
                assert answer.status == 200, f"{path}: {await answer.text()}"

    async def _streams(self) -> list[dict[str, Any]]:
        """The open streams of all proxies."""
        states = [await self._state(number) for number in range(PAIRS)]
        return [row for state in states for row in state["streams"]]

    async def _state(self, number: int) -> Any:
        return await asyncio.to_thread(self._cluster.state, number)

    async def _sample(self) -> None:
        while True:
            pids = {proxy.settings.id: proxy.pid for proxy in self._cluster.proxies if proxy.pid}
            with contextlib.suppress(AdminError):  # All proxies may be busy.
                rows = rows_of(await asyncio.to_thread(self._cluster.state))
                pids |= {name: row["pid"] for name, row in rows.items() if row["pid"]}
            self.samples += read(pids, self._now_s())
            self._take()
            await asyncio.sleep(SAMPLE_S)

    def _take(self) -> None:
        """Judge what the clients got since the last time."""
        found, self._load.found = self._load.found, []
        wrong = self.sums.add(found)
        for each in wrong:
            print(f"{self._now_s():.0f} s: not exact: {each}", flush=True)
        self.wrong += wrong

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._now_s()))

    async def _print_progress(self) -> None:
        (proxy,) = (await self._state(PAIRS - 1))["proxies"]
        sizes = {sample.name: sample for sample in self.samples if sample.name in KEPT}
        shown = ", ".join(
            f"{name} {each.rss_bytes >> 20} MiB {each.descriptors} fds"
            for name, each in sorted(sizes.items())
        )
        bars = ", ".join(f"{self.sums.counts[bar]} {bar}" for bar in BARS)
        print(
            f"{self._now_s() / MINUTE_S:.0f} min: {dict(self.events)}; "
            f"{self.sums.counts['streams']} answers: {bars}; {shown}, "
            f"{proxy['record_bytes'] >> 20} MiB of records",
            flush=True,
        )


def misses(sums: Sums, left: int, found: dict[str, Growth]) -> list[str]:
    """The bars that are missed."""
    missed = [f"{sums.counts[bar]} {bar}" for bar in BARS if sums.counts[bar]]
    if not sums.counts["broke"]:
        missed.append("no stream broke off")
    if left:
        missed.append(f"{left} streams are left at the proxies")
    missed += [
        f"{name} is not flat" for name in JUDGED if name in found and not found[name].is_flat
    ]
    return missed


def as_text(figures: dict[str, Any]) -> str:
    events = ", ".join(f"{count} {name}" for name, count in figures["events"].items())
    lines = [
        f"{figures['minutes']} minutes: {events}",
        f"streams at killed processes: {figures['streams_hit']}",
        f"{figures['streams']:,} answers, {figures['tokens']:,} tokens; {figures['broke']:,} broke "
        f"off, {figures['breaks']:,} times in all",
        ", ".join(f"{bar} {figures[bar]}" for bar in BARS),
        f"refusals that clients met and asked again after: {figures['refusals']}",
        "",
        "".join(f"{column:>11}" for column in COLUMNS),
    ]
    lines += [
        f"{name:>11}{row['lives']:>11}{row['first']['rss_mib']:>11}{row['later']['rss_mib']:>11}"
        f"{row['rss_growth']:>11.1%}{row['first']['descriptors']:>11}"
        f"{row['later']['descriptors']:>11}"
        for name, row in figures["growth"].items()
    ]
    judged = ", ".join(JUDGED)
    lines += [
        f"bars of {judged}: {MOST_GROWTH:.0%} of memory, {MOST_DESCRIPTORS} descriptors"
        if figures["growth"]
        else "too short to judge memory and descriptors",
        *(f"MISSED: {each}" for each in figures["missed"]),
    ]
    return "\n".join([*lines, "FAILED" if figures["missed"] else "PASSED"]) + "\n"


async def soak(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=60.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return await Soak(cluster, session, options.seed).run(options.minutes)


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=1)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--logs", type=Path, help="directory for the logs of all processes")
    options = parser.parse_args()
    record = Record(options.seed, timed=False)
    with Cluster(settings(options.seed), print, PAIRS) as cluster:
        try:
            figures = uvloop.run(soak(cluster, options))
        finally:
            if options.logs is not None:
                cluster.keep_logs(options.logs)
    text = as_text(figures)
    print(text, end="")
    record.keep(options.out, "soak", figures, text)
    return 1 if figures["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
