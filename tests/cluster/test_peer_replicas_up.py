"""`kvrs lab up` with `backup.mode: peer`: streams of a killed instance go on where their pages
are.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs_lab.cluster.fault_injection import rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.load.open_loop import replay
from kvrs_lab.traces.records import ReplayRequest, StreamRecord
from kvrs_testkit.forked import starts_forked
from tests.cluster.launches import END_S, until

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

# Of 16 tokens. Streams of one instance have room, and those of two have not.
PAGES = 200
TOKENS = 400


@pytest.fixture(scope="module")
def cluster(tiny_llama: str) -> Iterator[Cluster]:
    """Two instances, of which the second has two ranks."""
    nodes = [
        {"id": "n0", "instances": [{"id": "d0", "role": "both"}]},
        {"id": "n1", "instances": [{"id": "d1", "role": "both", "tp": 2}]},
    ]
    document = {
        "backup": {"mode": "peer"},
        "cluster": {"model": tiny_llama, "nodes": nodes, "engine": {"pages": PAGES}},
        # On a busy machine one recovery by reuse may take so long that the next one recomputes.
        "proxy": {"port": 0, "admin_port": 0},
    }
    with starts_forked(), Cluster(parse_config(document), lambda line: None) as running:
        yield running


def row(cluster: Cluster, name: str) -> dict[str, Any]:
    return rows_of(cluster.state())[InstanceId(name)]


def requests(count: int, first: int = 0, tokens: int = TOKENS) -> list[ReplayRequest]:
    """Prompts that share no beginning."""
    return [
        ReplayRequest(0.0, tuple((7 * at * at + 31 * n + 3) % 500 + 2 for at in range(40)), tokens)
        for n in range(first, first + count)
    ]


async def killed_under_way(cluster: Cluster, asked: list[ReplayRequest], victim: str) -> Any:
    """The streams, of which those of the victim lose it once the other has pages of each."""
    load = asyncio.create_task(replay(cluster.url, asked, timeout_s=END_S))

    def covered() -> bool:
        streams = [each for each in cluster.state()["streams"] if each["output_tokens"] > 60]
        return len(streams) == len(asked) and all(
            any(each["protected"].values()) for each in streams
        )

    await asyncio.to_thread(until, covered, END_S)
    hit = {each["id"] for each in cluster.state()["streams"] if each["decode"] == victim}
    os.kill(row(cluster, victim)["pid"], signal.SIGKILL)
    return hit, await load


def ids_of(records: list[StreamRecord]) -> list[list[int]]:
    assert all(each.error is None for each in records)
    return [list(each.token_ids) for each in records]


@pytest.mark.parametrize("victim", ["d0", "d1"])
def test_streams_go_on_exactly_with_the_pages_of_the_peer(cluster: Cluster, victim: str) -> None:
    asked = requests(6, first=10 * int(victim[1]))
    hit, records = asyncio.run(killed_under_way(cluster, asked, victim))
    assert hit
    recoveries = [each for each in cluster.state()["recoveries"] if each["stream"] in hit]
    options = {each["option"] for each in recoveries}
    assert {"reuse"} <= options <= {"reuse", "recompute"}
    until(lambda: row(cluster, victim)["health"] == "up", END_S)
    assert ids_of(records) == ids_of(asyncio.run(replay(cluster.url, asked, timeout_s=END_S)))


def test_replicas_give_way_to_streams_of_the_instance_itself(cluster: Cluster) -> None:
    """Twenty streams take more pages than an instance has beside so many replicas."""
    asked = requests(20, first=100)
    records = asyncio.run(replay(cluster.url, asked, timeout_s=END_S))
    dropped = [row(cluster, name)["load"]["replica_dropped_pages"] for name in ("d0", "d1")]
    assert any(dropped)
    alone = [asyncio.run(replay(cluster.url, [one], timeout_s=END_S))[0] for one in asked[:3]]
    assert ids_of(records[:3]) == ids_of(alone)
