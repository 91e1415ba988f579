"""Proxies and engines that are updated one after the other, and proxies whose number changes, under
load.

Processes of `kvrs proxy` before scripted instances. Clients find them as pods are found behind a
Service of Kubernetes: by `/readyz`, and seconds late.
"""

import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.proxy_cluster import ProxyCluster, open_proxy_cluster
from kvrs_testkit.proxy_process import config_of, started_process, until_logged
from kvrs_testkit.resuming import Clients, Had, Way
from kvrs_testkit.scripted_model import expected_ids

SEED = 11
PAUSE_S = 0.05  # Between two tokens.
PERIOD_S = 1.0  # Of the readiness probe, as in deploy/.
FAILURES = 3  # One after the other, until a proxy counts as not ready; as in deploy/.
LAG_S = 3.0  # From a change of readiness to the last client that knows of it.
DRAIN_DELAY_S = 10.0  # As in deploy/.
SETTLE_S = 5.0
IN_TURN_S = 0.7  # After a proxy without a delay was told to end, its streams are at the other one.
ENGINE_DRAIN_S = 0.3  # Shorter than a stream, so that most of those of an engine are moved.
ENGINE_DOWN_S = 1.0


class Load(NamedTuple):
    requests: int
    per_s: float
    tokens: int
    way: Way


PLAIN = Load(1000, 15.0, 20, Way.PLAIN)
WITH_KEYS = Load(200, 5.0, 400, Way.CONTINUE)  # 20 s: they outlast the delay.


class Proxies:
    """Processes by number, each with a file and a port that it keeps."""

    def __init__(
        self,
        system: ProxyCluster,
        stack: AsyncExitStack,
        folder: Path,
        count: int,
        drain_delay_s: float,
    ) -> None:
        self._stack = stack
        self._running: dict[int, asyncio.subprocess.Process] = {}
        ports = free_ports(2 * count + 1)
        self.urls = [f"http://127.0.0.1:{port}" for port in ports[:count]]
        self._admin_urls = [f"http://127.0.0.1:{port}" for port in ports[count + 1 :]]
        self._files = []
        for number, port in enumerate(ports[:count]):
            (directory := folder / str(number)).mkdir()
            peers = [
                {"id": f"proxy-{each}", "host": f"127.0.1.1{each}", "peer_port": ports[count]}
                for each in range(count)
            ]
            own: dict[str, Any] = {
                "id": f"proxy-{number}",
                "port": port,
                "admin_port": ports[count + 1 + number],
                "peer_host": f"127.0.1.1{number}",
                "peer_port": ports[count],
                "peers": peers,
                "drain_delay_s": drain_delay_s,
                "drain_s": 60.0,
            }
            self._files.append(config_of(system, directory, **own))

    @property
    def running(self) -> list[str]:
        """Their admin ports."""
        return [self._admin_urls[number] for number in self._running]

    async def start(self, number: int) -> None:
        process = await self._stack.enter_async_context(started_process(self._files[number]))
        await until_logged(process, b"proxy ready")
        assert process.stderr is not None
        self._running[number] = process

    async def stop(self, number: int) -> int:
        """SIGTERM, as to a pod; the exit status."""
        process = self._running.pop(number)
        process.send_signal(signal.SIGTERM)
        await process.communicate()
        assert process.returncode is not None
        return process.returncode


