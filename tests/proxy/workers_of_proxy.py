"""`kvrs proxy` with several workers, as a process, before the scripted instances of a test."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tests.proxy.proxy_cluster import WITHIN_S, ProxyCluster
from tests.proxy.scripted import SECRET


@dataclass
class WorkersOfProxy:
    """The running proxy. `log` is what it and its workers have logged."""

    process: asyncio.subprocess.Process
    config: Path
    http: aiohttp.ClientSession  # A connection for each request, so that workers take turns.
    log: list[bytes] = field(default_factory=list)
    port: int = 0
    admin_port: int = 0

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

    async def admin(self, path: str, method: str = "GET") -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        async with self.http.request(method, url) as response:
            return response.status, await response.read()

    async def state(self) -> Any:
        return msgspec.json.decode((await self.admin("/kvrs/v1/state"))[1])

    async def proxy_row(self) -> Any:
        return (await self.state())["proxies"][0]

    async def workers(self) -> list[dict[str, Any]]:
        return list((await self.proxy_row())["workers"])

    async def count(self, series: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels; there is at least one."""
        text = (await self.admin("/metrics"))[1].decode()
        samples = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == series and labels.items() <= sample.labels.items()
        ]
        assert samples, f"no sample of {series} {labels}"
        return sum(sample.value for sample in samples)

    async def until_up(self) -> None:
        """Wait until all workers are up, and know each other."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                row = await self.proxy_row()
                states = {each["state"] for each in row["workers"]} | {*row["peers"].values()}
                if states == {"up"} and all("answers" not in each for each in row["workers"]):
                    return
                await asyncio.sleep(0.02)

    async def until_logged(self, words: bytes) -> bytes:
        async with asyncio.timeout(WITHIN_S):
            while not any(words in line for line in self.log):
                assert self.process.returncode is None, b"".join(self.log)
                await asyncio.sleep(0.01)
        return next(line for line in self.log if words in line)

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
    system: ProxyCluster, directory: Path, workers: int = 2, **sections: dict[str, Any]
) -> AsyncIterator[WorkersOfProxy]:
    """A proxy of so many workers, all up; one that does not end is killed."""
    sections["proxy"] = sections.get("proxy", {}) | {"workers": workers}
    config = directory / "workers.yaml"
    config.write_bytes(msgspec.json.encode(document_of(system, **sections)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrs", "proxy", "--config", str(config)),
        env=os.environ | {"KVRS_SECRET": SECRET.decode()},
        stderr=asyncio.subprocess.PIPE,
    )
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        running = WorkersOfProxy(process, config, http)
        reading = asyncio.create_task(running._read_log())
        try:
            line = await running.until_logged(b"proxy ready")
            found = re.search(rb"port=(\d+) admin_port=(\d+) workers=(\d+)", line)
            assert found is not None
            assert int(found[3]) == workers
            running.port, running.admin_port = int(found[1]), int(found[2])
            await running.until_up()
            yield running
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await reading
