"""Clusters in which both sides of a hand-off have stages on two nodes."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_lab.cluster.launcher import Cluster
from kvrs_testkit.forked import starts_forked
from tests.cluster.launches import pause_s
from tests.cluster.test_ranks_up import LONG, complete, greedy, is_full, row_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

STREAMS = 4
SEEDS = [None, 7] * (STREAMS // 2)
DIVIDED = {"pp": 2, "stage_hosts": [{"node": "n1"}]}


@pytest.fixture(scope="module")
def cluster(tiny_llama: str) -> Iterator[Cluster]:
    nodes = [
        {
            "id": "n0",
            "instances": [
                {"id": "p0", "role": "prefill", **DIVIDED},
                {"id": "d0", "role": "decode", **DIVIDED},
            ],
        },
        {"id": "n1", "instances": [{"id": "d1", "role": "decode"}]},
    ]
    document = {
        "cluster": {"model": tiny_llama, "nodes": nodes, "engine": {"pages": 512}},
        "proxy": {"port": 0, "admin_port": 0},
    }
    with starts_forked(), Cluster(parse_config(document), lambda line: None) as running:
        yield running


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> dict[int | None, list[int]]:
    """Tokens of long streams by their seed, one after the other and before they lose a stage."""
    return {seed: complete(cluster, seed, LONG) for seed in (None, 7)}


async def test_instances_of_another_node_wait_for_other_hosts(cluster: Cluster) -> None:
    """All processes of a node end at once, with the hosts of stages of instances of another, which
    go on with those that follow.
    """
    before = [await until(cluster, name, lambda row: True) for name in ("p0", "d0", "d1")]
    hosts = {parent_of(row["ranks"][1]["pid"]) for row in before[:2]}
    await asyncio.to_thread(cluster.wait_all_up)

    for pid in (*hosts, before[2]["pid"]):
        os.kill(pid, signal.SIGKILL)
    for old in before[:2]:
        after = await until(cluster, old["id"], partial(has_other_host, old))
        assert after["pid"] == old["pid"]

    assert len(hosts) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in hosts)


def has_other_host(old: dict[str, Any], row: dict[str, Any]) -> bool:
    return is_full(row, ranks=2) and row["ranks"][1]["pid"] != old["ranks"][1]["pid"]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def until(
    cluster: Cluster, name: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """The row of an instance that is up. It may be down before, where the machine has so much to do
    that a batch takes longer than it may.
    """
    began_s = time.monotonic()
    async with asyncio.timeout(120):
        while (row := row_of(cluster, name))["health"] != "up" or not holds(row):
            await asyncio.sleep(pause_s(began_s))
    return row


async def test_the_state_shows_the_node_of_each_rank(cluster: Cluster) -> None:
    row = await until(cluster, "d0", lambda row: True)

    assert row["layout"]["stages"] == [[0, 2], [2, 4]]
    assert row["layout"]["re_forms"]
    assert [(one["rank"], one["stage"], one["node"]) for one in row["ranks"]] == [
        (0, 0, "n0"),
        (1, 1, "n1"),
    ]
    assert parent_of(row["ranks"][0]["pid"]) == row["pid"]
    assert parent_of(row["ranks"][1]["pid"]) != row["pid"]


async def test_the_tokens_are_those_of_one_process(cluster: Cluster, tmp_path: Path) -> None:
    """Pages put together at one instance of two nodes are taken apart at another one."""
    write_tiny_model(tmp_path, seed=0)
    expected = greedy(tmp_path)

    with ThreadPoolExecutor(STREAMS) as clients:
        answers = list(clients.map(lambda _: complete(cluster), range(STREAMS)))

    assert answers == [expected] * STREAMS
    for name in ("d0", "d1"):  # With those of the self-test.
        await until(cluster, name, lambda row: row["load"]["fetched_pages"] > 0)


@pytest.mark.parametrize("victim", ["rank", "host"])
async def test_streams_of_a_lost_stage_are_exact(
    cluster: Cluster, expected: dict[int | None, list[int]], victim: str
) -> None:
    """Greedy and seeded. A rank comes back in its host, and a stage with the next host; the
    instance's process stays, and so do its own ranks. Streams may leave meanwhile.
    """
    before = await until(cluster, "d0", lambda row: True)
    lost = before["ranks"][1]["pid"]
    host = parent_of(lost)
    with ThreadPoolExecutor(STREAMS) as clients:
        answers = clients.map(lambda seed: complete(cluster, seed, LONG), SEEDS)
        await until(cluster, "d0", lambda row: row["load"]["running"] > 0)
        os.kill(lost if victim == "rank" else host, signal.SIGKILL)
        got = list(answers)

    assert got == [expected[seed] for seed in SEEDS]
    after = await until(cluster, "d0", partial(has_other_host, before))
    assert (after["pid"], after["ranks"][0]["pid"]) == (before["pid"], before["ranks"][0]["pid"])
    assert (parent_of(after["ranks"][1]["pid"]) == host) == (victim == "rank")
