"""Probes of links by simulated instances."""

import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.pages import TrafficClass
from kvrs.transfer.meter import LinkMeter
from kvrs_lab.sim.links import SimTransfer
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World

RATE = 1.25e9
W0, N1 = InstanceId("w0"), NodeId("n1")


def world(*, probes: bool = True, nodes: int = 3) -> World:
    config = parse_config(
        {
            "cluster": {
                "nodes": [
                    {"id": f"n{n}", "instances": [{"id": f"w{n}", "role": "both"}]}
                    for n in range(nodes)
                ]
            },
            "transfer": {"link_bytes_per_s": RATE},
        }
    )
    arrivals = [Arrival(40.0, tuple(range(40)), 4)]
    return World(config, arrivals, [], seed=0, probes=probes)


def meter(found: World) -> LinkMeter:
    return found.cluster.engines[W0].meter


def test_links_without_traffic_are_measured() -> None:
    """Each instance knows its links before a page has come over one."""
    found = world()
    found.run_before(30.0)

    rates = meter(found).estimates()
    assert set(rates) == {"n1", "n2"}
    assert list(rates.values()) == pytest.approx([RATE, RATE], rel=0.01)
    assert world(probes=False).run_before(30.0)


def test_a_link_that_becomes_slow_is_seen_by_the_next_probes() -> None:
    found = world()
    found.run_before(20.0)

    found.cluster.links.limit(NodeId("n0"), N1, RATE / 10)
    found.run_before(39.0)

    assert meter(found).estimates()[N1] == pytest.approx(RATE / 10, rel=0.1)


def test_checkpoints_on_a_link_do_not_make_it_look_slow() -> None:
    """Recoveries go before checkpoints, so a probe must: else they are priced at what is left."""
    found = world()
    found.run_before(20.0)
    engines, links = found.cluster.engines, found.cluster.links

    for number in range(4):  # More than the link carries in 19 s.
        checkpoint = SimTransfer(
            engines[InstanceId("w1")],
            engines[InstanceId("w2") if number % 2 else W0],
            1 << 15,
            1 << 20,
            TrafficClass.CHECKPOINT,
            lambda pages: True,
            lambda error: None,
        )
        links.send(checkpoint)
    found.run_before(39.0)

    assert links.under_way
    assert meter(found).estimates()[N1] == pytest.approx(RATE, rel=0.1)


def test_probes_take_less_than_one_percent_of_a_link() -> None:
    found = world()
    sent_bytes = 0
    send = found.cluster.links.send

    def count(transfer: SimTransfer) -> None:
        nonlocal sent_bytes
        if transfer.target is found.cluster.engines[W0]:
            sent_bytes += transfer.pages * transfer.page_bytes
        send(transfer)

    found.cluster.links.send = count  # type: ignore[method-assign]
    found.run_before(39.0)

    assert 0 < sent_bytes / (2 * 39.0 * RATE) < 0.01


def test_a_world_with_probes_comes_to_rest() -> None:
    assert world().run().ended == {"complete": 1}
