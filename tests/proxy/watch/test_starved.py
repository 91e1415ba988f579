"""A proxy whose own event loop was late: it blames no process, and says so."""

import asyncio
import logging

import pytest

from kvrs.cli.findings import Level, ProxyAnswer, cluster_findings
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.virtual_time import virtual_loop
from tests.proxy.conftest import ProxyClusterBuilder


async def starve(system: ProxyCluster) -> None:
    """Let the event loop run for a fifth of each second, for longer than any silence lasts."""
    for _ in range(8):
        virtual_loop().stall(0.8)
        await asyncio.sleep(0.2)


async def test_a_starved_proxy_says_so_once_and_a_calm_one_does_not(
    build: ProxyClusterBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    """Operators see it in the state, the metrics, the log and `kvrs doctor`."""
    system = await build()
    config = system.proxy._config

    before = (await system.state())["proxies"][0]["starved"]
    calm = {each.check for each in cluster_findings(config, await answer(system))}
    with caplog.at_level(logging.WARNING):
        await starve(system)
        await asyncio.sleep(0.6)

    assert before == {"now": False, "spells": 0, "late_s": 0.0, "ago_s": None}
    assert "CPU of the proxy" not in calm
    row = (await system.state())["proxies"][0]
    assert (row["starved"]["now"], row["starved"]["spells"]) == (True, 1)
    assert row["starved"]["late_s"] > 4.0
    assert await system.count("kvrs_proxy_starved") == 1
    assert await system.count("kvrs_proxy_starved_spells_total") == 1
    findings = {each.check: each for each in cluster_findings(config, await answer(system))}
    assert findings["CPU of the proxy"].level is Level.WARNING
    said = [each for each in caplog.records if "starved" in each.message]
    assert len(said) == 1
    await asyncio.sleep(5.0)
    assert await system.count("kvrs_proxy_starved") == 0


async def answer(system: ProxyCluster) -> ProxyAnswer:
    return ProxyAnswer("http://127.0.0.1:1", await system.state())
