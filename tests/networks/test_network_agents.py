"""Five agents on five hosts: member states when hosts die, are stopped, or cannot reach each
other.
"""

import signal
from collections.abc import Iterator

import pytest

from tests.networks.agents_on_hosts import AgentsOnHosts

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("networks")]

STALL_S = 5.0
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


def test_a_broken_link_between_two_hosts_is_no_death(
    agents: AgentsOnHosts,
) -> None:
    """In one direction (n0, n1) or in both (n2, n3): relays still reach both."""
    agents.network.block("n0", "n1")
    agents.network.sever(["n2"], ["n3"])

    assert agents.deaths_within(LOOK_S) == []


def test_a_host_that_receives_nothing_causes_no_deaths_of_others(agents: AgentsOnHosts) -> None:
    """Its suspicions reach all others, which refute them."""
    for name in agents.names[1:]:
        agents.network.block(name, "n0")

    deaths = agents.deaths_within(2 * LOOK_S)
    agents.network.heal()
    agents.settle()

    assert {(by, about) for by, about in deaths if by != "n0"} <= {
        (name, "n0") for name in agents.names
    }


def test_lost_packets_cause_no_deaths(agents: AgentsOnHosts) -> None:
    """A quarter of all packets is dropped."""
    agents.network.lose(25, *agents.names)

    assert agents.deaths_within(8.0) == []


def test_a_stopped_host_declares_no_death_and_is_alive_again(agents: AgentsOnHosts) -> None:
    """Packets that were missed while a process was stopped are no sign of a death."""
    deaths = len(agents.watch.deaths)
    agents.signal("n2", signal.SIGSTOP)
    agents.deaths_within(STALL_S)

    agents.signal("n2", signal.SIGCONT)
    agents.settle()
    agents.deaths_within(1.0)

    assert {death.by for death in agents.watch.deaths[deaths:]} <= set(agents.names) - {"n2"}
    assert {death.member for death in agents.watch.deaths[deaths:]} <= {"n2"}
