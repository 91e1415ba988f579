"""`kvrs proxy` with several workers, as processes, before the scripted instances of a test."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvrs_testkit.awaited import forked
from kvrs_testkit.proxy_cluster import WITHIN_S, ProxyCluster
from kvrs_testkit.scripted import SECRET


@dataclass
class WorkersOfProxy:
    """The running proxy: `process` supervises its workers. `log` is what all have logged."""

    process: asyncio.subprocess.Process
    config: Path
    http: aiohttp.ClientSession  # A connection for each request, so that workers take turns.
    log: list[bytes] = field(default_factory=list)
    port: int = 0
    admin_ports: list[int] = field(default_factory=list)  # One for each worker.

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ask(
        self, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        async with self.http.post(
            f"{self.url}/v1/completions", json=fields, headers=headers
        ) as response:
            return response.status, await response.read()

    async def admin(self, path: str, method: str = "GET", worker: int = 0) -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{self.admin_ports[worker]}{path}"
        async with self.http.request(method, url) as response:
            return response.status, await response.read()

    async def states(self) -> list[Any]:
        """The states of all workers."""
        answers = [
            await self.admin("/kvrs/v1/state", worker=worker)
            for worker in range(len(self.admin_ports))
        ]
        return [msgspec.json.decode(body) for _, body in answers]

    async def rows(self) -> list[dict[str, Any]]:
        """The row of each worker about itself."""
        return [state["proxies"][0] for state in await self.states()]

    async def streams(self) -> list[int]:
        """How many streams each worker has."""
        return [len(state["streams"]) for state in await self.states()]

    async def until_up(self, *gone: int) -> None:
        """Wait until all workers are up and know each other, none of them a process of `gone`."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                with suppress(aiohttp.ClientConnectionError):
                    rows = await self.rows()
                    peers = {health for row in rows for health in row["peers"].values()}
                    if peers == {"up"} and not {row["pid"] for row in rows} & {*gone}:
                        return
                await asyncio.sleep(0.02)

    async def until_policy(self, name: str) -> None:
        """Wait until each worker decides by it; what they logged says why one does not."""
        found: list[str] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                while {*(found := [row["policy"] for row in await self.rows()])} != {name}:
                    await asyncio.sleep(0.01)
                return
        raise AssertionError(f"policies: {found}, log: {b''.join(self.log).decode()}")

    async def until_logged(self, *words: bytes) -> bytes:
        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S):
                while self.process.returncode is None:
                    for line in self.log:
                        if all(each in line for each in words):
                            return line
                    await asyncio.sleep(0.01)
        raise AssertionError(f"not logged: {words}, but {b''.join(self.log).decode()}")

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        while line := await self.process.stderr.readline():
            self.log.append(line)


def document_of(system: ProxyCluster, **sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration before the same instances and agents."""
    nodes: dict[str, Any] = {}
    for page_port, one in enumerate(system.instances.values(), 1):
        node = nodes.setdefault(one.node, {"id": one.node, "instances": []})
        node["instances"].append(
            {"id": one.id, "role": one.role.value, "port": one.port, "page_port": page_port}
        )
    for page_port, agent in enumerate(system.agents.values(), 101):
        nodes[agent.node]["agent"] = {"port": agent.port, "page_port": page_port}
    proxy = {"port": 0, "admin_port": 0, "load_interval_s": 0.05, "self_test": False}
    return {
        "cluster": {"nodes": [*nodes.values()]},
        **sections,
        "proxy": proxy | sections.get("proxy", {}),
    }


@asynccontextmanager
async def open_workers(
    system: ProxyCluster,
    directory: Path,
    workers: int = 2,
    *,
    is_forked: bool = True,
    **sections: dict[str, Any],
) -> AsyncIterator[WorkersOfProxy]:
    """A proxy of so many workers, all up; one that does not end is killed. `is_forked`: rather than
    run by their command lines.
    """
    sections["proxy"] = sections.get("proxy", {}) | {"workers": workers}
    config = directory / "workers.yaml"
    config.write_bytes(msgspec.json.encode(document_of(system, **sections)))
    command = ("kvrs", "proxy", "--config", str(config))
    environment = os.environ | {"KVRS_SECRET": SECRET.decode()}
    pipe = asyncio.subprocess.PIPE
    if is_forked:
        process: asyncio.subprocess.Process = await forked(
            *command, environment=environment, stderr=pipe, with_children=True
        )
    else:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *command), env=environment, stderr=pipe
        )
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        running = WorkersOfProxy(process, config, http)
        reading = asyncio.create_task(running._read_log())
        try:
            for worker in range(workers):
                line = await running.until_logged(b"proxy ready", b"worker=proxy-0.%d" % worker)
                found = re.search(rb"port=(\d+) admin_port=(\d+)", line)
                assert found is not None
                running.port = int(found[1])
                running.admin_ports.append(int(found[2]))
            await running.until_up()
            yield running
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            # It ends with the last worker, which may have been left behind.
            await asyncio.wait({reading}, timeout=WITHIN_S)
            reading.cancel()
