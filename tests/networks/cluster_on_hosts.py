"""A cluster of real engines, agents and proxies, each on a host of its own, and clients at the desk
(the host of the test).

n0: p0, agent      n1: d0, agent      n2: d1, agent      f0: proxy-0      f1: proxy-1
"""

import asyncio
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
import msgspec

from kvrs.config.file import ADMIN_ENV_NAME, Config, parse_config
from kvrs.ids import InstanceId
from kvrs.net.proving import ProvingConnector, agent_keys, instance_keys
from kvrs.protocol.instance import AgentReport, LoadReport
from kvrs_testkit.networks import Network
from kvrs_testkit.processes import ForkedProcesses
from kvrs_testkit.sse import without_comments

HTTP, PAGES, GOSSIP, ADMIN, PEERS = 8000, 9000, 7946, 8001, 8002
AGENT, AGENT_PAGES = 7001, 7002
PACE = "opt-13b-a100-vllm-tp1"  # About 20 ms per token: streams last long enough for the faults.
PROXIES = ("proxy-0", "proxy-1")
NODES = {"n0": ("p0", "prefill"), "n1": ("d0", "decode"), "n2": ("d1", "decode")}
FRONTS = {"proxy-0": "f0", "proxy-1": "f1"}
ADMIN_TOKEN = "a token for these tests only"
_PATIENCE_S = 120.0
Report = TypeVar("Report")


class ClusterOnHosts(ForkedProcesses):
    """The caller makes and removes the network."""

    def __init__(
        self, network: Network, model: str, *, gossip: bool = True, **sections: Any
    ) -> None:
        self.network, self._model = network, model
        self._hosts = dict(FRONTS)
        for host, (instance, _) in NODES.items():
            self._hosts |= {instance: host, f"agent-{host}": host}
        self._sections = {"gossip": {"enabled": gossip}} | sections
        super().__init__(self.front(PROXIES[0], None))

    def __enter__(self) -> Self:
        super().__enter__()
        self._environment[ADMIN_ENV_NAME] = ADMIN_TOKEN
        return self

    def __exit__(self, *error: object) -> None:
        # Killed, because instances that drain wait for transfers.
        for name, _ in NODES.values():
            if name in self._running:
                self.kill(name)
        super().__exit__(*error)

    def front(self, proxy: str, of: Config | None = None) -> Config:
        """The configuration of one proxy."""
        addresses = self.network.addresses
        others = [name for name in PROXIES if name != proxy]
        peers = [
            {"id": name, "host": addresses[FRONTS[name]], "peer_port": PEERS} for name in others
        ]
        ports = {"port": HTTP, "admin_port": ADMIN, "gossip_port": GOSSIP, "peer_port": PEERS}
        keys = ("host", "admin_host", "peer_host", "gossip_host")
        hosts = dict.fromkeys(keys, addresses[FRONTS[proxy]])
        section = {"id": proxy, "allow_anonymous": True, "peers": peers, **hosts, **ports}
        if of is not None:
            return parse_config(of.model_dump(mode="json") | {"proxy": section})
        nodes = [self._node(host, *instance) for host, instance in NODES.items()]
        engine = {"pace": PACE, "pages": 512, "max_model_len": 1024}
        cluster = {"model": self._model, "nodes": nodes, "engine": engine}
        return parse_config({"proxy": section, "cluster": cluster, **self._sections})

    def _node(self, host: str, instance: str, role: str) -> dict[str, Any]:
        address = self.network.addresses[host]
        agent = {"host": address, "port": AGENT, "page_port": AGENT_PAGES, "gossip_port": GOSSIP}
        one = {"id": instance, "role": role, "host": address, "port": HTTP, "page_port": PAGES}
        return {"id": host, "instances": [one], "agent": agent}

    def _resolved(self, config: Config) -> Config:
        return config  # On hosts of their own all ports are free.

    def _network(self, name: str) -> Path:
        return self.network.path(self._hosts[name])

    def start_front(self, *proxies: str) -> None:
        for name in proxies:
            self.start_proxy(self.front(name, self.config), name)

    def log(self, name: str) -> str:
        """The log of its latest run."""
        return self._log(name).read_text(errors="replace")

    def ends_of_logs(self) -> str:
        """The last lines of each process."""
        return "".join(
            f"\n--- {name}\n" + "\n".join(self.log(name).splitlines()[-8:])
            for name in self._running
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pid(name), number)


