"""TLS between the processes of a cluster: real proxies, an engine and an agent, with certificates
of the openssl command.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.config.file import Config, parse_config
from kvrs.config.security import PeerTlsSettings
from kvrs.ids import InstanceId
from kvrs.net import tls
from kvrs.net.admin import AdminClient, AdminError
from kvrs.protocol.instance import NoFault
from kvrs.proxy.server import Proxy
from kvrs_engine.engine.instance import EngineInstance
from kvrs_engine.engine.server import serve_http
from kvrs_lab.load.admin_port import AdminPort
from kvrs_testkit.certificates import MISSING, Authority
from kvrs_testkit.free_ports import free_ports
from tests.agent.agents import SECRET, running

pytestmark = [
    pytest.mark.network,
    pytest.mark.engine,
    pytest.mark.process,
    pytest.mark.usefixtures("tiny_beside"),
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
]

BODY = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@dataclass
class Cluster:
    proxies: list[Proxy]
    http: aiohttp.ClientSession
    ports: dict[str, int]  # Of HTTP within the cluster.

    async def state(self, proxy: int) -> Any:
        url = f"http://127.0.0.1:{self.proxies[proxy].admin_port}/kvrs/v1/state"
        async with self.http.get(url) as answer:
            return await answer.json()

    async def until(self, holds: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(60):
            while not await holds():
                await asyncio.sleep(0.02)

    async def all_up(self) -> bool:
        states = [await self.state(number) for number in range(len(self.proxies))]
        health = [
            *(row["health"] for state in states for row in (*state["instances"], *state["agents"])),
            *(up for state in states for up in state["proxies"][0]["peers"].values()),
        ]
        return set(health) == {"up"}


@asynccontextmanager
async def cluster(
    directory: Path, section: dict[str, str | None], *, allow_faults: bool = False
) -> AsyncIterator[Cluster]:
    """One engine, its agent, and two proxies that are peers."""
    keys = ("engine", "engine pages", "agent", "agent pages", "gossip", "peer 0", "peer 1")
    ports = dict(zip(keys, free_ports(len(keys)), strict=True))

    def config(number: int) -> Config:
        other = 1 - number
        instance = {"id": "e0", "role": "both", "port": ports["engine"]}
        agent = {"port": ports["agent"], "page_port": ports["agent pages"]}
        agent["gossip_port"] = ports["gossip"]
        node = {
            "id": "n0",
            "instances": [instance | {"page_port": ports["engine pages"]}],
            "agent": agent,
        }
        return parse_config(
            {
                "proxy": {
                    "id": f"proxy-{number}",
                    "port": 0,
                    "admin_port": 0,
                    "load_interval_s": 0.05,
                    "peer_port": ports[f"peer {number}"],
                    "peers": [{"id": f"proxy-{other}", "peer_port": ports[f"peer {other}"]}],
                },
                "cluster": {"model": str(directory / "tiny"), "nodes": [node]},
                "backup": {
                    "mode": "local",
                    "directory": str(directory),
                    "capacity_bytes": 1 << 20,
                },
                "gossip": {"enabled": True},
                "security": {"tls": section},
            }
        )

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(config(0)))
        engine = EngineInstance(config(0), InstanceId("e0"), 1, SECRET)
        await stack.enter_async_context(serve_http(engine, allow_faults=allow_faults))
        proxies = [Proxy(config(number), SECRET) for number in range(2)]
        for proxy in proxies:
            await proxy.start()
            stack.push_async_callback(proxy.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        inner = {key: port for key, port in ports.items() if "pages" not in key and key != "gossip"}
        yield Cluster(proxies, http, inner)


async def answers(port: int, context: ssl.SSLContext) -> bool:
    """True if a request gets any answer."""
    url = f"https://127.0.0.1:{port}/healthz"
    with contextlib.suppress(aiohttp.ClientError):
        async with (
            aiohttp.ClientSession() as client,
            client.get(url, ssl=context) as answer,
        ):
            await answer.read()
            return True
    return False


async def test_a_cluster_serves_over_tls_and_no_stranger_gets_a_connection(
    tmp_path: Path,
) -> None:
    """Both ends of every connection have a certificate of the cluster's CA: the secret alone opens
    no port.
    """
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    section = ca.issue("n0").section(ca.cert)
    async with cluster(tmp_path, section) as system:
        await system.until(system.all_up)
        url = f"http://127.0.0.1:{system.proxies[0].port}/v1/completions"
        headers = {"Idempotency-Key": "tls"}
        async with system.http.post(url, json=BODY, headers=headers) as answer:
            status, made = answer.status, await answer.json()
        contexts = {
            "member": ca.client(ca.issue("member")),
            "without": ca.client(),
            "expired": ca.client(ca.issue("expired", days=-1)),
            "stranger": ca.client(other.issue("stranger")),
        }
        reached = {
            (port, name): await answers(number, context)
            for port, number in system.ports.items()
            for name, context in contexts.items()
        }
        urls = [row["url"] for row in (await system.state(0))["instances"]]

    assert status == 200, made
    assert made["usage"]["completion_tokens"] == 5
    assert {name for (_, name), yes in reached.items() if yes} == {"member"}
    assert sum(reached.values()) == len(system.ports) == 4
    assert all(each.startswith("https://") for each in urls)


async def test_faults_and_emptied_caches_reach_instances_over_tls(tmp_path: Path) -> None:
    """`kvrs lab replay --config` sends them so; the secret without a certificate is not enough."""
    ca = Authority(tmp_path)
    section = ca.issue("n0").section(ca.cert)
    certificates = tls.Certificates("security.tls", PeerTlsSettings.model_validate(section))
    async with cluster(tmp_path, section, allow_faults=True) as system:
        await system.until(system.all_up)
        admin = AdminClient(f"http://127.0.0.1:{system.proxies[0].admin_port}")
        (row,) = (await system.state(0))["instances"]

        async with AdminPort(admin, SECRET, certificates) as port:
            emptied = await port.reset_caches()
            await port.inject("e0", row["url"], NoFault())
        async with AdminPort(admin, SECRET) as without:
            with pytest.raises(AdminError, match="certificate"):
                await without.inject("e0", row["url"], NoFault())

    assert emptied


async def test_a_ca_is_replaced_in_a_running_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps are those of docs/guide/security.md: trust both, renew the certificates, remove the
    old one. The cluster serves at every step, and in the end the old CA opens no port.
    """
    monkeypatch.setattr(tls, "LOOK_INTERVAL_S", 0.02)
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    pair, trusted = old.issue("n0"), tmp_path / "trusted.pem"
    trusted.write_bytes(old.cert.read_bytes())
    of_old, of_new = old.issue("client"), new.issue("client")
    both = old.client(of_old), new.client(of_new)
    both[0].load_verify_locations(new.cert)
    both[1].load_verify_locations(old.cert)
    async with cluster(tmp_path, pair.section(trusted)) as system:
        await system.until(system.all_up)

        async def reached(*wanted: bool) -> None:
            async def holds() -> bool:
                found = [
                    (await answers(port, both[0]), await answers(port, both[1]))
                    for port in system.ports.values()
                ]
                return set(found) == {wanted}

            await system.until(holds)
            url = f"http://127.0.0.1:{system.proxies[0].port}/v1/completions"
            async with system.http.post(url, json=BODY) as answer:
                assert answer.status == 200, await answer.text()

        await reached(True, False)
        trusted.write_bytes(old.cert.read_bytes() + new.cert.read_bytes())
        await reached(True, True)
        pair.replace(new.issue("n0"))
        await reached(True, True)
        trusted.write_bytes(new.cert.read_bytes())
        await reached(False, True)

        await system.until(system.all_up)


async def test_a_process_of_another_ca_is_not_used(tmp_path: Path) -> None:
    """Whatever listens at an instance's address without its certificate sees no request."""
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    impostor = other.issue("impostor")
    seen: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read(1))
        writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(impostor.cert, impostor.key)
    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    instance = {"id": "e0", "role": "both", "port": port, "page_port": 9}
    document = {
        "proxy": {"port": 0, "admin_port": 0},
        "cluster": {"nodes": [{"id": "n0", "instances": [instance]}]},
        "security": {"tls": ca.issue("n0").section(ca.cert)},
    }
    proxy = Proxy(parse_config(document), SECRET)
    await proxy.start()
    try:
        async with aiohttp.ClientSession() as http:
            system = Cluster([proxy], http, {})

            async def is_refused() -> bool:
                (row,) = (await system.state(0))["instances"]
                return "certificate" in str(row)

            await system.until(is_refused)
            (row,) = (await system.state(0))["instances"]
    finally:
        await proxy.close()
        server.close()

    assert row["health"] != "up"
    assert not any(seen)
