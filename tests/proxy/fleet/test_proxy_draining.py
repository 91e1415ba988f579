"""Instances and proxies that are told to end: what they have goes on elsewhere first."""

import asyncio
import signal
from typing import Any

import msgspec
import pytest

from kvrs.config.file import Config
from kvrs.proxy import server
from kvrs.proxy.mirror.headers import ResumeRequest
from kvrs.proxy.mirror.records import Record
from kvrs_testkit.multi_proxy_cluster import open_proxy_group
from kvrs_testkit.proxy_cluster import WITHIN_S, ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.streams.test_proxy_deaths import all_exact, held_open, release


async def test_the_only_one_of_its_kind_keeps_its_streams_until_another_one_comes(
    build: ProxyClusterBuilder,
) -> None:
    """It says so again and again, for that."""
    system = await build()
    await system.instances["d1"].kill()
    await system.until_health(d1="down")
    asked = await held_open(system, count=2)

    system.instances["d0"].draining = True
    await system.until(lambda: _drains(system, "d0"))
    alone = [row["decode"] for row in (await system.state())["streams"]]
    await system.instances["d1"].restart()
    await system.until(lambda: _all_on(system, "d1"))
    release(system)

    assert alone == ["d0", "d0"]
    assert await all_exact(asked)
    assert {row["cause"] for row in (await system.state())["recoveries"]} == {
        "moved: its instance is about to end"
    }


async def test_a_proxy_without_a_peer_does_not_hand_over_its_streams() -> None:
    """A stream with a key that cannot be resumed anywhere may run to its end like any other."""
    async with open_proxy_group(2, proxy={"drain_s": WITHIN_S}) as group:
        gate = group.system.script.gate = asyncio.Event()
        group.system.script.gate_at = 3
        await group.kill(1)
        mirror = group.proxy(0).parts.mirror
        async with asyncio.timeout(WITHIN_S):
            while mirror.peers.live:
                await asyncio.sleep(0.005)
        reader = group.reader()
        reading = asyncio.create_task(reader.read(0))
        async with asyncio.timeout(WITHIN_S):
            while len(reader.events) < 3:
                await asyncio.sleep(0.005)

        draining = asyncio.create_task(group.proxy(0).drain())
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(reading, draining)

    assert reader.done
    assert reader.errors == []


async def _all_on(system: ProxyCluster, name: str) -> bool:
    return {row["decode"] for row in (await system.state())["streams"]} == {name}


async def _drains(system: ProxyCluster, name: str) -> bool:
    rows = (await system.state())["instances"]
    return any(row["id"] == name and row["load"]["draining"] for row in rows)


async def test_a_stream_that_ends_as_it_is_moved_is_forgotten_by_everybody(
    build: ProxyClusterBuilder,
) -> None:
    """Its last token and its move come at once, and the policy asks for an attempt of a stream that
    is over.
    """
    system = await build(policy={"recovery": {"gather_s": 0.0}})
    asked = await held_open(system)
    driver = system.proxy.parts.driver
    (live,) = driver.streams.values()
    live.journal.finish_reason, live.journal.usage_sent = "length", True

    assert live.instance is not None
    system.instances[live.instance].draining = True
    await asyncio.gather(*asked)

    assert sum(driver.control.policy.snapshot()["streams"].values()) == 0


async def test_a_resume_that_is_looked_up_while_its_proxy_is_told_to_end_does_not_begin_there() -> (
    None
):
    """All that lived there has been handed over by then, and this one would be cut off."""
    async with open_proxy_group(2) as group:
        mirror, api = group.mirror(0), group.proxy(0).parts.api
        find = mirror.find

        async def told_meanwhile(resume: ResumeRequest) -> Record | None:
            api.draining = True
            return await find(resume)

        mirror.find = told_meanwhile  # type: ignore[method-assign]
        reader = group.reader()

        assert await reader.read(0) == 503
        await reader.read_all(1)

    assert reader.errors == ["shutting_down"]


