"""Links between a proxy and its instances that are slow, flap, or take no connection."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from kvrs.config.file import parse_config
from kvrs.proxy.server import Proxy
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.proxy_process import config_of
from kvrs_testkit.scripted import SECRET, Scripted
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.streams.test_proxy_deaths import all_exact, held_open, release, start


class Link:
    """A relay before an instance: every piece takes its time, and all connections may be cut."""

    def __init__(self, least_s: float = 0.0, max_s: float = 0.0) -> None:
        self._least_s, self._max_s = least_s, max_s
        self._draw = Random(0)
        self._target = 0
        self._is_up = True
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def before(self, instance: Scripted) -> None:
        """Take the place of the instance's port in the configuration."""
        begin = instance.start

        async def start() -> None:
            await begin()
            self._target = instance.port
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            instance.port = self._server.sockets[0].getsockname()[1]

        instance.__dict__["start"] = start

    def cut(self) -> None:
        self._is_up = False
        for writer in list(self._open):
            writer.transport.abort()

    def heal(self) -> None:
        self._is_up = True

    async def close(self) -> None:
        self.cut()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_up:
            writer.transport.abort()
            return
        there, to_there = await asyncio.open_connection("127.0.0.1", self._target)
        self._open |= {writer, to_there}
        for pair in ((reader, to_there), (there, writer)):
            task = asyncio.create_task(self._carry(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(1 << 16):
                if self._max_s:
                    await asyncio.sleep(self._draw.uniform(self._least_s, self._max_s))
                writer.write(piece)
        except OSError:
            pass
        finally:
            self._open.discard(writer)
            writer.close()


@pytest.fixture
async def links() -> AsyncIterator[Callable[..., Link]]:
    async with AsyncExitStack() as stack:

        def make(*delays_s: float) -> Link:
            link = Link(*delays_s)
            stack.push_async_callback(link.close)
            return link

        yield make


@pytest.mark.usefixtures("quick_suspicion")
async def test_a_slow_link_costs_no_stream(
    build: ProxyClusterBuilder, links: Callable[..., Link]
) -> None:
    """Every piece takes 150 to 250 ms either way: nothing is taken for dead, nothing is moved."""

    def prepare(instances: dict[str, Scripted]) -> None:
        for instance in instances.values():
            links(0.15, 0.25).before(instance)

    system = await build(prepare=prepare)

    asked = start(system, 20)

    assert await all_exact(asked)
    assert (await system.state())["recoveries"] == []
    assert await system.count("kvrs_worker_deaths_total") == 0


async def test_a_link_that_flaps_costs_no_stream(
    build: ProxyClusterBuilder, links: Callable[..., Link]
) -> None:
    """Its instance is lost each time, and comes back; streams go on at the other one."""
    link = links()
    system = await build(prepare=lambda instances: link.before(instances["d0"]))
    for _ in range(5):
        asked = await held_open(system, count=4)
        link.cut()
        await system.until_health(d0="down")
        release(system)

        assert await all_exact(asked)
        link.heal()
        await system.until_health(d0="up")


async def test_an_instance_whose_name_has_no_address_costs_nothing(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """It is down, with the reason; the others serve."""
    system = await build(pairs=1)
    async with _second(system, tmp_path, host="no-such-host.invalid", port=1) as (proxy, other):
        status, _ = await other.complete(prompt=[1, 2, 3], max_tokens=5)
        row = await _row(other, "d1")

    assert proxy.port
    assert status == 200
    assert row["health"] == "starting"
    assert "its host name has no address" in row["reason"]


@pytest.mark.network
async def test_a_port_that_takes_no_connection_costs_nothing(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """The backlog of an instance that hangs is full: a connection is never made."""
    system = await build(pairs=1)
    with socket.socket() as full, socket.socket() as filler, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for each in (filler, second):
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        async with _second(system, tmp_path, host="127.0.0.1", port=port) as (_, other):
            status, _ = await other.complete(prompt=[1, 2, 3], max_tokens=5)
            row = await _row(other, "d1")

    assert status == 200
    assert row["health"] == "starting"
    assert "connection lost" in row["reason"]


@asynccontextmanager
async def _second(
    system: ProxyCluster, directory: Path, host: str, port: int
) -> AsyncIterator[tuple[Proxy, ProxyCluster]]:
    """Another proxy before the same instances and `d1`, which is at this address."""
    document = msgspec.json.decode(config_of(system, directory).read_bytes())
    d1 = {"id": "d1", "role": "decode", "host": host, "port": port, "page_port": 9}
    document["cluster"]["nodes"].append({"id": "n9", "instances": [d1]})
    proxy = Proxy(parse_config(document), SECRET)
    await proxy.start()
    try:
        other = replace(system, proxy=proxy)
        await other.until_health(p0="up", d0="up")
        yield proxy, other
    finally:
        await proxy.close()


async def _row(system: ProxyCluster, name: str) -> Any:
    async def has_reason() -> bool:
        rows = (await system.state())["instances"]
        return any(row["id"] == name and row.get("reason") for row in rows)

    await system.until(has_reason)
    (row,) = [row for row in (await system.state())["instances"] if row["id"] == name]
    return row
