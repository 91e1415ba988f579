"""A proxy in front of real vLLM with the kvrs connector: operators are shown what has happened."""

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrs.config.policy import PolicyName
from kvrs.proxy.server import Proxy
from kvrs_testkit.vllm_servers import PYTHON_ENV, VllmServers, connector_config

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

PROMPT = list(range(5, 45))
TOKENS, CUT, PAGE = 400, 200, 32
DEADLINE_S = 240.0


async def rows(http: aiohttp.ClientSession, proxy: Proxy, key: str) -> Any:
    async with http.get(f"http://127.0.0.1:{proxy.admin_port}/kvrs/v1/state") as answer:
        return (await answer.json())[key]


async def generate(
    http: aiohttp.ClientSession, servers: VllmServers, proxy: Proxy, *, kills: bool
) -> list[int]:
    """A stream, whose server is killed at `CUT` if it `kills`."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True, "cache_salt": f"{kills}"}
    ids: list[int] = []
    url = f"http://127.0.0.1:{proxy.port}/v1/completions"
    async with http.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = msgspec.json.decode(line[6:])
                ids += [token for each in event["choices"] for token in each["token_ids"]]
            if kills and len(ids) >= CUT:
                kills = False
                (stream,) = await rows(http, proxy, "streams")
                servers.kill(stream["decode"])
    return ids


@pytest.mark.skipif(PYTHON_ENV not in os.environ, reason=f"{PYTHON_ENV} names no interpreter")
async def test_restores_are_tested_chosen_and_counted(tmp_path: Path) -> None:
    """By the connector's own count: each server as it comes up, and the stream of a killed one."""
    config = connector_config(tmp_path)
    config = config.model_copy(
        update={"policy": config.policy.model_copy(update={"name": PolicyName.ALWAYS_RESTORE})}
    )
    with VllmServers(config, os.environ[PYTHON_ENV]) as servers:
        servers.start(*(str(node.agent_id) for node in servers.config.cluster.nodes), "d0")
        servers.wait_ready("d0")
        servers.start("d1")
        servers.wait_ready("d1")
        proxy = Proxy(servers.config, servers.secret)
        await proxy.start()
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        try:
            async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(timeout=timeout) as http:
                found: dict[str, Any] = {}
                while [each and each["restores"] for each in found.values()] != [True, True]:
                    await asyncio.sleep(0.1)
                    instances = await rows(http, proxy, "instances")
                    found = {row["id"]: row["self_test"] for row in instances}
                assert all(row["connector"]["differs_from"] == [] for row in instances)

                calm = await generate(http, servers, proxy, kills=False)
                ids = await generate(http, servers, proxy, kills=True)

                assert ids == calm
                (recovery,) = await rows(http, proxy, "recoveries")
                while recovery["loaded_tokens"] is None:
                    await asyncio.sleep(0.1)
                    (recovery,) = await rows(http, proxy, "recoveries")
                history = len(PROMPT) + recovery["produced_tokens"]
                loaded, computed = recovery["loaded_tokens"], recovery["computed_tokens"]
                assert recovery["option"] == "restore"
                assert loaded + computed == history
                assert loaded % PAGE == 0
                assert computed <= 4 * PAGE
        finally:
            await proxy.close()
