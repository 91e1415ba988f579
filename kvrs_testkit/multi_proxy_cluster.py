"""Several proxies before the same instances, which know each other and can be killed one by one."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from kvrs.config.file import Config, parse_config
from kvrs.core.model.member import Health
from kvrs.protocol.secrets import TenantSecret
from kvrs.proxy.mirror.book import RecordBook
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.server import Proxy
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.proxy_cluster import WITHIN_S, ProxyCluster, open_proxy_cluster
from kvrs_testkit.scripted import SECRET
from kvrs_testkit.sse import without_comments

_EVENT = re.compile(rb"(?:id: ([0-9a-f]+:[0-9]+)\n)?data: (.*)\n\n", re.DOTALL)


@dataclass
class Reader:
    """A client of one keyed stream, which resumes it as often as needed. `events` are all that it
    received, from any proxy.
    """

    group: "MultiProxyCluster"
    fields: dict[str, Any]
    key: str
    last: str | None = None
    events: list[bytes] = field(default_factory=list)
    done: bool = False
    statuses: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    async def read(self, proxy: int, tokens: int | None = None, **headers: str) -> int:
        """Send the request to one proxy, and read to the end or so many events; returns the status,
        0 without an answer.
        """
        said = (
            {"Idempotency-Key": self.key}
            | ({} if self.last is None else {"Last-Event-ID": self.last})
            | headers
        )
        path = "/v1/chat/completions" if "messages" in self.fields else "/v1/completions"
        status = 0
        try:
            async with self.group.http.post(
                self.group.url(proxy) + path, json=self.fields | {"stream": True}, headers=said
            ) as response:
                status = response.status
                self.statuses.append(status)
                if status != 200:
                    self.errors.append(msgspec.json.decode(await response.read())["error"]["code"])
                    return status
                while not self.done and (tokens is None or len(self.events) < tokens):
                    raw = await response.content.readuntil(b"\n\n")
                    if not raw:
                        break
                    self._take(without_comments(raw))
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError):
            pass
        return status

    def _take(self, raw: bytes) -> None:
        found = _EVENT.fullmatch(raw)
        assert found is not None, raw
        if found[2] == b"[DONE]":
            self.done = True
        elif found[2].startswith(b'{"error"'):
            self.errors.append(msgspec.json.decode(found[2])["error"]["code"])
        else:
            assert found[1] is not None, "every event of a keyed stream has an id"
            self.last = found[1].decode()
            self.events.append(found[2])

    async def read_all(self, proxy: int) -> None:
        """From one proxy to the next until all has come."""
        async with asyncio.timeout(5 * WITHIN_S):
            while not self.done:
                await self.read(proxy % len(self.group.proxies))
                proxy += 1
                await asyncio.sleep(0 if self.done else 0.02)


@dataclass
class MultiProxyCluster:
    system: ProxyCluster
    configs: list[Config]
    proxies: list[Proxy | None]
    http: aiohttp.ClientSession

    def url(self, proxy: int) -> str:
        return f"http://127.0.0.1:{self.configs[proxy].proxy.port}"

    def proxy(self, number: int) -> Proxy:
        proxy = self.proxies[number]
        assert proxy is not None
        return proxy

    def mirror(self, number: int) -> Mirror:
        return self.proxy(number).parts.mirror

    def book(self, number: int) -> RecordBook:
        return self.mirror(number).book

    def mirror_of_stream(self) -> str | None:
        """The mirror of proxy-0's only stream."""
        (keyed,) = self.mirror(0).streams.values()
        return keyed.outbox.mirror

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something to become true; a test that waits in vain fails by this limit."""
        async with asyncio.timeout(WITHIN_S):
            while not holds():
                await asyncio.sleep(0.005)

    def reader(self, key: str = "k", **fields: Any) -> Reader:
        return Reader(self, {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0} | fields, key)

    async def start(self, number: int, ring: Sequence[bytes] = (SECRET,)) -> None:
        proxy = Proxy(self.configs[number], ring[0], ring[1:])
        await proxy.start()
        self.proxies[number] = proxy
        driver = proxy.parts.driver
        instances = driver.control.instances
        async with asyncio.timeout(WITHIN_S):
            # One that its peers have removed leaves, before it was seen up or after.
            while any(one.health is not Health.UP for one in instances.present()):
                await asyncio.sleep(0.005)

    async def kill(self, number: int) -> None:
        """End the proxy like SIGKILL: it does nothing more, and all its connections are reset."""
        proxy, self.proxies[number] = self.proxy(number), None
        for task in proxy._background:
            task.cancel()
        if proxy._links is not None:
            proxy._links.close()
        for port in proxy._ports:
            port.abort()
        await proxy.close()

    def config_file(self, number: int, directory: Path) -> Path:
        """For a process in place of one of them."""
        document = self.configs[number].model_dump(mode="json")
        instances = [one for node in document["cluster"]["nodes"] for one in node["instances"]]
        for page_port, one in enumerate(instances, 1):
            one["page_port"] = page_port
        path = directory / f"proxy-{number}.yaml"
        path.write_bytes(msgspec.json.encode(document))
        return path

    async def know_each_other(self) -> None:
        alive = [proxy for proxy in self.proxies if proxy is not None]
        async with asyncio.timeout(WITHIN_S):
            while any(len(proxy.parts.mirror.peers.live) < len(alive) - 1 for proxy in alive):
                await asyncio.sleep(0.005)


def record_key(key: str, authorization: str = "") -> str:
    """The key of a stream's record, where no API keys are configured."""
    owner = b"authorization\0" + authorization.encode()
    return TenantSecret([SECRET], owner).record_keys(key)[0]


@asynccontextmanager
async def open_proxy_group(
    count: int = 2,
    *,
    proxy: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[MultiProxyCluster]:
    async with AsyncExitStack() as stack:
        system = await stack.enter_async_context(open_proxy_cluster(**settings))
        ports = free_ports(2 * count)
        document = system.proxy._config.model_dump(mode="json")
        configs = []
        for n in range(count):
            peers = [
                {"id": f"proxy-{other}", "peer_port": ports[count + other]}
                for other in range(count)
                if other != n
            ]
            section = document["proxy"] | {
                "id": f"proxy-{n}",
                "port": ports[n],
                "peer_port": ports[count + n],
                "peers": peers,
            }
            configs.append(parse_config(document | {"proxy": section | (proxy or {})}))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        group = MultiProxyCluster(system, configs, [None] * count, http)

        async def close() -> None:
            for each in group.proxies:
                if each is not None:
                    await each.close()

        stack.push_async_callback(close)
        for n in range(count):
            await group.start(n)
        await group.know_each_other()
        yield group
