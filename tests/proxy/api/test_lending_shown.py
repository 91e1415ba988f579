"""A stage that one instance borrows from another, as operators see it."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import RankInfo, StageInfo, StageLent
from kvrs_testkit.awaited import forked
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.browser import BROWSER, browsing
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network
needs_browser = pytest.mark.skipif(BROWSER is None, reason="not installed: chromium")
D0, D1, N0, N1 = InstanceId("d0"), InstanceId("d1"), NodeId("n0"), NodeId("n1")
HOSTS = {"pp": 2, "stage_hosts": [{"node": "n0"}, {"node": "n1"}]}
GROUP = {"group": "pipelines", **HOSTS}
SHOWN = """[...document.querySelectorAll(".part")].map(each => each.textContent)"""


def stage(at: int, node: NodeId, pid: int, **borrowed: Any) -> StageInfo:
    return StageInfo(at, node, pid, 1, 1, 0.5, 1 << 20, **borrowed)


def lend(system: ProxyCluster) -> None:
    """d0 has stage 1 computed by the host of d1."""
    d0, d1 = system.instances["d0"], system.instances["d1"]
    d0.stages = [stage(0, N0, 10), stage(1, N1, 21, donor=D1, pages=40)]
    d0.ranks = [
        RankInfo(0, 0, 10, N0, 4, [0]),
        RankInfo(1, 1, 21, N1, 4, [0], borrowed_from=D1),
    ]
    d1.stages = [stage(0, N0, 20), stage(1, N1, 21)]
    d1.lends = [StageLent(D0, 1, 40)]
    for each in (d0, d1):
        each.degree = each.full_degree = 2
        each.layout_number += 1


async def rows(system: ProxyCluster) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in (await system.state())["instances"]}


async def is_shown(system: ProxyCluster) -> bool:
    found = await rows(system)
    ranks = found["d0"]["ranks"]
    return bool(found["d1"]["lends"] and ranks and found["d0"]["stages"])


async def test_the_state_names_donor_and_borrower(build: ProxyClusterBuilder) -> None:
    """Both sides of it, and the pages that are meant; all is as before once it is given back."""
    system = await build(decodes=GROUP)
    before = await rows(system)
    lend(system)
    await system.until(lambda: is_shown(system))
    during = await rows(system)
    gauges = [
        await system.count(f"kvrs_{name}", worker=worker)
        for name in ("borrowed_stages", "lent_pages")
        for worker in ("d0", "d1")
    ]
    system.instances["d1"].lends = []
    system.instances["d0"].stages[1] = stage(1, N0, 11)

    async def is_back() -> bool:
        return not await system.count("kvrs_lent_pages", worker="d1") and not await system.count(
            "kvrs_borrowed_stages", worker="d0"
        )

    await system.until(is_back)

    assert {name: row["group"] for name, row in before.items()} == {
        "d0": "pipelines",
        "d1": "pipelines",
        "p0": None,
        "p1": None,
    }
    assert before["d0"]["lends"] == before["p0"]["lends"] == []
    assert during["d1"]["lends"] == [{"to": "d0", "stage": 1, "pages": 40}]
    assert [(each["donor"], each["pages"]) for each in during["d0"]["stages"]] == [
        (None, None),
        ("d1", 40),
    ]
    assert [each["borrowed_from"] for each in during["d0"]["ranks"]] == [None, "d1"]
    assert gauges == [1, 0, 0, 40]


async def test_only_instances_of_a_group_have_series(build: ProxyClusterBuilder) -> None:
    system = await build(decodes=HOSTS)
    lend(system)
    await system.until(lambda: is_shown(system))

    assert "kvrs_lent_pages{" not in await system.metrics()
    assert "kvrs_borrowed_stages{" not in await system.metrics()


async def test_series_of_an_instance_that_is_down_go(build: ProxyClusterBuilder) -> None:
    """An old value would be taken for a stage that is still lent."""
    system = await build(decodes=GROUP)
    lend(system)
    await system.until(lambda: is_shown(system))
    await system.instances["d1"].kill()
    await system.until_health(d1="down")

    shown = await system.metrics()
    assert 'kvrs_borrowed_stages{worker="d0"} 1.0' in shown
    assert 'kvrs_lent_pages{worker="d1"}' not in shown


@pytest.mark.process
async def test_top_names_the_donor(build: ProxyClusterBuilder) -> None:
    """A line for each instance that borrows, and one for each loan."""
    system = await build(decodes=GROUP)
    lend(system)
    await system.until(lambda: is_shown(system))
    url = f"http://127.0.0.1:{system.proxy.admin_port}"

    running = await forked(
        *("kvrs", "top", "--admin-url", url, "--once"),
        environment=os.environ,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await running.communicate()

    lines = [line.strip() for line in output.decode().splitlines()]
    assert "d0: stages 0 at n0, 1 at n1 (borrowed from d1)" in lines
    assert "d1: lends 40 pages of stage 1 to d0" in lines
    assert not [line for line in lines if line.startswith("d1: stages")]


@pytest.mark.process
@needs_browser
async def test_the_page_names_the_donor(build: ProxyClusterBuilder, tmp_path: Path) -> None:
    """In a note of the instance that borrows, and in one of each that lends."""
    system = await build(decodes=GROUP)
    lend(system)
    await system.until(lambda: is_shown(system))
    url = f"http://127.0.0.1:{system.proxy.admin_port}/ui"
    async with browsing(url, tmp_path) as page:
        await page.until(f"({SHOWN}).join().includes('borrowed')")
        shown, errors = await page.evaluate(SHOWN), page.errors

    assert any("stages 0 at n0, 1 at n1 (borrowed from d1)" in text for text in shown)
    assert any("lends 40 pages of stage 1 to d0" in text for text in shown)
    assert errors == []
