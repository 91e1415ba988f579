"""An order of an operator at one of several proxies."""

import asyncio
from typing import Any

import pytest

from kvrs.core.model.member import Health
from kvrs.ids import InstanceId
from kvrs.proxy.server import Proxy
from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, open_proxy_group
from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.scripted import SECRET
from tests.proxy.fleet.test_proxy_fleet import further

pytestmark = pytest.mark.network

GONE = ("d9", "d0")


async def test_an_order_to_drain_reaches_all_proxies_and_outlives_each_of_them() -> None:
    """One that starts has it before its first request; the last order counts, wherever given."""
    async with open_proxy_group(3) as group:
        refused = await _order(group, 0, "POST", "d7")
        given = await _order(group, 0, "POST", "d0")
        await _until_drained(group, (0, 1, 2), ["d0"])
        await group.kill(0)
        await group.kill(1)
        group.proxies[1] = proxy = Proxy(group.configs[1], SECRET)
        await proxy.start()
        at_its_start = _drained(group, 1)
        await group.start(0)
        ended = await _order(group, 0, "DELETE", "d0")
        await _until_drained(group, (0, 1, 2), [])
        last = await _order(group, 2, "POST", "d1")
        await _until_drained(group, (0, 1, 2), ["d1"])

    assert (refused, given, ended, last) == (404, 200, 200, 200)
    assert at_its_start == ["d0"]


async def test_an_instance_that_is_added_or_removed_is_so_at_all_proxies() -> None:
    """Also at one that starts, before its first request, and through a reload of a file without
    it.
    """
    async with open_proxy_group(3) as group, further(group.system, "d9") as (row,):
        added = await _change(group, 0, "POST", "instances", row)
        await _until_up(group, (0, 1, 2), {"p0", "d0", "p1", "d1", "d9"})
        again = await _change(group, 1, "POST", "instances", row)
        await group.kill(0)
        await group.kill(1)
        group.proxies[1] = proxy = Proxy(group.configs[1], SECRET)
        await proxy.start()
        at_its_start = set(_instances(group, 1))
        await proxy.reload()
        after_its_reload = set(_instances(group, 1))
        await group.start(0)
        removed = [await _change(group, 2, "DELETE", f"instances/{name}") for name in GONE]
        await _until_up(group, (0, 1, 2), {"p0", "p1", "d1"})
        await group.kill(0)
        await group.start(0)
        cluster = group.proxy(0).reloads.config.cluster
        restarted = {each.id for _, each in cluster.instances()}

    assert (added, again, removed) == (200, 409, [200, 200])
    assert at_its_start == after_its_reload == {"p0", "d0", "p1", "d1", "d9"}
    assert restarted == {"p0", "p1", "d1"}


async def test_what_cannot_be_removed_yet_elsewhere_is_removed_later() -> None:
    """A proxy that sees no other instance of the role keeps the last one until it does."""
    async with open_proxy_group(2) as group:
        driver = group.proxy(1).parts.driver
        drains = driver.control.drains
        drains.begin(InstanceId("d1"), 3600.0, driver.clock())  # Not by an order: here only.

        assert await _change(group, 0, "DELETE", "instances/d0") == 200
        await _until_up(group, (0,), {"p0", "p1", "d1"})
        async with asyncio.timeout(WITHIN_S):
            while not group.proxy(1).reloads.orders.shown():
                await asyncio.sleep(0.005)
        kept = set(_instances(group, 1))
        drains.end(InstanceId("d1"), driver.clock())
        await _until_up(group, (0, 1), {"p0", "p1", "d1"})

    assert kept == {"p0", "d0", "p1", "d1"}


async def test_what_cannot_be_carried_out_keeps_nothing_else_from_it() -> None:
    """Reloads, and orders that come later; it is shown, and carried out when it can be."""
    async with open_proxy_group(2) as group, further(group.system, "d9") as (row,):
        driver, reloads = group.proxy(1).parts.driver, group.proxy(1).reloads
        drains = driver.control.drains
        drains.begin(InstanceId("d1"), 3600.0, driver.clock())  # Not by an order: here only.

        assert await _change(group, 0, "DELETE", "instances/d0") == 200
        async with asyncio.timeout(WITHIN_S):
            while "d0" not in reloads.orders.aside:
                await asyncio.sleep(0.005)
        reloaded = await group.proxy(1).reload()
        shown = await _state(group, 1)
        assert await _change(group, 0, "POST", "instances", row) == 200
        async with asyncio.timeout(WITHIN_S):
            while "d9" not in _instances(group, 1):
                await asyncio.sleep(0.005)
        meanwhile = {*_instances(group, 1)}
        drains.end(InstanceId("d1"), driver.clock())
        await _until_up(group, (0, 1), {"p0", "p1", "d1", "d9"})
        async with asyncio.timeout(WITHIN_S):
            while reloads.orders.aside:
                await asyncio.sleep(0.005)

    assert reloaded.applied == []
    assert list(shown) == ["d0"]
    assert "no instance that is up can do decode" in shown["d0"]
    assert meanwhile == {"p0", "d0", "p1", "d1", "d9"}


async def _state(group: MultiProxyCluster, proxy: int) -> dict[str, str]:
    """Orders that it has set aside, and why."""
    url = f"http://127.0.0.1:{group.proxy(proxy).admin_port}"
    async with group.http.get(f"{url}/metrics") as answer:
        assert "kvrs_fleet_orders_aside 1.0" in await answer.text()
    async with group.http.get(f"{url}/kvrs/v1/state") as answer:
        (row,) = (await answer.json())["proxies"]
    aside: dict[str, str] = row["orders_aside"]
    return aside


async def _change(
    group: MultiProxyCluster, proxy: int, method: str, path: str, body: object = None
) -> int:
    url = f"http://127.0.0.1:{group.proxy(proxy).admin_port}/kvrs/v1/{path}"
    async with group.http.request(method, url, json=body) as answer:
        return answer.status


def _instances(group: MultiProxyCluster, proxy: int) -> dict[InstanceId, Health]:
    driver = group.proxy(proxy).parts.driver
    return {known.id: known.health for known in driver.control.instances.present()}


async def _until_up(group: MultiProxyCluster, proxies: tuple[int, ...], names: set[str]) -> None:
    async with asyncio.timeout(WITHIN_S):
        for proxy in proxies:
            while _instances(group, proxy) != dict.fromkeys(names, Health.UP):
                await asyncio.sleep(0.005)


async def _order(group: MultiProxyCluster, proxy: int, method: str, instance: str) -> int:
    url = f"http://127.0.0.1:{group.proxy(proxy).admin_port}/kvrs/v1/drain/{instance}"
    async with group.http.request(method, url) as answer:
        return answer.status


def _drained(group: MultiProxyCluster, proxy: int) -> list[Any]:
    driver = group.proxy(proxy).parts.driver
    drains, known = driver.control.drains, driver.control.instances.known
    return [name for name in known if drains.describe(name, 0.0) is not None]


async def _until_drained(
    group: MultiProxyCluster, proxies: tuple[int, ...], names: list[str]
) -> None:
    async with asyncio.timeout(WITHIN_S):
        while any(_drained(group, proxy) != names for proxy in proxies):
            await asyncio.sleep(0.005)
