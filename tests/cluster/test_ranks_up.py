"""Clusters whose instances have several ranks, of different degrees."""

import asyncio
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvrs.config.cluster import EngineSettings
from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs_engine.engine.random_model import write_tiny_model
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.sequences import Chunk
from kvrs_lab.cluster.fault_injection import check_faults, inject_faults, rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.faults.language import Fault, parse_faults
from kvrs_lab.faults.schedule import FaultSchedule
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.passes import Injection
from kvrs_testkit.forked import starts_forked
from tests.cluster.launches import token_ids

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

PROMPT = [(11 * at * at + 5) % 500 + 2 for at in range(50)]
TOKENS = 120
LONG = 400  # Of streams that are not to end before a fault hits them.
STREAMS = 4


@contextmanager
def running(model: str, nodes: list[dict[str, Any]], **changed: Any) -> Iterator[Cluster]:
    """A cluster of these nodes that takes orders to fail; `changed`: settings of its engines."""
    engine = {"pages": 512} | changed
    document = {
        "cluster": {"model": model, "nodes": nodes, "engine": engine, "allow_faults": True},
        "proxy": {"port": 0, "admin_port": 0},
    }
    with starts_forked(), Cluster(parse_config(document), lambda line: None) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(tiny_llama: str) -> Iterator[Cluster]:
    """Prefill by one process; decode by two ranks, and by two stages."""
    nodes = [
        {
            "id": "n0",
            "instances": [
                {"id": "p0", "role": "prefill"},
                {"id": "d0", "role": "decode", "tp": 2},
                {"id": "d1", "role": "decode", "pp": 2},
            ],
        }
    ]
    with running(tiny_llama, nodes) as cluster:
        yield cluster


def complete(cluster: Cluster, seed: int | None = None, tokens: int = TOKENS) -> list[int]:
    return token_ids(cluster.url, PROMPT, tokens, seed)


def greedy(model: Path) -> list[int]:
    """By one process, without a cluster."""
    worker, token_ids = Worker(model, EngineSettings(pages=32)), list(PROMPT)
    done = 0
    while len(token_ids) < len(PROMPT) + TOKENS:
        chunk = Chunk(token_ids[done:], done, range(32), logits=1)
        done = len(token_ids)
        token_ids.append(int(worker.execute([chunk])[0].argmax()))
    return token_ids[len(PROMPT) :]


def row_of(cluster: Cluster, name: str) -> dict[str, Any]:
    return rows_of(cluster.state())[InstanceId(name)]


def order(cluster: Cluster, method: str, path: str) -> None:
    """An operator's, at the admin port."""
    request = urllib.request.Request(f"{cluster.admin_url}/kvrs/v1/{path}", method=method)
    with urllib.request.urlopen(request, timeout=100) as answer:
        assert answer.status == 200


async def until_whole(cluster: Cluster, after: dict[str, Any]) -> dict[str, Any]:
    """The row of an instance that has all its ranks again, others than it had before."""
    async with asyncio.timeout(120):
        while True:
            row = row_of(cluster, after["id"])
            if is_full(row, len(after["ranks"])) and row["ranks"] != after["ranks"]:
                return row
            await asyncio.sleep(0.2)


def is_full(row: dict[str, Any], ranks: int) -> bool:
    """The ranks are read again after the load report that says so."""
    return row["state"] == "full" and len(row["ranks"]) == ranks


async def carry_out(cluster: Cluster, fault: Fault) -> None:
    async with AdminPort(cluster.proxies[0].admin, cluster.secret) as port:
        await check_faults([fault], port)
        schedule = FaultSchedule([fault], 0, Random)
        async with asyncio.timeout(120):  # It waits for ever where the streams have ended.
            await inject_faults(Injection(port, schedule, time.monotonic(), lambda: 0, []))


def test_the_state_shows_ranks_and_layout(cluster: Cluster) -> None:
    """Every unit has one rank, and every layer one stage."""
    stages = row_of(cluster, "d1")
    pair = row_of(cluster, "d0")

    assert pair["layout"] == {"number": 1, "stages": [[0, 4]], "re_forms": True}
    assert [(one["rank"], one["stage"], one["heads"]) for one in pair["ranks"]] == [
        (0, 0, [0]),
        (1, 0, [1]),
    ]
    assert stages["layout"] == {"number": 1, "stages": [[0, 2], [2, 4]], "re_forms": True}
    assert [one["stage"] for one in stages["ranks"]] == [0, 1]
    assert len({one["pid"] for one in (*pair["ranks"], *stages["ranks"])}) == 4
    assert row_of(cluster, "p0")["ranks"] == []
    assert len({sum(one["units"] for one in each["ranks"]) for each in (pair, stages)}) == 1


def test_the_tokens_are_those_of_one_process(cluster: Cluster, tmp_path: Path) -> None:
    """Pages written by one process are read by the ranks of both instances."""
    write_tiny_model(tmp_path, seed=0)
    expected = greedy(tmp_path)

    with ThreadPoolExecutor(STREAMS) as clients:
        answers = list(clients.map(lambda _: complete(cluster), range(STREAMS)))

    assert answers == [expected] * STREAMS


async def test_streams_of_a_lost_rank_go_on(cluster: Cluster) -> None:
    """Greedy and seeded, in place and in their attempts where there is nowhere else; the other rank
    stays the process that it is, and the lost one is started again beside it.
    """
    order(cluster, "POST", "drain/d1?drain_s=600")
    expected = {seed: complete(cluster, seed, LONG) for seed in (None, 7)}
    victim = row_of(cluster, "d0")
    (fault,) = parse_faults(
        [
            {
                "when": {"inflight_at_least": 1, "phase": "decode"},
                "what": "kill",
                "whom": {"id": "d0", "rank": 1},
            }
        ]
    )
    with ThreadPoolExecutor(2 * STREAMS) as clients:
        seeds = [None, 7] * STREAMS
        answers = clients.map(lambda seed: complete(cluster, seed, LONG), seeds)
        await carry_out(cluster, fault)
        got = list(answers)
    recovered = cluster.state()["recoveries"]

    assert got == [expected[seed] for seed in seeds]
    first = [row for row in recovered if row["attempt"] == 1]
    assert {(row["from"], row["to"], row["option"]) for row in first} == {("d0", "d0", "in_place")}
    assert "resumed" in {row["outcome"] for row in first}
    old = {one["rank"]: one["pid"] for one in victim["ranks"]}
    again = await until_whole(cluster, after=victim)
    new = {one["rank"]: one["pid"] for one in again["ranks"]}
    assert again["pid"] == victim["pid"]
    assert new[0] == old[0]
    assert new[1] != old[1]
