"""Gossip in bad weather: what is delayed, overtaken, doubled, damaged and cut on its way costs nobody his life."""

import contextlib

from tests.networks.agents_on_hosts import GOSSIP_PORT, AgentsOnHosts
from tests.networks.weather_relay import Fate, Relay, Weather

ROUGH = {"lost": 0.05, "doubled": 0.1, "damaged": 0.1, "cut": 0.05, "delay_s": 0.05}


def test_one_seed_makes_one_weather() -> None:
    """What befalls a packet depends on its number, and on nothing that came before it."""
    weather = Weather(seed=3, **ROUGH)

    forwards = [weather.fate(number) for number in range(200)]
    backwards = [weather.fate(number) for number in reversed(range(200))]

    assert forwards == backwards[::-1] != [Weather(seed=4, **ROUGH).fate(number) for number in range(200)]
    assert {len(fate.delays_s) for fate in forwards} == {0, 1, 2}
    assert Weather(seed=3).fate(5) == Fate((0.0,), None, None)


def test_members_live_and_deaths_are_known_in_bad_weather(possible: None) -> None:
    """All that reaches the agents of three hosts comes through relays, over UDP and TCP."""
    with contextlib.ExitStack() as stack:
        agents = stack.enter_context(AgentsOnHosts(3))
        relays = [
            stack.enter_context(Relay(agents.network, name, protocol, GOSSIP_PORT, Weather(seed=number, **ROUGH)))
            for number, name in enumerate(agents.names)
            for protocol in ("udp", "tcp")
        ]
        agents.start_all()

        died_of_it = agents.deaths_within(6.0)
        agents.kill("n2")
        agents.until(lambda: agents.hold(["n0", "n1"], ["n2"], "dead"))
        agents.start("n2")
        agents.settle()
        shown = [agents.members(name) for name in agents.names]

    assert died_of_it == []
    assert all(relay.seen["packets"] for relay in relays[::2])
    for each in shown:
        assert each["dropped"]["malformed"] == 0
    assert sum(each["dropped"].get("forged", 0) for each in shown) > 0
    assert sum(each["dropped"].get("replayed", 0) for each in shown) > 0
