"""Rates of links as engines measure them and as the proxy uses them, against the rate of the
kernel.
"""

import pytest

from kvrs.transfer.meter import Measurement, lower_bound
from kvrs_testkit.networks import Network
from tests.networks.cluster_on_hosts import FRONTS, NODES, Clients, ClusterOnHosts

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("networks"),
    pytest.mark.nightly,
]

BYTES_PER_S = 3e6
TRANSFER = {"probe_interval_s": 0.25}


async def test_a_link_is_measured_and_used_by_its_lower_bound(
    possible: None, tiny_llama: str
) -> None:
    """Probes find the rate of an unused link, and the proxy decides by the lower bound. Then a
    hand-off takes the same link, and its tokens are right.
    """
    with (
        Network(*NODES, *FRONTS.values()) as network,
        ClusterOnHosts(network, tiny_llama, gossip=False, transfer=TRANSFER) as cluster,
    ):
        network.throttle("n0", BYTES_PER_S)
        cluster.start("p0", "d1")
        cluster.wait_ready("p0", "d1")
        async with Clients(cluster) as clients:
            await clients.until(lambda: _is_measured(clients))
            await clients.until(lambda: _is_near(clients))

            cluster.start_front("proxy-0")
            await clients.until(lambda: _is_used(clients))
            prompt = list(range(4, 204))
            answer = await clients.ask("proxy-0", prompt, 8)
            links = (await clients.state("proxy-0"))["links"]
            (used,) = [
                link["bytes_per_s"]
                for link in links
                if (link["source"], link["target"]) == ("n0", "n2")
            ]
            (report,) = (await clients.load("d1")).links

    # The hand-off of the answer may have been measured in between.
    assert (
        used
        <= 1.05 * lower_bound(Measurement(report.bytes_per_s, report.spread, 0.0))
        < report.bytes_per_s
    )
    assert len(answer) == 8


async def _is_near(clients: Clients) -> bool:
    """True if the estimate is near the rate."""
    (link,) = (await clients.load("d1")).links
    return link.bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.15)


async def _is_measured(clients: Clients) -> bool:
    return bool((await clients.load("d1")).links)


async def _is_used(clients: Clients) -> bool:
    return any(link["measured"] for link in (await clients.state("proxy-0"))["links"])
