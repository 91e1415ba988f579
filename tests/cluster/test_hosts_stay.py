"""A cluster in which all stages of an instance are in hosts, which outlive its process."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.faults.language import parse_faults
from tests.cluster.launches import pause_s
from tests.cluster.test_ranks_up import LONG, carry_out, complete, is_full, row_of, running

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

SEEDS = [None, 7] * 3
Row = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(tiny_llama: str) -> Iterator[Cluster]:
    nodes: list[Row] = [
        {
            "id": "n0",
            "instances": [
                {"id": "p0", "role": "prefill"},
                {
                    "id": "d0",
                    "role": "decode",
                    "pp": 3,
                    "stage_hosts": [{"node": node} for node in ("n0", "n1", "n2")],
                },
            ],
        },
        {"id": "n1"},
        {"id": "n2"},
        {"id": "n3", "instances": [{"id": "d1", "role": "decode"}]},
    ]
    with running(tiny_llama, nodes) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[list[int]]:
    """Tokens of the streams, one after the other and before any fault."""
    by_seed = {seed: complete(cluster, seed, LONG) for seed in (None, 7)}
    return [by_seed[seed] for seed in SEEDS]


async def until_up(cluster: Cluster, holds: Callable[[Row], bool] = lambda row: True) -> Row:
    """The row of d0, which may be down before."""
    began_s = time.monotonic()
    async with asyncio.timeout(120):
        while True:
            row = row_of(cluster, "d0")
            if row["health"] == "up" and len(row["stages"]) == 3 and holds(row):
                return row
            await asyncio.sleep(pause_s(began_s))


async def streams_while(cluster: Cluster, fault: Callable[[Row], object]) -> list[list[int]]:
    """Tokens of streams, greedy and seeded, into which a fault falls; `fault` gets d0's row."""
    with ThreadPoolExecutor(len(SEEDS)) as clients:
        answers = clients.map(lambda seed: complete(cluster, seed, LONG), SEEDS)
        fault(await until_up(cluster, lambda row: row["load"]["running"] > 0))
        return list(answers)


def hosts_of(row: Row) -> list[int]:
    return [stage["host_pid"] for stage in row["stages"]]


def bytes_of(row: Row) -> list[int]:
    return [stage["read_bytes"] for stage in row["stages"]]


def opened_files(pid: int) -> int:
    """Bytes that a process has had read for it, from disks and caches alike."""
    with open(f"/proc/{pid}/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


async def test_stages_show_the_processes_that_have_them(cluster: Cluster) -> None:
    row = await until_up(cluster)

    assert [(stage["stage"], stage["node"]) for stage in row["stages"]] == [
        (0, "n0"),
        (1, "n1"),
        (2, "n2"),
    ]
    assert len({row["pid"], *hosts_of(row)}) == 4
    assert all(size > 0 for size in bytes_of(row))
    before = [stage["worked_s"] for stage in row["stages"]]
    complete(cluster)
    await until_up(
        cluster,
        lambda row: all(
            stage["worked_s"] > was for stage, was in zip(row["stages"], before, strict=True)
        ),
    )
    assert row_of(cluster, "d1")["stages"] == []


async def test_a_killed_process_of_an_instance_leaves_its_stages_as_they_are(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    """No stage reads a byte of weights again; the streams are exact, at another instance first and
    then at the next process of this one.
    """
    before = await until_up(cluster)
    ranks = [rank["pid"] for rank in before["ranks"]]
    read = [opened_files(pid) for pid in ranks]

    got = await streams_while(cluster, lambda row: os.kill(row["pid"], signal.SIGKILL))
    after = await until_up(cluster, lambda row: row["pid"] != before["pid"])

    assert got == expected
    assert await streams_while(cluster, lambda row: None) == expected
    assert hosts_of(after) == hosts_of(before)
    assert [rank["pid"] for rank in after["ranks"]] == ranks
    assert bytes_of(after) == bytes_of(before)
    for old, new in zip(before["stages"], after["stages"], strict=True):
        assert new["session"] > old["session"]
        assert new["epoch"] > old["epoch"]
    # Orders come over sockets, which count too, and are far less than any part of the weights.
    assert max(opened_files(pid) - was for pid, was in zip(ranks, read, strict=True)) < min(
        bytes_of(after)
    )


async def test_a_killed_host_leaves_the_others_as_they_are(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    """The instance's process and the other hosts are as they were; streams leave, or wait for the
    next host, and are exact.
    """
    before = await until_up(cluster)
    first, victim, last = hosts_of(before)

    got = await streams_while(cluster, lambda row: os.kill(victim, signal.SIGKILL))
    after = await until_up(
        cluster, lambda row: hosts_of(row)[1] != victim and is_full(row, ranks=3)
    )

    assert got == expected
    assert after["pid"] == before["pid"]
    assert [hosts_of(after)[at] for at in (0, 2)] == [first, last]
    assert [after["ranks"][at]["pid"] for at in (0, 2)] == [
        before["ranks"][at]["pid"] for at in (0, 2)
    ]
    assert [bytes_of(after)[at] for at in (0, 2)] == [bytes_of(before)[at] for at in (0, 2)]
    assert await streams_while(cluster, lambda row: None) == expected


async def test_streams_go_on_when_a_rank_in_a_host_loses_its_memory(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    """The cells of that stage are computed again, in a stream that stays as in one that leaves."""
    before = await until_up(cluster)
    (fault,) = parse_faults(
        [
            {
                "when": {"inflight_at_least": 1, "phase": "decode"},
                "what": "kill",
                "whom": {"id": "d0", "rank": 1},
            }
        ]
    )
    with ThreadPoolExecutor(len(SEEDS)) as clients:
        answers = clients.map(lambda seed: complete(cluster, seed, LONG), SEEDS)
        await carry_out(cluster, fault)
        got = list(answers)
    after = await until_up(
        cluster,
        lambda row: is_full(row, ranks=3) and row["ranks"][1]["pid"] != before["ranks"][1]["pid"],
    )

    assert got == expected
    assert (after["pid"], hosts_of(after)) == (before["pid"], hosts_of(before))
    assert await streams_while(cluster, lambda row: None) == expected
