"""An order of an operator at one of several proxies."""

import asyncio
from typing import Any

import pytest

from kvrs.proxy.server import Proxy
from tests.proxy.multi_proxy_cluster import MultiProxyCluster, open_proxy_group
from tests.proxy.scripted import SECRET

pytestmark = pytest.mark.network


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


async def _order(group: MultiProxyCluster, proxy: int, method: str, instance: str) -> int:
    url = f"http://127.0.0.1:{group.proxy(proxy).admin_port}/kvrs/v1/drain/{instance}"
    async with group.http.request(method, url) as answer:
        return answer.status


def _drained(group: MultiProxyCluster, proxy: int) -> list[Any]:
    driver = group.proxy(proxy)._driver
    assert driver is not None
    drains, known = driver.control.drains, driver.control.instances.known
    return [name for name in known if drains.describe(name, 0.0) is not None]


async def _until_drained(
    group: MultiProxyCluster, proxies: tuple[int, ...], names: list[str]
) -> None:
    async with asyncio.timeout(20):
        while any(_drained(group, proxy) != names for proxy in proxies):
            await asyncio.sleep(0.005)
