"""Real instances that are asked directly."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.net.proving import ProvingConnector, instance_keys
from kvrs.protocol.instance import LoadReport, SpeculationReport
from kvrs_testkit.processes import Processes

PATIENCE_S = 60.0


def instances_of(
    speculation: dict[str, Any], count: int = 2, roles: Sequence[str] = (), **cluster: Any
) -> Config:
    nodes = [
        {"id": f"n{n}", "instances": [{"id": f"d{n}", "role": role}]}
        for n, role in enumerate(roles or ["both"] * count)
    ]
    return parse_config(
        {
            "cluster": {"nodes": nodes, **cluster},
            "gossip": {"enabled": False},
            "speculation": speculation,
        }
    )


class Cluster:
    def __init__(self, processes: Processes, http: aiohttp.ClientSession) -> None:
        self.processes, self._http = processes, http

    def _url(self, name: str) -> str:
        config = self.processes.config
        return config.url_of(config.cluster.find(InstanceId(name))[1])

    async def load(self, name: str = "d0") -> LoadReport:
        async with self._http.get(f"{self._url(name)}/kvrs/v1/load") as answer:
            return msgspec.json.decode(await answer.read(), type=LoadReport)

    async def report(self, name: str = "d0") -> SpeculationReport:
        report = (await self.load(name)).speculation
        assert report is not None
        return report

    async def until(
        self, holds: Callable[[SpeculationReport], bool], name: str = "d0"
    ) -> SpeculationReport:
        async with asyncio.timeout(PATIENCE_S):
            while not holds(report := await self.report(name)):
                await asyncio.sleep(0.02)
        return report

    async def answer(
        self, prompt: list[int], tokens: int, name: str = "d0", **fields: Any
    ) -> list[int]:
        """The ids of a stream, greedy if nothing else is asked for."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, **fields}
        async with self._http.post(f"{self._url(name)}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            ids: list[int] = (await answer.json())["choices"][0]["token_ids"]
        return ids

    async def notice(self, body: bytes) -> int:
        async with self._http.post(f"{self._url('d0')}/kvrs/v1/reload", data=body) as answer:
            return answer.status


@asynccontextmanager
async def asking(processes: Processes) -> AsyncIterator[Cluster]:
    instances = [one for _, one in processes.config.cluster.instances()]
    connector = ProvingConnector(instance_keys(processes.secret, instances), None)
    async with aiohttp.ClientSession(connector=connector) as http:
        yield Cluster(processes, http)