async def order(system: ProxyCluster, method: str, path: str) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{system.proxy.admin_port}/kvrs/v1/drain/{path}"
    async with system.http.request(method, url) as answer:
        return answer.status, msgspec.json.decode(await answer.read())


async def decoders_of(system: ProxyCluster) -> list[str]:
    """Where streams that begin now decode."""
    request = {"prompt": [1, 2, 3], "max_tokens": 3}
    before = _generated(system)
    for _ in range(4):
        assert (await system.ask(request))[0] == 200
    after = _generated(system)
    return [name for name in after if name.startswith("d") and after[name] > before[name]]


def _generated(system: ProxyCluster) -> dict[str, int]:
    """Requests that each instance computed; its watch makes calls of its own."""
    return {
        name: sum(call.startswith("POST ") for call in one.calls)
        for name, one in system.instances.items()
    }


async def test_an_operator_drains_an_instance_and_ends_that(build: ProxyClusterBuilder) -> None:
    """Streams that run there may end; new ones go elsewhere until the order is withdrawn."""
    system = await build()
    asked = await held_open(system, count=4)
    rows = (await system.state())["streams"]
    on_d0 = [row["id"] for row in rows if row["decode"] == "d0"]

    ordered = await order(system, "POST", "d0?drain_s=600")
    state = await system.state()
    shown = {row["id"]: row["drain"] is not None for row in state["instances"]}
    draining = await system.count("kvrs_worker_draining", worker="d0")
    stayed = [row["id"] for row in state["streams"] if row["decode"] == "d0"]
    release(system)
    exact = await all_exact(asked)
    meanwhile = await decoders_of(system)
    ended = await order(system, "DELETE", "d0")

    assert ordered == (200, {"instance": "d0", "drain_s": 600.0})
    assert shown == {"p0": False, "d0": True, "p1": False, "d1": False}
    assert draining == 1
    assert stayed == on_d0 != []
    assert exact
    assert meanwhile == ["d1"]
    assert ended == (200, {"instance": "d0", "drain_s": None})
    assert await decoders_of(system) == ["d0"]
    assert await system.count("kvrs_worker_draining", worker="d0") == 0


async def test_what_runs_on_a_drained_instance_is_moved_when_its_time_is_over(
    build: ProxyClusterBuilder,
) -> None:
    """Without a token lost, repeated or changed."""
    system = await build()
    asked = await held_open(system, count=4)

    await order(system, "POST", "d0?drain_s=0.2")
    await system.until(lambda: _all_on(system, "d1"))
    release(system)

    assert await all_exact(asked)
    causes = {row["cause"] for row in (await system.state())["recoveries"]}
    assert causes == {"moved: its instance is drained"}


async def test_an_order_that_cannot_be_carried_out_changes_nothing(
    build: ProxyClusterBuilder,
) -> None:
    """No instance of that name, no time, or nowhere to go."""
    system = await build()
    await order(system, "POST", "d1")

    refused = [
        (await order(system, method, path))[0]
        for method, path in [
            ("POST", "d7"),
            ("DELETE", "d7"),
            ("POST", "d0?drain_s=soon"),
            ("POST", "d0?drain_s=-1"),
            ("POST", "d0?drain_s=nan"),
        ]
    ]
    status, answer = await order(system, "POST", "d0")

    assert refused == [404, 404, 400, 400, 400]
    assert status == 409
    assert "no other instance that is up and not drained can do decode" in str(answer)
    assert await decoders_of(system) == ["d0"]


async def test_a_bug_while_a_proxy_drains_does_not_end_like_an_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its exit status tells the two apart."""
    closed: list[bool] = []

    class Buggy:
        port = admin_port = 0

        def __init__(self, *_: object) -> None: ...

        async def start(self) -> None:
            signal.raise_signal(signal.SIGTERM)

        async def run(self) -> None:
            await asyncio.Event().wait()

        async def leave(self) -> None: ...

        async def drain(self) -> None:
            raise ZeroDivisionError

        async def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(server, "Proxy", Buggy)

    with pytest.raises(ZeroDivisionError):
        await server.serve(Config(), b"")

    assert closed == [True]
