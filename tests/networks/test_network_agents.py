"""Five agents on five hosts: member states when hosts die or cannot reach each other."""

from collections.abc import Iterator

import pytest

from tests.networks.agents_on_hosts import AgentsOnHosts

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("networks"),
    pytest.mark.nightly,
]

LOOK_S = 6.0  # Three times the detection time of a death.


@pytest.fixture(scope="module")
def running(possible: None) -> Iterator[AgentsOnHosts]:
    with AgentsOnHosts(5) as agents:
        agents.start_all()
        yield agents


@pytest.fixture
def agents(running: AgentsOnHosts) -> Iterator[AgentsOnHosts]:
    """All alive, before and after each test."""
    yield running
    running.network.heal()
    running.settle()


def test_a_death_and_a_restart_of_a_host_are_known_to_all(
    agents: AgentsOnHosts,
) -> None:
    """No other host is declared dead."""
    others = [name for name in agents.names if name != "n3"]
    deaths = len(agents.watch.deaths)

    agents.kill("n3")
    agents.until(lambda: agents.hold(others, ["n3"], "dead"))
    agents.start("n3")
    agents.settle()

    assert {death.member for death in agents.watch.deaths[deaths:]} == {"n3"}


def test_both_sides_of_a_partition_declare_the_other_dead_and_rejoin(agents: AgentsOnHosts) -> None:
    """Each side goes on by itself, and no configuration is needed when the link is back."""
    few, many = agents.names[:2], agents.names[2:]

    agents.network.sever(few, many)
    agents.until(lambda: agents.hold(few, many, "dead") and agents.hold(many, few, "dead"))
    within = agents.hold(few, few, "alive") and agents.hold(many, many, "alive")
    agents.network.heal()
    agents.settle()

    assert within


def test_lost_packets_and_broken_links_cause_no_deaths(agents: AgentsOnHosts) -> None:
    """A link is cut in one direction (n0, n1), one in both (n2, n3), and a quarter of all other
    packets is lost: relays still reach all.
    """
    agents.network.block("n0", "n1")
    agents.network.sever(["n2"], ["n3"])
    agents.network.lose(25, *agents.names)

    assert agents.deaths_within(LOOK_S) == []
