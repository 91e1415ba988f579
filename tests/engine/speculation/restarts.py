"""Two real instances of which one is asked."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport
from kvrs.protocol.speculation import SpeculationReport
from kvrs.proving import ProvingConnector, instance_keys
from kvrs_testkit.processes import Processes

PATIENCE_S = 60.0


def two_instances(speculation: dict[str, Any], **cluster: Any) -> Config:
    nodes = [{"id": f"n{n}", "instances": [{"id": f"d{n}", "role": "both"}]} for n in range(2)]
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
        self._url = processes.config.url_of(processes.config.cluster.find(InstanceId("d0"))[1])

    async def report(self) -> SpeculationReport:
        async with self._http.get(f"{self._url}/kvrs/v1/load") as answer:
            report = msgspec.json.decode(await answer.read(), type=LoadReport).speculation
        assert report is not None
        return report

    async def answer(self, prompt: list[int], tokens: int) -> list[int]:
        """Ask d0."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        async with self._http.post(f"{self._url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            ids: list[int] = (await answer.json())["choices"][0]["token_ids"]
        return ids

    async def notice(self, body: bytes) -> int:
        async with self._http.post(f"{self._url}/kvrs/v1/reload", data=body) as answer:
            return answer.status

    async def until_active(self, active: bool) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.report()).active is not active:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def asking(processes: Processes) -> AsyncIterator[Cluster]:
    instances = [one for _, one in processes.config.cluster.instances()]
    connector = ProvingConnector(instance_keys(processes.secret, instances), None)
    async with aiohttp.ClientSession(connector=connector) as http:
        yield Cluster(processes, http)
