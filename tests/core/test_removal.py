"""Instances that leave while streams run."""

from kvrs.core.control import Attempt
from kvrs.core.watch import gone, remove
from tests.core.test_core import D0, D1, P0, P1, Driver


def test_an_instance_goes_when_those_that_were_moved_from_it_have_their_next_token() -> None:
    """They may fetch their KV there, also when its time is over."""
    driver = Driver()
    live = driver.decoding()
    home = live.instance
    assert home is not None

    remove(driver.control, home, 0.0, 1.0)
    assert live.attempt.plan is not None
    while_it_fetches = gone(driver.control, 5.0)
    live.journal.append(8, 6.0)
    Attempt(driver.control, live, live.attempt.plan).resumed(6.0)

    assert (live.attempt.plan.decode, while_it_fetches) == (D1 if home == D0 else D0, [])
    assert gone(driver.control, 6.0) == [home]


def test_an_instance_without_streams_goes_at_once() -> None:
    driver = Driver()

    for name in (P0, D0):
        remove(driver.control, name, 30.0, 1.0)

    assert gone(driver.control, 1.0) == [P0, D0]
    assert {known.id for known in driver.control.instances.present()} == {P1, D1}
