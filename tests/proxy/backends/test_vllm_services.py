"""Instances that are the addresses of host names, which come and go in DNS."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from kvrs.config.file import Config, parse_config
from kvrs.net.names import all_addresses
from kvrs.proxy.fleet import discovery
from kvrs.proxy.server import Proxy
from kvrs_testkit.scripted import SECRET, Script
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.vllm_cluster import PROMPT, TOKENS, Vllms, document
from tests.proxy.backends.at_addresses import D2, D3, P2, three_servers

PREFILL, DECODE = "prefill.test", "decode.test"


class _Named(Vllms):
    """Servers at addresses of loopback, and what DNS says of them."""

    names: dict[str, set[str]]
    looked_up: int = 0
    config: Config

    async def lookup(self, host: str) -> frozenset[str]:
        self.looked_up += 1
        if host not in self.names:
            raise OSError(-3, "Temporary failure in name resolution")
        return frozenset(self.names[host])

    async def until_looked_up(self) -> None:
        """Both names several times from now on."""
        wanted = self.looked_up + 6

        async def is_so() -> bool:
            return self.looked_up >= wanted

        await self.until(is_so)

    async def until_there(self, *names: str) -> None:
        async def is_so() -> bool:
            return {row["id"] for row in (await self.state())["instances"]} == {*names}

        await self.until(is_so)

    async def readiness(self) -> int:
        async with self.http.get(f"{self.url}/readyz") as answer:
            return answer.status


@pytest.fixture
async def named(vllm_model: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[_Named]:
    """One prefill and two decode servers; the names have no address yet."""
    monkeypatch.setattr(discovery, "LOOK_UP_S", 0.05)
    async with AsyncExitStack() as stack:
        shared, servers, ports = await three_servers(stack)
        rows = [
            {"id": role, "host": f"{role}.test", "port": port, "role": role}
            for role, port in ports.items()
        ]
        whole: dict[str, Any] = document(vllm_model, {"p0": 0, "d0": 0, "d1": 0})
        whole["cluster"] |= {"nodes": [], "services": rows, "drain_s": 0.0}
        http = await stack.enter_async_context(aiohttp.ClientSession())
        config = parse_config(whole)
        proxy = Proxy(config, SECRET)
        system = _Named(proxy, Script(), {}, {}, http)
        system.names, system.config = {}, config
        system.shared, system.servers = shared, servers
        monkeypatch.setattr(discovery, "all_addresses", system.lookup)
        await proxy.start()
        stack.push_async_callback(proxy.close)
        yield system


async def test_an_address_comes_and_another_goes_without_a_lost_token(named: _Named) -> None:
    named.names = {PREFILL: {"127.0.0.2"}, DECODE: {"127.0.0.2"}}
    await named.until_there(P2, D2)
    await named.until_health(**{P2: "up", D2: "up"})
    named.shared.gate, named.shared.gate_at = asyncio.Event(), 3
    asked = [asyncio.create_task(named.ids()) for _ in range(3)]
    await named.until_streams_hold(3, count=3)

    named.names[DECODE] = {"127.0.0.3"}
    await named.until_there(P2, D3)
    named.shared.gate.set()

    assert await asyncio.gather(*asked) == [expected_ids(PROMPT, TOKENS)] * 3
    assert {(of, to) for _, of, to in await named.causes()} == {(D2, D3)}
    assert named.shared.violations == []


async def test_the_version_is_told_when_an_instance_has_gone(named: _Named) -> None:
    """It is that of the others."""
    named.names = {DECODE: {"127.0.0.2", "127.0.0.3"}}
    await named.until_there(D2, D3)
    named.names[PREFILL] = {"127.0.0.2"}
    await named.until_there(D2, D3, P2)
    await named.until_health(**{D2: "up", D3: "up", P2: "up"})
    named.names[DECODE] = {"127.0.0.3"}
    await named.until_there(D3, P2)

    async with named.http.get(f"{named.url}/version") as answer:
        told = answer.status, await answer.json()

    assert told == (200, {"version": "0.32.0"})


async def test_dns_that_fails_or_is_empty_changes_nothing(named: _Named) -> None:
    """Nor does an address that appears and is never up take the place of the last one that is."""
    named.names = {PREFILL: {"127.0.0.2"}, DECODE: {"127.0.0.2", "127.0.0.3"}}
    await named.until_there(P2, D2, D3)
    await named.until_health(**{P2: "up", D2: "up", D3: "up"})

    named.names = {}
    await named.until_looked_up()
    await named.until_there(P2, D2, D3)
    named.names = {PREFILL: set(), DECODE: set()}
    await named.until_looked_up()
    await named.until_there(P2, D2, D3)
    named.names = {PREFILL: {"127.0.0.2"}, DECODE: {"127.0.0.9"}}
    # One of two leaves, the last one that is up stays.
    await named.until_there(P2, D3, "decode-127.0.0.9")
    await named.until_looked_up()
    await named.until_there(P2, D3, "decode-127.0.0.9")

    assert await named.ids() == expected_ids(PROMPT, TOKENS)


async def test_a_proxy_without_an_address_is_not_ready(named: _Named) -> None:
    await named.until_looked_up()
    before = await named.readiness()
    named.names = {PREFILL: {"127.0.0.2"}, DECODE: {"127.0.0.2"}}
    await named.until_there(P2, D2)
    await named.until_health(**{P2: "up", D2: "up"})

    assert (before, await named.readiness()) == (503, 200)


async def test_a_proxy_that_starts_knows_its_instances(named: _Named) -> None:
    """Before its first request."""
    named.names = {PREFILL: {"127.0.0.2"}, DECODE: {"127.0.0.2"}}
    proxy = Proxy(named.config, SECRET)
    await proxy.start()
    known = {each.id for _, each in proxy.reloads.config.cluster.instances()}
    await proxy.close()

    assert known == {P2, D2}


async def test_a_name_is_looked_up_by_the_machine() -> None:
    found = await all_addresses("localhost")

    assert found
    assert found <= {"127.0.0.1", "::1"}
    assert await all_addresses("127.0.0.7") == {"127.0.0.7"}
