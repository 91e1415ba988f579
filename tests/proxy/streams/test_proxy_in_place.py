"""An instance that re-forms: its streams stay, on the same connection and in the same attempt."""

import asyncio
from typing import Any

import msgspec
import pytest

from kvrs.core.control import Attempt
from kvrs.core.fleet import silence
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import GpuHealth, GpuState, RankInfo, RankRequest, ReformingReport
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.streams.test_proxy_deaths import all_exact, held_open, release


def report(
    ready_in_s: float, number: int = 1, degree: int = 1, way: str = "reshard"
) -> ReformingReport:
    return ReformingReport(number, way, ready_in_s, degree, [1], 1 << 20)


async def row_of(system: ProxyCluster, name: str) -> dict[str, object]:
    return next(row for row in (await system.state())["instances"] if row["id"] == name)


async def recoveries(system: ProxyCluster) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = (await system.state())["recoveries"]
    return rows


async def says(system: ProxyCluster, name: str, state: str) -> bool:
    return (await row_of(system, name))["state"] == state


async def test_streams_stay_in_their_attempt_while_their_instance_re_forms(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are silent for longer than a stream may be, and go on where they were."""
    limits_s = [60.0]  # The last one applies: a busy machine may be slow until the test is there.
    monkeypatch.setattr(silence, "SHORTEST_SILENCE_S", 0.2)  # So often is looked.
    monkeypatch.setattr(silence, "silent_after_s", lambda usual_s, longest_s: limits_s[-1])
    system = await build(proxy={"token_gap_s": 60.0})
    d0 = system.instances["d0"]
    d0.full_degree = d0.degree = 2
    await system.instances["d1"].kill()
    await system.until_health(d1="down")
    asked = await held_open(system, count=3)
    calls = len(d0.completions)

    d0.reforming = report(30.0)
    await system.until(lambda: says(system, "d0", "reforming"))
    row = await row_of(system, "d0")
    await system.until(lambda: stays_somewhere(system, count=3))
    limits_s.append(0.2)
    await asyncio.sleep(1.0)
    limits_s.pop()
    d0.reforming, d0.degree, d0.layout_number = None, 1, 1
    await system.until(lambda: says(system, "d0", "degraded"))
    release(system)

    assert await all_exact(asked)
    assert len(d0.completions) == calls
    found = await recoveries(system)
    assert [each["option"] for each in found] == ["in_place"] * 3
    assert [each["attempt"] for each in found] == [1] * 3
    assert [each["outcome"] for each in found] == ["resumed"] * 3
    assert {each["cause"] for each in found} == {"rank 1 of d0 lost: reshard"}
    assert (row["degree"], row["full_degree"]) == (2, 2)
    ready_in_s = row["ready_in_s"]
    assert isinstance(ready_in_s, float)
    assert 0 < ready_in_s <= 30.0


async def test_the_state_shows_the_ranks_that_compute(build: ProxyClusterBuilder) -> None:
    """A lost rank leaves at once, and is counted; what an instance does not tell is asked again."""
    system = await build()
    d0 = system.instances["d0"]
    d0.full_degree = d0.degree = 2
    d0.ranks = [RankInfo(rank, 0, 100 + rank, NodeId("n0"), 4, [rank]) for rank in range(2)]
    await system.until(lambda: shows_ranks(system, 100, 101))
    before, counted = await degrees(system), [await rank_deaths(system)]

    d0.ranks, d0.reforming, d0.rank_deaths = d0.ranks[:1], report(60.0), 1
    await system.until(lambda: shows_ranks(system, 100))
    d0.deaf = True
    d0.reforming, d0.degree, d0.layout_number = None, 1, 1
    await system.until(lambda: says(system, "d0", "degraded"))
    assert await shows_ranks(system, 100)
    d0.deaf = False
    d0.ranks = [RankInfo(0, 0, 102, NodeId("n0"), 8, [0, 1])]
    await system.until(lambda: shows_ranks(system, 102))

    assert (await system.health())["d0"] == "up"
    assert (before, await degrees(system)) == ((2, 2), (1, 2))
    assert [*counted, await rank_deaths(system)] == [0, 1]
    of_one_process = (
        'kvrs_worker_degree{role="decode",worker="d1"}',
        'rank_deaths_total{worker="d1"}',
    )
    shown = await system.metrics()
    assert not any(name in shown for name in of_one_process)


async def degrees(system: ProxyCluster) -> tuple[float, float]:
    """The degree and full degree of the only instance that has ranks."""
    names = "kvrs_worker_degree", "kvrs_worker_full_degree"
    present, full = [await system.count(name, worker="d0") for name in names]
    return present, full


async def rank_deaths(system: ProxyCluster) -> float:
    return await system.count("kvrs_worker_rank_deaths_total", worker="d0")


async def order(system: ProxyCluster, method: str, path: str) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{system.proxy.admin_port}/kvrs/v1/leave/{path}"
    async with system.http.request(method, url) as answer:
        return answer.status, msgspec.json.decode(await answer.read())


async def test_an_operator_has_a_rank_leave_and_come_back(build: ProxyClusterBuilder) -> None:
    """The order goes to the process of the instance that the proxy knows, and to no other."""
    system = await build()
    d0, d1 = system.instances["d0"], system.instances["d1"]
    d0.ranks = [RankInfo(rank, 0, 100 + rank, NodeId("n0"), 4, [rank]) for rank in range(2)]
    await d1.kill()
    await system.until_health(d1="down")

    left = await order(system, "POST", "d0/1")
    back = await order(system, "DELETE", "d0/1")
    refused = await order(system, "POST", "d0/7")
    others = [(await order(system, "POST", name))[0] for name in ("d9/0", "d1/0", "d0/last")]

    assert left == (200, {"instance": "d0", "rank": 1, "leaves": True})
    assert back == (200, {"instance": "d0", "rank": 1, "leaves": False})
    assert d0.rank_orders[:2] == [RankRequest(1, leaves, d0.epoch) for leaves in (True, False)]
    assert refused[0] == 409
    assert "d0 refuses: rank: got 7; allowed: [0, 1]" in refused[1]["error"]["message"]
    assert others == [404, 503, 400]


async def test_a_rank_leaves_a_gpu_that_fails(build: ProxyClusterBuilder) -> None:
    """And comes back; the proxy orders each once, however often gossip is looked at."""
    system = await build()
    d0, driver = system.instances["d0"], system.proxy.parts.driver
    d0.full_degree = d0.degree = 2
    d0.ranks = [RankInfo(at, 0, 100 + at, NodeId("n0"), 4, [at], [f"gpu{at}"]) for at in range(2)]
    await system.until(lambda: shows_ranks(system, 100, 101))

    def seen(state: GpuState) -> None:
        gpu = GpuHealth("gpu1", 1, state, "xid 79", 0.0)
        driver.control.gpus_seen(NodeId("n0"), [gpu], driver.clock())

    async def ordered(count: int) -> bool:
        return len(d0.rank_orders) == count

    seen(GpuState.FAILING)
    seen(GpuState.FAILING)
    await system.until(lambda: ordered(1))
    await system.until(lambda: gone_from(system, "gpu1"))
    seen(GpuState.HEALTHY)
    await system.until(lambda: ordered(2))

    assert [(each.rank, each.leaves) for each in d0.rank_orders] == [(1, True), (1, False)]


async def gone_from(system: ProxyCluster, gpu: str) -> bool:
    """True if the instance has answered that its rank leaves it."""
    asked = system.proxy.parts.driver.control.gpus._asked
    return asked[InstanceId("d0"), gpu].has_agreed is True


async def shows_ranks(system: ProxyCluster, *pids: int) -> bool:
    ranks = (await row_of(system, "d0"))["ranks"]
    assert isinstance(ranks, list)
    return [each["pid"] for each in ranks] == list(pids)


async def stays_somewhere(system: ProxyCluster, count: int = 1, option: str = "in_place") -> bool:
    return sum(each["option"] == option for each in await recoveries(system)) >= count


@pytest.mark.parametrize(("way", "option"), [("wait", "in_place"), ("substitute", "substitute")])
async def test_a_token_that_was_on_its_way_ends_no_recovery(
    build: ProxyClusterBuilder, way: str, option: str
) -> None:
    """The recovery ends with the first token after the re-forming, and is counted by its option."""
    system = await build()
    d0 = system.instances["d0"]
    d0.full_degree = d0.degree = 2
    await system.instances["d1"].kill()
    await system.until_health(d1="down")
    asked = await held_open(system, at=5)
    driver = system.proxy.parts.driver

    d0.reforming = report(30.0, way=way)
    await system.until(lambda: stays_somewhere(system, option=option))
    (stream,) = driver.streams
    live = driver.control.streams[StreamId(stream)]
    assert live.attempt.plan is not None
    Attempt(driver.control, live, live.attempt.plan).resumed(driver.clock())
    early = (await recoveries(system))[0]["outcome"]
    d0.reforming, d0.degree, d0.layout_number = None, 1, 1
    await system.until(lambda: says(system, "d0", "degraded"))
    release(system)

    assert await all_exact(asked)
    assert early == "running"
    assert (await recoveries(system))[0]["outcome"] == "resumed"
    settled = {"option": option, "outcome": "resumed"}
    assert await system.count("kvrs_recoveries_total", **settled) == 1
