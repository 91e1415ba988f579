"""A cluster of two pipelines of one group, whose stages keep parts of each other's pages."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.cluster import pipeline_nodes
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

Row = dict[str, Any]
P = 16  # Tokens of a page.
TOKENS = 240
LOAD_S = 10.0  # Of the whole model.
STAGES = 2


@pytest.fixture(scope="module")
def cluster(tiny_llama: str) -> Iterator[Cluster]:
    """The cluster of `kvrs lab up --pipelines 2 --pp 2`. Each instance has room for two streams,
    and others wait there, so those of a victim stay.
    """
    size_bytes = sum(file.stat().st_size for file in Path(tiny_llama).glob("*.safetensors"))
    engine = {"pages": 256, "max_running": 2, "disk_bytes_per_s": size_bytes / LOAD_S}
    nodes = [each.model_dump(mode="json") for each in pipeline_nodes(2, STAGES)]
    document = {
        "backup": {"mode": "peer"},
        "cluster": {"model": tiny_llama, "nodes": nodes, "engine": engine},
        "proxy": {"port": 0, "admin_port": 0},
    }
    with starts_forked(), Cluster(parse_config(document), lambda line: None) as running:
        yield running


def row(cluster: Cluster, name: str) -> Row:
    return rows_of(cluster.state())[InstanceId(name)]


def at_home(cluster: Cluster) -> bool:
    """Both are whole and idle: one whose last report has a queue gets none of the next streams."""
    rows = [row(cluster, name) for name in ("d0", "d1")]
    return all(
        each["health"] == "up"
        and each["state"] == "full"
        and each["load"]["queue_delay_s"] == 0.0
        and len(each["stages"]) == STAGES
        and all(stage["donor"] is None for stage in each["stages"])
        for each in rows
    )


def requests(numbers: range) -> list[ReplayRequest]:
    """Prompts that share no beginning."""
    return [
        ReplayRequest(0.0, tuple((7 * at * at + 31 * n + 3) % 500 + 2 for at in range(40)), TOKENS)
        for n in numbers
    ]


def ids_of(records: list[StreamRecord]) -> list[list[int]]:
    assert all(each.error is None for each in records)
    return [list(each.token_ids) for each in records]


async def killed_under_way(
    cluster: Cluster, asked: list[ReplayRequest], victims: Callable[[Row], list[int]]
) -> tuple[Row, list[StreamRecord]]:
    """The row of d0 right before processes of it are lost, and the streams."""
    load = asyncio.create_task(replay(cluster.url, asked, timeout_s=END_S))
    met: dict[str, int] = {}

    def are_far() -> bool:
        streams = cluster.state()["streams"]
        met.update({f"{each['id']} at {each['decode']}": each["output_tokens"] for each in streams})
        assert streams or not load.done(), f"met under way: {met}; {row(cluster, 'd0')}"
        own = [each for each in streams if each["decode"] == "d0"]
        return any(100 < each["output_tokens"] < 200 for each in own)

    await asyncio.to_thread(until, are_far, END_S)
    before = row(cluster, "d0")
    for pid in victims(before):
        os.kill(pid, signal.SIGKILL)
    return before, await load


def test_streams_go_on_with_the_parts_that_the_neighbour_has(cluster: Cluster) -> None:
    """In the same attempt, at the neighbour's host, computing what lies behind its replicas; each
    stage has sent its own parts.
    """
    asked = requests(range(8))
    until(lambda: at_home(cluster), END_S)
    before, records = asyncio.run(
        killed_under_way(cluster, asked, lambda own: [own["stages"][-1]["host_pid"]])
    )
    recoveries = [each for each in cluster.state()["recoveries"] if each["from"] == "d0"]
    until(lambda: at_home(cluster), END_S)
    after = row(cluster, "d0")

    stages = before["stages"]
    assert [stage["replica_to"] for stage in stages] == ["d1"] * STAGES
    assert min(stage["replica_sent_bytes"] for stage in stages) > 0
    stayed = [each for each in recoveries if each["option"] == "substitute"]
    begun = [each for each in stayed if each["produced_tokens"]]
    assert begun
    for each in begun:
        assert (each["attempt"], each["to"], each["outcome"]) == (1, "d0", "resumed")
        assert each["adopted_pages"] > 0
        # A page may have been filled since the state was read.
        lag_pages = stages[-1]["replica_lag_pages"] + 1
        assert each["recomputed_tokens"] <= P * (1 + lag_pages)
    assert after["pid"] == before["pid"]
    assert after["stages"][0]["host_pid"] == stages[0]["host_pid"]
    assert ids_of(records) == ids_of(asyncio.run(replay(cluster.url, asked, timeout_s=END_S)))
    # The ring is whole again.
    until(lambda: row(cluster, "d0")["stages"][-1]["replica_to"] == "d1", END_S)


def test_streams_of_a_lost_node_go_on_where_all_their_parts_are(cluster: Cluster) -> None:
    """The node has the process of the instance and a host: its streams leave, and compute at the
    neighbour what lies behind the pages of which all stages have sent their parts.
    """
    asked = requests(range(20, 26))
    until(lambda: at_home(cluster), END_S)
    already = len(cluster.state()["recoveries"])
    before, records = asyncio.run(
        killed_under_way(cluster, asked, lambda own: [own["pid"], own["stages"][0]["host_pid"]])
    )
    recoveries = cluster.state()["recoveries"][already:]
    until(lambda: at_home(cluster), END_S)

    reused = [each for each in recoveries if each["option"] == "reuse"]
    assert reused
    for each in reused:
        assert (each["from"], each["to"], each["outcome"]) == ("d0", "d1", "resumed")
        assert each["loaded_tokens"] is None or each["loaded_tokens"] > 0
    after = row(cluster, "d0")
    assert after["stages"][1]["host_pid"] == before["stages"][1]["host_pid"]
    assert ids_of(records) == ids_of(asyncio.run(replay(cluster.url, asked, timeout_s=END_S)))
