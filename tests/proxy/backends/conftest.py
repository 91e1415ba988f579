"""Fixtures of the tests of backends."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.config.file import parse_config
from kvrs.proxy.server import Proxy
from kvrs_testkit.scripted import SECRET, Script
from kvrs_testkit.scripted_agent import ScriptedAgent
from kvrs_testkit.scripted_server import ScriptedServer
from kvrs_testkit.scripted_sglang import SglangScript
from kvrs_testkit.scripted_vllm import ScriptedVllm, VllmScript
from kvrs_testkit.sglang_cluster import Sglangs, new_servers
from kvrs_testkit.sglang_cluster import document as sglang_document
from kvrs_testkit.vllm_cluster import ADDRESSES, CONFIG, Builder, Servers, Vllms, document


@pytest.fixture
def vllm_model(model: str, tmp_path: Path) -> str:
    (tmp_path / "tokenizer.json").write_bytes((Path(model) / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


@pytest.fixture
async def vllms(vllm_model: str) -> AsyncIterator[Builder]:
    """`await vllms(prepare=lambda servers: ..., wait=True, policy={...})`. With section `backup`
    each node has a scripted agent.
    """
    async with AsyncExitStack() as stack:

        async def start(*servers: ScriptedServer) -> dict[str, int]:
            for server in servers:
                await server.start()
                stack.push_async_callback(server.close)
            return {server.id: server.port for server in servers}

        async def make(
            prepare: Callable[[Servers], None] = lambda _: None,
            wait: bool = True,
            others: dict[str, ScriptedServer] | None = None,
            **sections: Any,
        ) -> Vllms:
            shared = VllmScript()
            servers = {
                name: ScriptedVllm(
                    name, node, role="prefill" if name[0] == "p" else "decode", script=shared
                )
                for name, node in ADDRESSES.items()
            }
            prepare(servers)
            ports = await start(*({**servers, **(others or {})}).values())
            nodes = ("n0", "n1") if "backup" in sections else ()
            agents = {node: ScriptedAgent(f"agent-{node}", node) for node in nodes}
            await start(*agents.values())
            settings = document(
                vllm_model,
                ports,
                {node: agent.port for node, agent in agents.items()},
                **sections,
            )
            proxy = Proxy(parse_config(settings), SECRET)
            await proxy.start()
            stack.push_async_callback(proxy.close)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            named = {agent.id: agent for agent in agents.values()}
            system = Vllms(proxy, Script(), {}, named, http)
            system.shared, system.servers = shared, servers
            if wait:
                await system.until_health(**dict.fromkeys((*servers, *named), "up"))
                for server in servers.values():
                    server.bodies.clear()
            return system

        yield make


@pytest.fixture
async def sglangs(vllm_model: str) -> AsyncIterator[Callable[..., Awaitable[Sglangs]]]:
    """`await sglangs(prepare=lambda servers: ..., wait=True, policy={...})`."""
    directory = Path(vllm_model)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 1 << 16}))
    async with AsyncExitStack() as stack:

        async def make(
            prepare: Callable[[dict[str, Any]], None] = lambda _: None,
            wait: bool = True,
            generation: dict[str, Any] | None = None,
            **sections: Any,
        ) -> Sglangs:
            (directory / "generation_config.json").write_text(json.dumps(generation or {}))
            shared = SglangScript()
            servers = new_servers(shared)
            prepare(servers)
            for server in servers.values():
                await server.start()
                stack.push_async_callback(server.close)
            ports = {name: server.port for name, server in servers.items()}
            settings = sglang_document(vllm_model, ports, **sections)
            proxy = Proxy(parse_config(settings), SECRET)
            await proxy.start()
            stack.push_async_callback(proxy.close)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            system = Sglangs(proxy, Script(), {}, {}, http)
            system.shared, system.servers = shared, servers
            if wait:
                await system.until_health(**dict.fromkeys(servers, "up"))
            return system

        yield make
