"""A bug in a task that serves all streams."""

import asyncio
import gc
from typing import Any

import pytest

from kvrs.ids import InstanceId, StreamId
from kvrs_testkit.multi_proxy_cluster import open_proxy_group
from tests.proxy.conftest import ProxyClusterBuilder

REQUEST = {"prompt": [1, 2, 3], "max_tokens": 6, "temperature": 0}


async def test_a_bug_in_a_watcher_costs_no_stream(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and counted, the streams flow on, and a death is noticed as before."""
    system = await build()
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    serving = asyncio.create_task(system.proxy.run())
    stream = asyncio.create_task(system.complete(**REQUEST))
    await system.until_streams_hold(2)
    driver = system.proxy.parts.driver
    report, bugs = driver.control.load_reported, [RuntimeError("a bug")]

    def broken(*arguments: Any) -> None:
        if bugs:
            raise bugs.pop()
        report(*arguments)

    monkeypatch.setattr(driver.control, "load_reported", broken)

    async def failed_once() -> bool:
        return await system.count("kvrs_task_failures_total", task="watcher") == 1

    await system.until(failed_once)
    system.script.gate.set()
    status, _ = await stream

    async def all_watched() -> bool:
        return all(one.watches == 1 for one in system.instances.values())

    await system.until(all_watched)
    for one in (system.instances["p1"], system.instances["d1"]):
        await one.kill()
    await system.until_health(p1="down", d1="down", p0="up", d0="up")

    assert status == 200
    assert await system.count("kvrs_worker_deaths_total", worker="d0") == 0
    assert "task ended by a bug" in caplog.text
    assert not serving.done()
    serving.cancel()


async def test_a_bug_that_repeats_ends_the_proxy(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not hidden: a proxy that does not know its instances must not seem alive."""
    system = await build(transfer={"lease_s": 1.0})
    serving = asyncio.create_task(system.proxy.run())
    leases = system.proxy.parts.driver.leases._leases

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(leases, "due", broken)
    leases.hold(InstanceId("p0"), StreamId("s"))

    with pytest.raises(RuntimeError, match="a bug"):
        async with asyncio.timeout(60):
            await serving

    assert await system.count("kvrs_task_failures_total", task="leases") == 3


async def test_closed_proxies_leave_no_tasks() -> None:
    """CPython does not see the CancelledError of a task in a cycle of garbage: with it the task,
    and each request that a frame of it has, would stay for ever.
    """

    def tasks() -> set[int]:
        gc.collect()
        return {id(each) for each in gc.get_objects() if isinstance(each, asyncio.Task)}

    before = tasks()
    async with open_proxy_group(2, pairs=1) as group:
        reader = group.reader()
        await reader.read(0)

    assert reader.done
    assert tasks() - before == set()