class Endpoints:
    """The proxies that a Service has: those that were ready LAG_S ago."""

    def __init__(self, http: aiohttp.ClientSession, urls: list[str]) -> None:
        self._http, self._urls = http, urls
        self._seen: list[tuple[float, list[str]]] = []

    async def run(self) -> None:
        failures = dict.fromkeys(self._urls, FAILURES)
        while True:
            ready = await asyncio.gather(*map(self._is_ready, self._urls))
            for url, is_ready in zip(self._urls, ready, strict=True):
                failures[url] = 0 if is_ready else failures[url] + 1
            now = [url for url in self._urls if failures[url] < FAILURES]
            self._seen.append((time.monotonic(), now))
            await asyncio.sleep(PERIOD_S)

    async def until(self, count: int) -> None:
        while len(self.known()) != count:
            await asyncio.sleep(0.1)

    def known(self) -> list[str]:
        before_s = time.monotonic() - LAG_S
        return next((urls for at_s, urls in reversed(self._seen) if at_s <= before_s), [])

    async def _is_ready(self, url: str) -> bool:
        try:
            async with self._http.get(
                f"{url}/readyz", timeout=aiohttp.ClientTimeout(1.0)
            ) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def body_of(rng: random.Random, tokens: int) -> dict[str, Any]:
    return {
        "prompt": [rng.randrange(4, 200) for _ in range(8)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }


async def loaded(clients: Clients, load: Load, task: asyncio.Future[None]) -> list[Had]:
    """Send requests at a steady rate, all of them and until the task is done."""
    rng = random.Random(SEED)
    running: list[asyncio.Task[Had]] = []
    while len(running) < load.requests or not task.done():
        number, proxy = len(running), rng.randrange(1 << 20)
        read = clients.read(number % load.requests, load.way, f"key-{number}", proxy)
        running.append(asyncio.create_task(read))
        await asyncio.sleep(1 / load.per_s)
    await task
    return list(await asyncio.gather(*running))


def figures_of(found: list[Had], bodies: list[dict[str, Any]]) -> dict[str, Any]:
    wanted = [expected_ids(each["prompt"], each["max_tokens"]) for each in bodies]
    refusals: Counter[str] = sum((had.refusals for had in found), Counter())
    return {
        "requests": len(found),
        "exact": sum(had.done and had.ids == wanted[had.request] for had in found),
        "failed": sum(had.failure is not None for had in found),
        "asked_again": sum(had.asked > 1 for had in found),
        "resumed": sum(had.breaks > 0 for had in found),
        "refusals": dict(refusals),
    }


async def update(folder: Path) -> dict[str, Any]:
    """Two proxies get SIGTERM one after the other, and start again; clients have no key, and ask
    once.
    """
    return await _run(folder, 2, 2, PLAIN, _updates)


async def scale(folder: Path) -> dict[str, Any]:
    """Two proxies become four, and two again; clients have keys, and resume where they are told."""
    return await _run(folder, 2, 4, WITH_KEYS, _scales)


async def together(folder: Path) -> dict[str, Any]:
    """Two proxies of three get SIGTERM at the same moment, and start again; clients have keys."""
    return await _run(folder, 3, 3, WITH_KEYS, _ends_together)


async def engines(folder: Path) -> dict[str, Any]:
    """Each engine is drained, ends, and is another process a moment later; clients have no key, and
    ask once.
    """
    return await _run(folder, 2, 2, PLAIN, _updates_of_engines)


async def in_turn(folder: Path) -> dict[str, Any]:
    """Two proxies without a delay; the second gets SIGTERM just after the streams of the first have
    come to it, and each starts again at once; clients have keys.
    """
    return await _run(folder, 2, 2, WITH_KEYS, _end_in_turn, drain_delay_s=0.0)


Change = Callable[[ProxyCluster, Proxies, Endpoints, aiohttp.ClientSession], Awaitable[None]]


async def _run(
    folder: Path,
    first: int,
    most: int,
    load: Load,
    change: Change,
    *,
    drain_delay_s: float = DRAIN_DELAY_S,
) -> dict[str, Any]:
    """A run that begins with `first` proxies, of at most `most`."""
    rng = random.Random(SEED)
    bodies = [body_of(rng, load.tokens) for _ in range(load.requests)]
    async with AsyncExitStack() as stack:
        system = await stack.enter_async_context(open_proxy_cluster(pairs=2))
        system.script.pause_s = PAUSE_S
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        )
        proxies = Proxies(system, stack, folder, most, drain_delay_s)
        endpoints = Endpoints(http, proxies.urls)
        for number in range(first):
            await proxies.start(number)
        polling = asyncio.create_task(endpoints.run())
        stack.callback(polling.cancel)
        await endpoints.until(first)
        changing = asyncio.ensure_future(change(system, proxies, endpoints, http))
        clients = Clients(http, endpoints.known, bodies)
        found = await loaded(clients, load, changing)
        states = [await _state(url, http) for url in proxies.running]
    recoveries = sum(len(state["recoveries"]) for state in states)
    return figures_of(found, bodies) | {"recoveries": recoveries}


async def _updates(
    _: ProxyCluster, proxies: Proxies, endpoints: Endpoints, __: aiohttp.ClientSession
) -> None:
    for number in range(2):
        await asyncio.sleep(SETTLE_S)
        assert await proxies.stop(number) == 0
        await proxies.start(number)
        await endpoints.until(2)


