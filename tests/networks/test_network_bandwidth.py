"""What a link carries, as engines measure it and as the proxy believes it, against the rate that the kernel gives it."""

import asyncio
import time

import pytest

from kvrs.transfer.meter import Measurement, lower_bound
from tests.networks.cluster_on_hosts import FRONTS, NODES, Clients, ClusterOnHosts
from tests.networks.network_house import Network

BYTES_PER_S = 3e6
PROBES_S = 6.0
TRANSFER = {"probe_interval_s": 0.25, "probe_bytes": 1 << 16}


async def test_a_link_is_measured_by_little_and_believed_with_caution(possible: None) -> None:
    """Probes find the rate of a link of which nothing is known and nothing else is sent, in a hundredth of it; what the proxy
    decides by is the lower bound. Then a hand-off takes the same link, and its tokens are right.
    """
    with Network(*NODES, *FRONTS.values()) as network, ClusterOnHosts(network, gossip=False, transfer=TRANSFER) as cluster:
        network.throttle("n0", BYTES_PER_S)
        cluster.start("p0", "d1")
        cluster.wait_ready("p0", "d1")
        async with Clients(cluster) as clients:
            await clients.until(lambda: _is_measured(clients))
            sent, since_s = network.sent_bytes("n0"), time.monotonic()
            await asyncio.sleep(PROBES_S)
            sent, took_s = network.sent_bytes("n0") - sent, time.monotonic() - since_s
            await clients.until(lambda: _is_near(clients))

            cluster.start_front("proxy-0")
            await clients.until(lambda: _is_believed(clients))
            prompt = list(range(4, 204))
            answer = await clients.ask("proxy-0", prompt, 8)
            links = (await clients.state("proxy-0"))["links"]
            (believed,) = [link["bytes_per_s"] for link in links if (link["source"], link["target"]) == ("n0", "n2")]
            (report,) = (await clients.load("d1")).links

    # One probe more or less may fall into the time that was watched.
    assert TRANSFER["probe_bytes"] < sent <= 0.01 * BYTES_PER_S * took_s + 1.1 * TRANSFER["probe_bytes"]
    # The answer's own hand-off may have been measured in between.
    assert believed <= 1.05 * lower_bound(Measurement(report.bytes_per_s, report.spread, 0.0)) < report.bytes_per_s
    assert len(answer) == 8


async def _is_near(clients: Clients) -> bool:
    """Whether the estimate has come near to the rate."""
    (link,) = (await clients.load("d1")).links
    return link.bytes_per_s == pytest.approx(BYTES_PER_S, rel=0.15)


async def _is_measured(clients: Clients) -> bool:
    return bool((await clients.load("d1")).links)


async def _is_believed(clients: Clients) -> bool:
    return any(link["measured"] for link in (await clients.state("proxy-0"))["links"])
