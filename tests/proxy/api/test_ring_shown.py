"""Replicas along the ring of each stage, as operators see them."""

import asyncio

from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import ReformingReport, RestartReport, StageInfo
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.api.test_lending_shown import GROUP, rows
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.streams.test_proxy_deaths import all_exact, held_open, release

N0 = NodeId("n0")


def stage(at: int, target: str | None, reason: str | None = None, lag: int = 0) -> StageInfo:
    return StageInfo(
        *(at, N0, 10 + at, 1, 1, 0.5, 1 << 20),
        replica_to=None if target is None else InstanceId(target),
        unprotected=reason,
        replica_lag_pages=lag,
        replica_sent_bytes=4096 * (at + 1),
        replica_dropped_pages=at,
    )


async def count(system: ProxyCluster, name: str, stage: int) -> float:
    return await system.count(f"kvrs_replica_{name}", worker="d0", stage=str(stage))


async def test_each_stage_shows_its_target_or_why_it_has_none(build: ProxyClusterBuilder) -> None:
    system = await build(decodes=GROUP)
    d0 = system.instances["d0"]
    d0.stages = [stage(0, "d1", lag=3), stage(1, None, "'d1' lends the stage")]
    d0.adopted_pages = 7

    async def is_shown() -> bool:
        return len((await rows(system))["d0"]["stages"]) == 2

    await system.until(is_shown)
    shown = (await rows(system))["d0"]["stages"]
    assert [each["replica_to"] for each in shown] == ["d1", None]
    assert [each["unprotected"] for each in shown] == [None, "'d1' lends the stage"]
    assert [await count(system, "lag_pages", each) for each in (0, 1)] == [3, 0]
    assert await system.count("kvrs_adopted_pages_total", worker="d0") == 7
    assert 'kvrs_replica_lag_pages{stage="0",worker="d1"}' not in await system.metrics()

    await d0.kill()
    await system.until_health(d0="down")
    assert 'kvrs_replica_lag_pages{stage="0",worker="d0"}' not in await system.metrics()


async def test_what_a_stream_that_stayed_found_again_is_in_its_recovery(
    build: ProxyClusterBuilder,
) -> None:
    system = await build(proxy={"token_gap_s": 60.0})
    d0 = system.instances["d0"]
    d0.full_degree = d0.degree = 2
    await system.instances["d1"].kill()
    await system.until_health(d1="down")
    asked = await held_open(system, count=1)
    (stream,) = (await system.state())["streams"]
    d0.reforming = ReformingReport(1, "substitute", 30.0, 2, [1], 1 << 20)

    async def has_stayed() -> bool:
        return bool((await system.state())["recoveries"])

    await system.until(has_stayed)
    d0.reforming, d0.layout_number = None, 1
    d0.restarts = [
        RestartReport(StreamId(stream["id"]), stream["attempt"], 0, 5, 9),
        RestartReport(StreamId("another"), 1, 0, 1, 1),
    ]
    reports = d0.reports

    async def is_told() -> bool:
        return d0.reports > reports + 1

    await system.until(is_told)
    await asyncio.sleep(0)
    release(system)
    assert await all_exact(asked)
    (found,) = (await system.state())["recoveries"]
    assert found["option"] == "substitute"
    assert (found["adopted_pages"], found["recomputed_tokens"]) == (5, 9)
