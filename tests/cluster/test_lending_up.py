"""A cluster of two pipelines of one group, which lend each other the hosts of their stages."""

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

from kvrs_lab.cluster.launcher import Cluster
from tests.cluster.launches import pause_s
from tests.cluster.test_ranks_up import LONG, complete, row_of, running

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

Row = dict[str, Any]
SEEDS = [None, 7] * 4
LOAD_S = 15.0  # Of the whole model.


@pytest.fixture(scope="module")
def cluster(tiny_llama: str) -> Iterator[Cluster]:
    nodes: list[Row] = [{"id": "n0", "instances": [{"id": "p0", "role": "prefill"}]}]
    for name in ("d0", "d1"):
        hosts = [{"node": f"{name}-n{stage}"} for stage in range(3)]
        divided = {"id": name, "role": "decode", "pp": 3, "group": "g", "stage_hosts": hosts}
        nodes.append({"id": f"{name}-n0", "instances": [divided]})
        nodes += [{"id": f"{name}-n{stage}"} for stage in (1, 2)]
    # A loan lasts as long as the load of a host.
    size_bytes = sum(file.stat().st_size for file in Path(tiny_llama).glob("*.safetensors"))
    with running(tiny_llama, nodes, disk_bytes_per_s=size_bytes / LOAD_S) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[list[int]]:
    """Tokens of the streams, one after the other and before any fault."""
    by_seed = {seed: complete(cluster, seed, LONG) for seed in (None, 7)}
    return [by_seed[seed] for seed in SEEDS]


async def until(cluster: Cluster, name: str, holds: Callable[[Row], bool]) -> Row:
    """The row of an instance for which that holds."""
    began_s = time.monotonic()
    async with asyncio.timeout(120):
        while True:
            row = row_of(cluster, name)
            if row["health"] == "up" and len(row["stages"]) == 3 and holds(row):
                return row
            await asyncio.sleep(pause_s(began_s))


def at_home(row: Row) -> bool:
    return row["state"] == "full" and all(stage["donor"] is None for stage in row["stages"])


def is_lent(stage: int, row: Row) -> bool:
    """By d1; the ranks are read again after the load report that says so."""
    is_known = any(rank["borrowed_from"] == "d1" for rank in ranks_of(row, stage))
    return is_known and row["stages"][stage]["donor"] == "d1"


def ranks_of(row: Row, stage: int) -> list[Row]:
    """None while the stage has no host."""
    return [rank for rank in row["ranks"] if rank["stage"] == stage]


def has_pages(free_pages: int, row: Row) -> bool:
    return bool(row["load"]["free_pages"] >= free_pages)


def survivors(row: Row, lost: int) -> list[tuple[int, int]]:
    """The processes of the other stages, and what they have read."""
    return [
        (stage["host_pid"], stage["read_bytes"])
        for stage in row["stages"]
        if stage["stage"] != lost
    ]


@pytest.mark.parametrize("lost", [0, 2])
async def test_a_lost_host_is_replaced_by_that_of_the_other_pipeline(
    cluster: Cluster, expected: list[list[int]], lost: int
) -> None:
    """Streams of both are exact, those that stay in the same attempt; all is as before in the end,
    without a survivor that reads anything again.
    """
    before = {name: await until(cluster, name, at_home) for name in ("d0", "d1")}

    with ThreadPoolExecutor(len(SEEDS)) as clients:
        answers = clients.map(lambda seed: complete(cluster, seed, LONG), SEEDS)
        await until(cluster, "d0", lambda row: row["load"]["running"] > 0)
        os.kill(before["d0"]["stages"][lost]["host_pid"], signal.SIGKILL)
        borrowed = await until(cluster, "d0", partial(is_lent, lost))
        lender = await until(cluster, "d1", lambda row: row["lends"] != [])
        got = list(answers)
    after = {name: await until(cluster, name, at_home) for name in ("d0", "d1")}

    assert got == expected
    stage = borrowed["stages"][lost]
    assert stage["host_pid"] == before["d1"]["stages"][lost]["host_pid"]
    [rank] = ranks_of(borrowed, lost)
    assert rank["borrowed_from"] == "d1"
    assert rank["pid"] == before["d1"]["ranks"][lost]["pid"]
    assert lender["lends"] == [{"to": "d0", "stage": lost, "pages": stage["pages"]}]
    assert after["d0"]["stages"][lost]["host_pid"] != before["d0"]["stages"][lost]["host_pid"]
    assert survivors(after["d0"], lost) == survivors(before["d0"], lost)
    assert survivors(after["d1"], 3) == survivors(before["d1"], 3)
    for name in ("d0", "d1"):
        assert after[name]["pid"] == before[name]["pid"]
        assert after[name]["epoch"] == before[name]["epoch"]
        assert after[name]["lends"] == []
        await until(cluster, name, partial(has_pages, before[name]["load"]["free_pages"]))
    stayed = [row for row in cluster.state()["recoveries"] if row["option"] == "substitute"]
    for row in stayed:
        assert (row["from"], row["to"], row["attempt"]) == ("d0", "d0", 1)


async def test_a_lender_whose_process_is_killed_has_its_stage_back(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    """While another instance uses it, whose own host starts meanwhile."""
    before = {name: await until(cluster, name, at_home) for name in ("d0", "d1")}

    with ThreadPoolExecutor(len(SEEDS)) as clients:
        answers = clients.map(lambda seed: complete(cluster, seed, LONG), SEEDS)
        await until(cluster, "d0", lambda row: row["load"]["running"] > 0)
        os.kill(before["d0"]["stages"][1]["host_pid"], signal.SIGKILL)
        await until(cluster, "d0", lambda row: row["stages"][1]["donor"] == "d1")
        os.kill(before["d1"]["pid"], signal.SIGKILL)
        got = list(answers)
    after = {name: await until(cluster, name, at_home) for name in ("d0", "d1")}

    assert got == expected
    assert after["d0"]["pid"] == before["d0"]["pid"]
    assert survivors(after["d1"], 3) == survivors(before["d1"], 3)
