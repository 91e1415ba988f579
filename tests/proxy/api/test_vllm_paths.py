"""Paths beside the API of OpenAI that clients and probes of a vLLM use."""

import asyncio
import json

from kvrs import __version__
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder


async def got(system: ProxyCluster, path: str, method: str = "GET") -> tuple[int, bytes]:
    async with system.http.request(method, system.url + path) as answer:
        return answer.status, await answer.read()


async def test_health_is_that_of_the_streams_that_could_start(build: ProxyClusterBuilder) -> None:
    """Empty, as vLLM's; 503 where its engine is dead."""
    system = await build(pairs=1)

    up = await got(system, "/health")
    await system.instances["d0"].kill()
    await system.until(lambda: _is(system, "/readyz", 503))
    down = await got(system, "/health")

    assert (up, down) == ((200, b""), (503, b""))


async def test_a_proxy_that_drains_is_not_healthy(build: ProxyClusterBuilder) -> None:
    system = await build(pairs=1)

    await system.proxy.drain()

    assert (await got(system, "/health"))[0] == 503


async def test_version_and_load_are_told(build: ProxyClusterBuilder) -> None:
    """The engine is kvrs itself here; the load is of open streams."""
    system = await build(pairs=1)
    before = await got(system, "/load")
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    task = asyncio.create_task(system.complete(prompt=[1], max_tokens=4, temperature=0))
    await system.until_streams_hold(2)

    during = await got(system, "/load")
    system.script.gate.set()
    await task

    assert json.loads((await got(system, "/version"))[1]) == {"version": __version__}
    assert [json.loads(body) for _, body in (before, during)] == [
        {"server_load": 0},
        {"server_load": 1},
    ]


async def _is(system: ProxyCluster, path: str, status: int) -> bool:
    return (await got(system, path))[0] == status
