"""A cluster on machines that have IPv6 alone."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs_lab.cluster.guard import members
from kvrs_lab.cluster.launcher import Cluster
from kvrs_testkit.forked import starts_forked
from tests.cluster.launches import until
from tests.cluster.test_ranks_up import LONG, complete

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("clusters"),
    pytest.mark.nightly,
]

HOST = "::1"


@pytest.fixture(scope="module")
def cluster(tiny_llama: str) -> Iterator[Cluster]:
    """Two proxies that are each other's peers, agents, gossip, and an instance of two stages."""
    try:
        socket.create_server((HOST, 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback on this machine")
    decodes = [{}, {"pp": 2, "stage_hosts": [{"node": "n0", "host": HOST}]}]
    nodes = [
        {
            "id": f"n{number}",
            "agent": {"host": HOST},
            "instances": [
                {"id": f"p{number}", "role": "prefill", "host": HOST},
                {"id": f"d{number}", "role": "decode", "host": HOST, **more},
            ],
        }
        for number, more in enumerate(decodes)
    ]
    hosts = ("host", "admin_host", "gossip_host", "peer_host")
    document = {
        "cluster": {"model": tiny_llama, "nodes": nodes, "engine": {"pages": 512}},
        "proxy": {"port": 0, "admin_port": 0, **dict.fromkeys(hosts, HOST)},
        "backup": {"mode": "both"},
        "gossip": {"enabled": True},
    }
    with (
        starts_forked(),
        Cluster(parse_config(document), lambda line: None, proxies=2) as running,
    ):
        yield running


def test_a_stream_survives_a_kill_over_ipv6_alone(cluster: Cluster) -> None:
    """Each port listens at an address of IPv6, and the KV of the dead instance is fetched."""
    expected = complete(cluster, None, LONG)
    with ThreadPoolExecutor(1) as client:
        asked = client.submit(complete, cluster, None, LONG)
        stream = until(lambda: decoding(cluster))
        cluster.kill(InstanceId(stream["decode"]))
        found = asked.result()
    recoveries = [row for proxy in range(2) for row in cluster.state(proxy)["recoveries"]]
    cluster.wait_all_up()

    assert found == expected
    assert [row["from"] for row in recoveries] == [stream["decode"]]
    assert {row["status"] for row in cluster.state()["members"]} == {"alive"}
    assert cluster.state()["proxies"][0]["url"] == cluster.url
    assert {host for _, host in bound(cluster.run_directory)} == {HOST}


def decoding(cluster: Cluster) -> dict[str, str] | None:
    """The stream that has tokens."""
    rows = cluster.state(0)["streams"]
    return next((row for row in rows if row["output_tokens"] > 20), None)


def bound(run_directory: Path) -> set[tuple[str, str]]:
    """Process and address of each port of the cluster."""
    return {
        (process.name(), connection.laddr.ip)
        for process in map(psutil.Process, members(run_directory))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    }