class Clients:
    """HTTP clients at the desk."""

    def __init__(self, cluster: ClusterOnHosts) -> None:
        self.cluster = cluster

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        timeout = aiohttp.ClientTimeout(total=_PATIENCE_S)
        self.http = await self._stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        nodes, secret = self.cluster.config.cluster.nodes, self.cluster.secret
        instances = [one for node in nodes for one in node.instances]
        keys = {**agent_keys(secret, nodes), **instance_keys(secret, instances)}
        self._inner_http = await self._stack.enter_async_context(
            aiohttp.ClientSession(connector=ProvingConnector(keys), timeout=timeout)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def url(self, proxy: str, port: int = HTTP) -> str:
        return f"http://{self.cluster.network.addresses[FRONTS[proxy]]}:{port}"

    async def ask(self, proxy: str, prompt: list[int], tokens: int) -> tuple[int, ...]:
        """The token ids of a whole answer."""
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        async with self.http.post(f"{self.url(proxy)}/v1/completions", json=body) as answer:
            content = await answer.json()
            assert answer.status == 200, content
            return tuple(content["choices"][0]["token_ids"])

    def ask_all(
        self, proxy: str, prompts: list[list[int]], tokens: int
    ) -> list[asyncio.Task[tuple[int, ...]]]:
        return [asyncio.create_task(self.ask(proxy, prompt, tokens)) for prompt in prompts]

    async def state(self, proxy: str) -> Any:
        headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
        url = f"{self.url(proxy, ADMIN)}/kvrs/v1/state"
        async with self.http.get(url, headers=headers) as answer:
            return await answer.json()

    async def load(self, instance: str) -> LoadReport:
        return await self._inner(f"{self._instance_url(instance)}/kvrs/v1/load", LoadReport)

    async def agent(self, node: str) -> AgentReport:
        return await self._inner(
            f"http://{self.cluster.network.addresses[node]}:{AGENT}/kvrs/v1/holdings", AgentReport
        )

    def _instance_url(self, instance: str) -> str:
        return next(
            one.url
            for _, one in self.cluster.config.cluster.instances()
            if one.id == InstanceId(instance)
        )

    async def _inner(self, url: str, kind: type[Report]) -> Report:
        async with self._inner_http.get(url) as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=kind)

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a condition; the limit fails a test that waits in vain, with what the processes
        said last.
        """
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not await holds():
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise AssertionError(
                f"not within {_PATIENCE_S:g} s{self.cluster.ends_of_logs()}"
            ) from error

    async def until_all_up(self, *proxies: str) -> None:
        """Wait until instances and agents are up for each proxy."""

        async def are_up() -> bool:
            states = [await self.state(proxy) for proxy in proxies]
            rows = [row for state in states for row in (*state["instances"], *state["agents"])]
            return all(row["health"] == "up" for row in rows)

        await self.until(are_up)

    async def until_decoding(self, proxy: str, count: int, tokens: int = 3) -> list[Any]:
        """Wait for so many streams with tokens; return their rows."""
        rows: list[Any] = []

        async def have_come() -> bool:
            rows[:] = [
                row
                for row in (await self.state(proxy))["streams"]
                if row["output_tokens"] >= tokens
            ]
            return len(rows) >= count

        await self.until(have_come)
        return rows


class Keyed:
    """A client of one stream with a key, which resumes at its position."""

    def __init__(self, clients: Clients, prompt: list[int], tokens: int) -> None:
        self._clients = clients
        self._body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        self._headers = {"Idempotency-Key": secrets.token_hex(16)}
        self.ids: list[int] = []
        self.done = False

    async def read(self, proxy: str, events: int | None = None) -> str | None:
        """Read from one proxy until the end or so many events; return the code of an error, if
        one came.
        """
        url = f"{self._clients.url(proxy)}/v1/completions"
        async with self._clients.http.post(
            url, json=self._body | {"stream": True}, headers=self._headers
        ) as answer:
            if answer.status != 200:
                return str((await answer.json())["error"]["code"])
            while not self.done and (events is None or len(self.ids) < events):
                raw = without_comments(await answer.content.readuntil(b"\n\n"))
                *named, data = raw.strip().split(b"\n")
                if data == b"data: [DONE]":
                    self.done = True
                    continue
                event = msgspec.json.decode(data.removeprefix(b"data: "))
                if "error" in event:
                    return str(event["error"]["code"])
                self._headers["Last-Event-ID"] = named[0].removeprefix(b"id: ").decode()
                for choice in event["choices"]:
                    self.ids += choice.get("token_ids") or []
        return None
