"""Five agents on five hosts: what each comes to hold of the others when hosts die, sleep, or cannot reach each other."""

import signal
from collections.abc import Iterator

import pytest

from tests.networks.agents_on_hosts import AgentsOnHosts

STALL_S = 5.0
LOOK_S = 6.0  # Three times what a death needs to be known.


@pytest.fixture(scope="module")
def running(possible: None) -> Iterator[AgentsOnHosts]:
    with AgentsOnHosts(5) as agents:
        agents.start_all()
        yield agents


@pytest.fixture
def agents(running: AgentsOnHosts) -> Iterator[AgentsOnHosts]:
    """All alive, before and after."""
    yield running
    running.network.heal()
    running.settle()


def test_a_host_that_dies_is_known_dead_by_all_and_its_next_life_is_believed(agents: AgentsOnHosts) -> None:
    """Nobody else is held dead for it."""
    others = [name for name in agents.names if name != "n3"]
    deaths = len(agents.watch.deaths)

    agents.kill("n3")
    agents.until(lambda: agents.hold(others, ["n3"], "dead"))
    agents.start("n3")
    agents.settle()

    assert {death.member for death in agents.watch.deaths[deaths:]} == {"n3"}


def test_both_sides_of_a_partition_declare_the_other_and_meet_again(agents: AgentsOnHosts) -> None:
    """No side is more right than the other, and nobody has to be told that the wire is back."""
    few, many = agents.names[:2], agents.names[2:]

    agents.network.sever(few, many)
    agents.until(lambda: agents.hold(few, many, "dead") and agents.hold(many, few, "dead"))
    within = agents.hold(few, few, "alive") and agents.hold(many, many, "alive")
    agents.network.heal()
    agents.settle()

    assert within


def test_two_hosts_that_do_not_hear_each_other_live_by_the_word_of_the_others(agents: AgentsOnHosts) -> None:
    """A wire that is broken between two, in one direction (n0, n1) or in both (n2, n3), is no death."""
    agents.network.block("n0", "n1")
    agents.network.sever(["n2"], ["n3"])

    assert agents.deaths_within(LOOK_S) == []


def test_a_host_that_only_speaks_costs_nobody_else_his_life(agents: AgentsOnHosts) -> None:
    """It hears nobody, and says so; whoever it is about knows better, and so do those who believe him."""
    for name in agents.names[1:]:
        agents.network.block(name, "n0")

    deaths = agents.deaths_within(2 * LOOK_S)
    agents.network.heal()
    agents.settle()

    assert {(by, about) for by, about in deaths if by != "n0"} <= {(name, "n0") for name in agents.names}


def test_nobody_dies_of_lost_packets(agents: AgentsOnHosts) -> None:
    """A quarter of what arrives anywhere is dropped."""
    agents.network.lose(25, *agents.names)

    assert agents.deaths_within(8.0) == []


def test_who_slept_declares_nobody_dead_and_is_alive_again(agents: AgentsOnHosts) -> None:
    """What did not come while a process was stopped says nothing of those who should have sent it."""
    deaths = len(agents.watch.deaths)
    agents.signal("n2", signal.SIGSTOP)
    agents.deaths_within(STALL_S)

    agents.signal("n2", signal.SIGCONT)
    agents.settle()
    agents.deaths_within(1.0)

    assert {death.by for death in agents.watch.deaths[deaths:]} <= set(agents.names) - {"n2"}
    assert {death.member for death in agents.watch.deaths[deaths:]} <= {"n2"}
