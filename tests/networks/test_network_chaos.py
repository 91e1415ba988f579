"""Gossip through relays that delay, reorder, duplicate, damage and cut packets: no false
deaths.
"""

import contextlib

import pytest

from tests.networks.agents_on_hosts import GOSSIP_PORT, AgentsOnHosts
from tests.networks.chaos_relay import ChaosSettings, Fate, Relay

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("networks")]

DISTURBED = {"lost": 0.05, "duplicated": 0.1, "damaged": 0.1, "cut": 0.05, "delay_s": 0.05}


def test_a_seed_determines_the_fates_of_packets() -> None:
    """The fate of a packet depends on its number, and on no packet before it."""
    chaos = ChaosSettings(seed=3, **DISTURBED)

    forwards = [chaos.fate(number) for number in range(200)]
    backwards = [chaos.fate(number) for number in reversed(range(200))]

    assert (
        forwards
        == backwards[::-1]
        != [ChaosSettings(seed=4, **DISTURBED).fate(number) for number in range(200)]
    )
    assert {len(fate.delays_s) for fate in forwards} == {0, 1, 2}
    assert ChaosSettings(seed=3).fate(5) == Fate((0.0,), None, None)


def test_deaths_and_only_deaths_are_detected_through_relays(possible: None) -> None:
    """All packets to the agents of three hosts pass relays, over UDP and TCP."""
    with contextlib.ExitStack() as stack:
        agents = stack.enter_context(AgentsOnHosts(3))
        relays = [
            stack.enter_context(
                Relay(
                    agents.network,
                    name,
                    protocol,
                    GOSSIP_PORT,
                    ChaosSettings(seed=number, **DISTURBED),
                )
            )
            for number, name in enumerate(agents.names)
            for protocol in ("udp", "tcp")
        ]
        agents.start_all()

        false_deaths = agents.deaths_within(6.0)
        agents.kill("n2")
        agents.until(lambda: agents.hold(["n0", "n1"], ["n2"], "dead"))
        agents.start("n2")
        agents.settle()
        shown = [agents.members(name) for name in agents.names]

    assert false_deaths == []
    assert all(relay.seen["packets"] for relay in relays[::2])
    for each in shown:
        assert each["dropped"]["malformed"] == 0
    assert sum(each["dropped"].get("forged", 0) for each in shown) > 0
    assert sum(each["dropped"].get("replayed", 0) for each in shown) > 0
