"""Instances whose memory outlives their processes: killed ones are followed by spares."""

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs_lab.cluster.fault_injection import check_faults, inject_faults, rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.cluster.supervised import MachineSupervisor
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.faults.schedule import FaultSchedule
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.passes import Injection
from kvrs_testkit.forked import starts_forked
from tests.cluster.launches import END_S, until

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("clusters")]

PROMPT = [(7 * at * at + 3) % 500 + 2 for at in range(50)]


@pytest.fixture(scope="module")
def cluster(tiny_llama: str) -> Iterator[Cluster]:
    """One instance, so that its streams have nowhere else to go."""
    nodes = [{"id": "n0", "instances": [{"id": "e0", "role": "both"}]}]
    document = {
        "cluster": {
            "model": tiny_llama,
            "nodes": nodes,
            "engine": {"pages": 256},
            "allow_faults": True,
        },
        "proxy": {"port": 0, "admin_port": 0},
        "state_plane": {"enabled": True},
    }
    with starts_forked(), Cluster(parse_config(document), lambda line: None) as running:
        yield running


class Stream:
    """Greedy ids of one request, as they arrive. Faults come at the hundredth: the rest takes so
    long that the stream has not ended by then, also on a busy machine.
    """

    def __init__(self, cluster: Cluster, tokens: int = 400) -> None:
        self.ids: list[int] = []
        body = {"model": "tiny-llama", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "return_token_ids": True, "ignore_eos": True}
        self._request = urllib.request.Request(
            f"{cluster.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )

    def read(self) -> list[int]:
        with urllib.request.urlopen(self._request, timeout=END_S) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                    self.ids += choice["token_ids"]
        return self.ids


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[int]:
    """The ids of a stream that nothing happens to."""
    return Stream(cluster).read()


def pid_of(cluster: Cluster) -> int:
    return int(rows_of(cluster.state())[InstanceId("e0")]["pid"])


def nursery_of(cluster: Cluster) -> int:
    assert isinstance(cluster.supervisor, MachineSupervisor)
    nursery = cluster.supervisor._nursery
    assert nursery is not None
    assert nursery._process is not None
    return nursery._process.pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def spares(cluster: Cluster) -> list[int]:
    """The launcher's children, without the engine, that have the weights mapped."""
    found = []
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            if parent_of(pid) == os.getpid() and "/weights-" in maps:
                found.append(pid)
    return [pid for pid in found if pid != pid_of(cluster)]


def spare_of(cluster: Cluster) -> int:
    """Its only one, once it has one."""
    return until(lambda: found if len(found := spares(cluster)) == 1 else None)[0]


def go_on(cluster: Cluster, *signals: tuple[int, signal.Signals]) -> list[int]:
    """The ids of a stream in the middle of which these signals are sent."""
    stream = Stream(cluster)
    with ThreadPoolExecutor(1) as client:
        reading = client.submit(stream.read)
        until(lambda: len(stream.ids) > 100 or reading.done())
        for pid, number in signals:
            os.kill(pid, number)
        return reading.result(END_S)


def test_a_killed_process_is_followed_by_a_spare(cluster: Cluster, expected: list[int]) -> None:
    """Its stream goes on exactly, from the pages that it left. A killed spare, and a killed
    nursery, are made again.
    """
    first = pid_of(cluster)
    nursery = nursery_of(cluster)
    spare = spare_of(cluster)

    assert go_on(cluster, (first, signal.SIGKILL)) == expected
    assert pid_of(cluster) == spare
    (recovery,) = cluster.state()["recoveries"]
    assert recovery["option"] == "reuse"

    second = spare_of(cluster)
    assert go_on(cluster, (second, signal.SIGKILL), (spare, signal.SIGKILL)) == expected
    assert nursery_of(cluster) == nursery

    third = spare_of(cluster)
    fourth = (nursery, signal.SIGKILL), (pid_of(cluster), signal.SIGKILL)
    assert go_on(cluster, *fourth) == expected
    assert pid_of(cluster) == third
    until(lambda: len(spares(cluster)) <= 1)
    assert go_on(cluster, (third, signal.SIGKILL)) == expected
    assert nursery_of(cluster) != nursery


@pytest.mark.nightly
async def test_a_lost_device_takes_its_pages_along(cluster: Cluster, expected: list[int]) -> None:
    """The stream goes on exactly, but nothing of it is there to be used again."""
    before, known = pid_of(cluster), len(cluster.state()["recoveries"])
    (fault,) = parse_faults(
        [{"when": {"inflight_at_least": 1}, "what": "lose_device", "whom": {"id": "e0"}}]
    )
    with ThreadPoolExecutor(1) as client:
        stream = Stream(cluster)
        reading = client.submit(stream.read)
        await asyncio.to_thread(until, lambda: len(stream.ids) > 100 or reading.done())
        async with AdminPort(cluster.proxies[0].admin, cluster.secret) as port:
            await check_faults([fault], port)
            schedule = FaultSchedule([fault], 0, Random)
            await inject_faults(Injection(port, schedule, time.monotonic(), lambda: 0, []))
        got = await asyncio.to_thread(reading.result, END_S)

    assert got == expected
    assert pid_of(cluster) != before
    (recovery,) = cluster.state()["recoveries"][known:]
    assert recovery["option"] != "reuse"
