"""Pages that are no numbers, where they are kept for a stream: what they spoil is computed anew."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId, NodeId
from kvrs_lab.cluster.fault_injection import rows_of
from kvrs_lab.cluster.launcher import Cluster
from kvrs_testkit.forked import starts_forked
from kvrs_testkit.stored_pages import poison, poison_memory
from tests.cluster.launches import END_S, until
from tests.cluster.test_state_plane_up import Stream

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

P0, D0, D1 = (InstanceId(name) for name in ("p0", "d0", "d1"))
PAGE_BYTES = 32 << 10

N0, N1 = NodeId("n0"), NodeId("n1")


@pytest.fixture
def cluster(tiny_llama: str, tmp_path: Path) -> Iterator[Cluster]:
    """Streams go from p0 to d0, and are saved at both agents. What is kept is moved, whatever it
    costs.
    """
    nodes = [
        {"id": N0, "instances": [{"id": P0, "role": "prefill"}, {"id": D0, "role": "decode"}]},
        {"id": N1, "instances": [{"id": D1, "role": "decode"}]},
    ]
    document = {
        "cluster": {"model": tiny_llama, "nodes": nodes, "engine": {"pages": 256}},
        "backup": {"mode": "both", "capacity_bytes": 8 << 20, "directory": str(tmp_path)},
        "policy": {"name": "always_migrate"},
        "proxy": {"port": 0, "admin_port": 0},
        "state_plane": {"enabled": True},
    }
    with starts_forked(), Cluster(parse_config(document), lambda line: None) as running:
        yield running


def saved_pages(cluster: Cluster) -> int:
    """The fewest that an agent holds by its report. Three have the prompt."""
    agents = cluster.state()["agents"]
    return min(int(agent["held_bytes"]) // PAGE_BYTES for agent in agents)


def test_a_stream_goes_on_exactly_where_all_that_is_kept_of_it_is_poisoned(
    cluster: Cluster,
) -> None:
    """Its instance is killed. The other one fetches pages that are no numbers, at p0 and the
    agents; the next attempt computes the history, also at p0, which has the prompt in its cache.
    """
    stream = Stream(cluster)
    with ThreadPoolExecutor(1) as client:
        reading = client.submit(stream.read)
        until(lambda: saved_pages(cluster) > 5 or reading.done())
        (row,) = cluster.state()["streams"]
        victim = InstanceId(row["decode"])
        pid = rows_of(cluster.state())[victim]["pid"]
        os.kill(pid, signal.SIGSTOP)  # No page arrives meanwhile.
        stored = [poison(cluster.config, cluster.secret, node) for node in (N0, N1)]
        poison_memory(cluster.config, cluster.secret, N0, P0)
        poison_memory(cluster.config, cluster.secret, {D0: N0, D1: N1}[victim], victim)
        os.kill(pid, signal.SIGKILL)
        got = reading.result(END_S)
    recoveries = cluster.state()["recoveries"]

    assert min(stored) > 5
    assert [each["option"] for each in recoveries] == ["migrate", "recompute"], recoveries
    assert "not_a_number" in recoveries[-1]["cause"]
    assert got == Stream(cluster).read()
