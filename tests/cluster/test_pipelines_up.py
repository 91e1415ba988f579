"""A cluster of `kvrs lab up --pipelines`, and faults that name the hosts of its stages."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvrs.config.file import parse_config
from kvrs_lab.cli.running import _up_config
from kvrs_lab.cluster.fault_injection import members_of, unknown_victims
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.faults.language import parse_faults
from kvrs_testkit.forked import starts_forked
from tests.cluster.test_hosts_stay import hosts_of
from tests.cluster.test_ranks_up import LONG, carry_out, complete, row_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

SEEDS = [None, 7, None, 7]
KILL: list[dict[str, Any]] = [
    {"when": {"inflight_at_least": 1}, "what": "kill", "whom": {"id": "d0", "stage": 1}}
]


@pytest.fixture(scope="module")
def cluster(tiny_llama: str) -> Iterator[Cluster]:
    ports, degrees = {"port": 0, "admin_port": 0}, {"tp": None, "pp": 2}
    asked = _up_config(None, None, 1, None, None, 2, ports, None, degrees)
    document = asked.model_dump(mode="json")
    document["backup"]["mode"] = "off"
    document["cluster"]["model"] = tiny_llama
    with starts_forked(), Cluster(parse_config(document), lambda line: None) as cluster:
        yield cluster


async def test_the_host_of_a_stage_is_killed_by_the_name_of_its_stage(cluster: Cluster) -> None:
    """Streams are exact, the instance's process and its other stage stay, and another host has the
    stage.
    """
    config = cluster.config
    assert unknown_victims(parse_faults(KILL), members_of(config)) == []
    expected = {seed: complete(cluster, seed, LONG) for seed in (None, 7)}
    before = row_of(cluster, "d0")

    with ThreadPoolExecutor(len(SEEDS)) as clients:
        answers = clients.map(lambda seed: complete(cluster, seed, LONG), SEEDS)
        (fault,) = parse_faults(KILL)
        await carry_out(cluster, fault)
        got = list(answers)
    async with asyncio.timeout(120):
        while True:
            after = row_of(cluster, "d0")
            is_own = all(stage["donor"] is None for stage in after["stages"])
            if after["state"] == "full" and is_own and hosts_of(after)[1] != hosts_of(before)[1]:
                break
            await asyncio.sleep(0.05)

    assert got == [expected[seed] for seed in SEEDS]
    assert (before["group"], after["group"]) == ("pipelines", "pipelines")
    assert after["pid"] == before["pid"]
    assert hosts_of(after)[0] == hosts_of(before)[0]
