"""The kvrs connector in real vLLM: streams of a killed server go on from the pages that an agent
has.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrs.config.cluster import InstanceSettings
from kvrs.ids import StreamId
from kvrs.protocol.connector import connector_key, seal
from kvrs.protocol.instance import (
    AgentInfo,
    AgentReport,
    CheckpointTarget,
    ConnectorReport,
    KvrsParams,
    LoadReport,
    SourceRange,
)
from kvrs.protocol.secrets import Scope, ScopedKey, scoped_key
from kvrs.proving import Address, ProvingConnector, agent_keys
from kvrs_testkit.vllm_servers import (
    OLDEST_PYTHON_ENV,
    PYTHON_ENV,
    VllmServers,
    connector_config,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
]

PROMPT = list(range(5, 45))
TOKENS, CUT = 600, 300
STREAM = StreamId("ab" * 16)
DEADLINE_S = 240.0


@asynccontextmanager
async def clients(servers: VllmServers) -> AsyncIterator["Clients"]:
    keys: dict[Address, ScopedKey] = {
        (each.host, each.connector_port): scoped_key(servers.secret, Scope.INSTANCE, each.id)
        for _, each in servers.config.cluster.instances()
    }
    agents = agent_keys(servers.secret, servers.config.cluster.nodes)
    async with (
        aiohttp.ClientSession() as http,
        aiohttp.ClientSession(connector=ProvingConnector({**keys, **agents})) as proven,
    ):
        yield Clients(servers, http, proven)


class Clients:
    def __init__(
        self, servers: VllmServers, http: aiohttp.ClientSession, proven: aiohttp.ClientSession
    ) -> None:
        self.servers, self.http, self.proven = servers, http, proven

    async def get(self, url: str, kind: Any) -> Any:
        async with self.proven.get(url) as answer:
            return msgspec.json.decode(await answer.read(), type=kind)

    async def report(self, instance: InstanceSettings) -> ConnectorReport:
        url = f"http://{instance.host}:{instance.connector_port}/kvrs/v1/load"
        report: LoadReport = await self.get(url, LoadReport)
        assert report.connector is not None
        return report.connector

    async def generate(
        self,
        instance: InstanceSettings,
        prompt: list[int],
        tokens: int,
        params: KvrsParams | None = None,
        kill_at: int | None = None,
        salt: str | None = None,
    ) -> list[int]:
        body: dict[str, Any] = {
            "model": self.servers.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        if params is not None:
            sealed = seal(params, connector_key(self.servers.secret, instance.id))
            body["kv_transfer_params"] = {"kvrs": msgspec.to_builtins(sealed)}
        ids: list[int] = []
        async with self.http.post(instance.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            try:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        event = msgspec.json.decode(line[6:])
                        ids += event["choices"][0].get("token_ids") or []
                        if kill_at is not None and len(ids) >= kill_at:
                            await asyncio.sleep(0.3)  # The gathered pages are on their way.
                            self.servers.kill(str(instance.id))
                            kill_at = None
            except aiohttp.ClientPayloadError:
                pass
        return ids


@pytest.mark.skipif(PYTHON_ENV not in os.environ, reason=f"{PYTHON_ENV} names no interpreter")
@pytest.mark.parametrize("oldest", ["", "d0", "d1"])
async def test_a_killed_server_s_stream_is_restored_from_an_agent(
    tmp_path: Path, oldest: str
) -> None:
    """Nearly all of its history is loaded, none of a wrong page, and the tokens are the same; also
    out of the oldest version of vLLM into the newest, and back.
    """
    if oldest and OLDEST_PYTHON_ENV not in os.environ:
        pytest.skip(f"{OLDEST_PYTHON_ENV} names no interpreter")
    others = {oldest: os.environ[OLDEST_PYTHON_ENV]} if oldest else {}
    with VllmServers(connector_config(tmp_path), os.environ[PYTHON_ENV], **others) as servers:
        (_, d0), (n1, d1) = servers.config.cluster.instances()
        agents = [str(node.agent_id) for node in servers.config.cluster.nodes]
        servers.start(*agents, "d0")
        servers.wait_ready("d0")
        servers.start("d1")
        servers.wait_ready("d1")
        async with asyncio.timeout(DEADLINE_S), clients(servers) as client:
            calm = await client.generate(d1, PROMPT, TOKENS, salt="calm")
            target = CheckpointTarget(n1.agent_id, 8 << 20)
            first = KvrsParams(STREAM, 1, len(PROMPT), checkpoints=[target])
            cut = await client.generate(d0, PROMPT, TOKENS, first, kill_at=CUT)
            assert CUT <= len(cut) < TOKENS

            agent: AgentInfo = await client.get(n1.agent.url + "/kvrs/v1/agent", AgentInfo)
            held: AgentReport = await client.get(n1.agent.url + "/kvrs/v1/holdings", AgentReport)
            pages = held.pages[STREAM]
            assert pages * 32 >= 0.9 * CUT
            source = SourceRange(n1.agent_id, 0, pages, agent.epoch)
            again = KvrsParams(STREAM, 2, len(PROMPT), sources=[source])
            rest = await client.generate(d1, PROMPT + cut, TOKENS - len(cut), again)

            assert cut + rest == calm
            report = await client.report(d1)
            assert report.pages_loaded == pages
            assert (report.pages_damaged, report.off_reason) == (0, None)
            # Parameters of anybody else are served without pages.
            forged = KvrsParams(STREAM, 3, len(PROMPT), sources=[source])
            servers.secret, own = b"x" * 32, servers.secret
            assert await client.generate(d1, PROMPT, 20, forged, salt="forged") == calm[:20]
            servers.secret = own
            assert (await client.report(d1)).pages_loaded == pages