async def _updates_of_engines(
    system: ProxyCluster, proxies: Proxies, _: Endpoints, http: aiohttp.ClientSession
) -> None:
    drains = f"{proxies.running[0]}/kvrs/v1/drain"
    for name, engine in system.instances.items():
        await asyncio.sleep(SETTLE_S)
        async with http.post(f"{drains}/{name}?drain_s={ENGINE_DRAIN_S}") as answer:
            assert answer.status == 200, await answer.text()
        while await _streams_at(name, proxies, http):
            await asyncio.sleep(0.1)
        await engine.kill()
        await asyncio.sleep(ENGINE_DOWN_S)
        await engine.restart()
        async with http.delete(f"{drains}/{name}") as answer:
            assert answer.status == 200, await answer.text()
        while not await _is_up(name, engine.epoch, proxies, http):
            await asyncio.sleep(0.1)


async def _streams_at(name: str, proxies: Proxies, http: aiohttp.ClientSession) -> int:
    """How many streams of all proxies an engine has."""
    states = [await _state(url, http) for url in proxies.running]
    streams = [stream for state in states for stream in state["streams"]]
    return sum(name in (stream["prefill"], stream["decode"]) for stream in streams)


async def _is_up(name: str, epoch: int, proxies: Proxies, http: aiohttp.ClientSession) -> bool:
    """True if all proxies use this run of an engine."""
    states = [await _state(url, http) for url in proxies.running]
    rows = [row for state in states for row in state["instances"] if row["id"] == name]
    return all((row["health"], row["epoch"], row["drain"]) == ("up", epoch, None) for row in rows)


async def _state(url: str, http: aiohttp.ClientSession) -> Any:
    async with http.get(f"{url}/kvrs/v1/state") as answer:
        return await answer.json()


async def _ends_together(
    _: ProxyCluster, proxies: Proxies, endpoints: Endpoints, __: aiohttp.ClientSession
) -> None:
    await asyncio.sleep(4 * SETTLE_S)
    assert {*await asyncio.gather(proxies.stop(0), proxies.stop(1))} == {0}
    for number in (0, 1):
        await proxies.start(number)
    await endpoints.until(3)


async def _end_in_turn(
    _: ProxyCluster, proxies: Proxies, endpoints: Endpoints, __: aiohttp.ClientSession
) -> None:
    async def roll(number: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        assert await proxies.stop(number) == 0
        await proxies.start(number)

    await asyncio.sleep(4 * SETTLE_S)
    await asyncio.gather(roll(0, 0.0), roll(1, IN_TURN_S))
    await endpoints.until(2)


async def _scales(
    _: ProxyCluster, proxies: Proxies, endpoints: Endpoints, __: aiohttp.ClientSession
) -> None:
    await asyncio.sleep(SETTLE_S)
    for number in (2, 3):
        await proxies.start(number)
    await endpoints.until(4)
    await asyncio.sleep(SETTLE_S)
    for number in (3, 2):  # One after the other, as a StatefulSet with OrderedReady.
        assert await proxies.stop(number) == 0
    await endpoints.until(2)
    await asyncio.sleep(SETTLE_S)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    options = parser.parse_args()
    record = Record(SEED, timed=False)
    rows = {}
    parts = {
        "update": update,
        "update of engines": engines,
        "scale 2 to 4 to 2": scale,
        "two of three at once": together,
        "two of two in turn": in_turn,
    }
    for name, part in parts.items():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = asyncio.run(part(Path(folder)))
    console = Console(record=True, width=100)
    table = Table("", "requests", "exact", "failed", "asked again", "resumed", "recoveries")
    for name, row in rows.items():
        keys = ("requests", "exact", "failed", "asked_again", "resumed", "recoveries")
        table.add_row(name, *(str(row[key]) for key in keys))
    console.print(table)
    is_void = record.keep(options.out, "proxy_rolls", {"rows": rows}, console.export_text())
    missed = [row for row in rows.values() if row["failed"] or row["exact"] < row["requests"]]
    missed += [rows[name] for name in ("update", "update of engines") if rows[name]["asked_again"]]
    return 1 if missed or is_void else 0


if __name__ == "__main__":
    sys.exit(main())
