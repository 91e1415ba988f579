"""Instances that leave while streams run."""

from kvrs.core.attempt import Attempt
from kvrs.core.topology import Topology
from tests.core.test_core import D0, D1, P0, P1, Driver


def test_an_instance_goes_when_those_that_were_moved_from_it_have_their_next_token() -> None:
    """They may fetch their KV there, also when its time is over."""
    driver = Driver()
    live = driver.decoding()
    topology = Topology(driver.control)
    home = live.instance
    assert home is not None

    topology.remove(home, 0.0, 1.0)
    assert live.attempt.plan is not None
    while_it_fetches = topology.gone(5.0)
    live.journal.append(8, 6.0)
    Attempt(driver.control, live, live.attempt.plan).resumed(6.0)

    assert (live.attempt.plan.decode, while_it_fetches) == (D1 if home == D0 else D0, [])
    assert topology.gone(6.0) == [home]


def test_an_instance_without_streams_goes_at_once() -> None:
    driver = Driver()
    topology = Topology(driver.control)

    for name in (P0, D0):
        topology.remove(name, 30.0, 1.0)

    assert topology.gone(1.0) == [P0, D0]
    assert {known.id for known in driver.control.instances.present()} == {P1, D1}
