"""A proxy in front of scripted instances, on free ports, in the caller's own event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kvrs.config.file import Config, parse_config
from kvrs.protocol.instance import Role
from kvrs.proxy.server import Proxy
from kvrs_testkit.scripted import SECRET, Script, Scripted
from kvrs_testkit.scripted_agent import CAPACITY_BYTES, ScriptedAgent

WITHIN_S = 60.0  # Something becomes true, also on a busy machine.


@dataclass
class ProxyCluster:
    """Everything that a test needs of one cluster."""

    proxy: Proxy
    script: Script
    instances: dict[str, Scripted]
    agents: dict[str, ScriptedAgent]  # One per node where section `backup` turns them on.
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.admin_port}"

    async def complete(self, **fields: Any) -> tuple[int, bytes]:
        """A completion; with `messages`, a chat."""
        return await self.ask(fields)

    async def ask(
        self, fields: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        async with self.http.post(self.url + path, json=fields, headers=headers) as response:
            return response.status, await response.read()

    async def state(self) -> Any:
        async with self.http.get(f"{self.admin_url}/kvrs/v1/state") as response:
            return msgspec.json.decode(await response.read())

    async def metrics(self) -> str:
        async with self.http.get(f"{self.admin_url}/metrics") as response:
            return await response.text()

    async def count(self, series: str, **labels: str) -> float:
        """The sum of the samples with this name and these labels; there is at least one."""
        lines = (line for line in (await self.metrics()).split("\n") if line.startswith(series))
        samples = [
            sample
            for family in text_string_to_metric_families("\n".join(lines))
            for sample in family.samples
            if sample.name == series and labels.items() <= sample.labels.items()
        ]
        assert samples, f"no sample of {series} {labels}"
        return sum(sample.value for sample in samples)

    async def health(self) -> dict[str, str]:
        state = await self.state()
        return {row["id"]: row["health"] for row in (*state["instances"], *state["agents"])}

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Wait for something to become true; a test that waits in vain fails by this limit."""
        async with asyncio.timeout(WITHIN_S):
            while not await holds():
                await asyncio.sleep(0.005)

    async def until_health(self, **wanted: str) -> None:
        async def holds() -> bool:
            health = await self.health()
            return all(health[name] == value for name, value in wanted.items())

        await self.until(holds)

    async def until_streams_hold(self, tokens: int, count: int = 1) -> None:
        """Wait until `count` streams have given their clients at least so many tokens."""

        async def holds() -> bool:
            far_enough = [
                stream
                for stream in (await self.state())["streams"]
                if stream["output_tokens"] >= tokens
            ]
            return len(far_enough) >= count

        await self.until(holds)


@asynccontextmanager
async def open_proxy_cluster(
    *,
    pairs: int = 2,
    roles: tuple[tuple[str, Role], ...] = (("p", Role.PREFILL), ("d", Role.DECODE)),
    nodes: Sequence[Sequence[str]] | None = None,
    wait: bool = True,
    model: str | None = None,
    agent_ports: Mapping[str, int] | None = None,
    gossip_ports: Mapping[str, int] | None = None,
    engine: Callable[[str, str, Role], Any] | None = None,
    prepare: Callable[[dict[str, Scripted]], None] = lambda _: None,
    read: Callable[[], Config] | None = None,
    cluster_drain_s: float = 30.0,
    decodes: Mapping[str, Any] | None = None,
    **sections: dict[str, Any],
) -> AsyncIterator[ProxyCluster]:
    """Nodes n0, n1, ... with p0 and d0, p1 and d1, ..., or with instances of the roles that `nodes`
    names, all up; `sections` are those of the configuration, and a reload takes the one that `read`
    returns.

    Agents that section `backup` or `gossip_ports` calls for are scripted, unless `agent_ports` has
    the ports of real ones by node. The test itself starts gossip at `gossip_ports`. `engine` makes
    instances other than `Scripted` ones of name, node and role. `decodes`: more keys of the
    configuration of each decode instance.
    """
    async with AsyncExitStack() as stack:
        script = Script()
        of_nodes = [[(name[0], Role(name)) for name in node] for node in nodes or ()]
        of_nodes = of_nodes or [list(roles)] * pairs
        instances = {
            f"{letter}{n}": engine(f"{letter}{n}", f"n{n}", role)
            if engine
            else Scripted(f"{letter}{n}", f"n{n}", role=role, script=script, created=100 + n)
            for n, its_roles in enumerate(of_nodes)
            for letter, role in its_roles
        }
        prepare(instances)
        for instance in instances.values():
            await instance.start()
            stack.push_async_callback(instance.close)
        agents: dict[str, ScriptedAgent] = {}
        wants_agents = (
            sections.get("backup", {}).get("mode", "off") != "off" or gossip_ports is not None
        )
        if agent_ports is None and wants_agents:
            capacity = sections.get("backup", {}).get("capacity_bytes", CAPACITY_BYTES)
            agents = {
                f"agent-n{n}": ScriptedAgent(f"agent-n{n}", f"n{n}", capacity_bytes=capacity)
                for n in range(len(of_nodes))
            }
        for agent in agents.values():
            await agent.start()
            stack.push_async_callback(agent.close)
        agent_ports = agent_ports or {agent.node: agent.port for agent in agents.values()}
        sections["cluster"] = {"model": model, "drain_s": cluster_drain_s} | sections.get(
            "cluster", {}
        )
        sections["cluster"]["nodes"] = [
            {
                "id": f"n{n}",
                "agent": {
                    "port": agent_ports.get(f"n{n}", 0),
                    "gossip_port": (gossip_ports or {}).get(f"n{n}", 0),
                },
                "instances": [
                    {
                        "id": f"{letter}{n}",
                        "role": role.value,
                        "port": instances[f"{letter}{n}"].port,
                        **(decodes or {} if role is Role.DECODE else {}),
                    }
                    for letter, role in its_roles
                ],
            }
            for n, its_roles in enumerate(of_nodes)
        ]
        # The tests of self-tests turn them on; for the others every call counts.
        proxy_section = {
            "port": 0,
            "admin_port": 0,
            "load_interval_s": 0.05,
            "self_test": False,
        } | sections.pop("proxy", {})
        document = {"proxy": proxy_section, **sections}
        proxy = Proxy(parse_config(document), SECRET, read=read)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        system = ProxyCluster(proxy, script, instances, agents, http)
        if wait:
            await system.until_health(
                **dict.fromkeys((*instances, *(f"agent-{node}" for node in agent_ports)), "up")
            )
        yield system
