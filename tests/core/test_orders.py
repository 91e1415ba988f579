"""Orders to drain."""

import pytest

from kvrs.core.control import Control
from kvrs.core.fleet.self_tests import RightWeights
from kvrs.errors import RequestError
from kvrs.ids import InstanceId
from kvrs.protocol.mirror import DrainOrder, Hello
from kvrs.proxy.fleet.orders import ProxyOrders, obey
from kvrs_lab.sim.streams import SimStream
from tests.core.test_core import D0, Driver


def moves_in_s(control: Control[SimStream], now_s: float = 0.0) -> float | None:
    """When what runs at d0 is moved; None: it is not drained."""
    described = control.drains.describe(D0, now_s)
    return None if described is None else float(described["moves_in_s"])


def test_the_drain_of_an_instance_that_is_removed_does_not_end() -> None:
    """The operator is told, and another worker of the proxy does not begin it."""
    control = Driver().control
    control.drains.leave(D0, 5.0, 0.0)

    for drain_s in (None, 60.0):
        with pytest.raises(RequestError, match="being removed") as refused:
            obey(control, DrainOrder(D0, drain_s), 0.0)
        assert refused.value.status == 409

    control.drains.end(D0, 0.0)
    assert moves_in_s(control) == 5.0
    assert ProxyOrders(control, lambda: 0.0).drains() == []


def test_a_worker_that_starts_begins_the_drains_of_another_one() -> None:
    """With the time that is left by the clock of the other one; none of an unknown instance."""
    here, there = Driver().control, Driver().control
    obey(there, DrainOrder(D0, 10.0), 0.0)

    shown = ProxyOrders(there, lambda: 4.0).drains()
    ProxyOrders(here, lambda: 100.0).begin([*shown, DrainOrder(InstanceId("d9"), 1.0)])

    assert moves_in_s(here, 101.0) == 5.0


def test_a_proxy_takes_a_later_order_about_the_weights_from_a_peer() -> None:
    """And no earlier one."""
    here, there = Driver().control, Driver().control
    there.self_tests.choice = earlier = RightWeights(frozenset({"tokens a"}), 4.0)
    there.instances.fingerprint = "old"
    tell(there, here)
    first = here.self_tests.choice
    here.self_tests.choice = ordered = RightWeights(frozenset({"tokens b"}), 5.0)
    here.instances.fingerprint = "new"

    tell(there, here)
    tell(here, there)

    assert first == earlier
    for control in (here, there):
        assert (control.self_tests.choice, control.instances.fingerprint) == (ordered, "new")


def tell(one: Control[SimStream], other: Control[SimStream]) -> None:
    hello = ProxyOrders(one, lambda: 0.0).shown(Hello("p0", "run"))
    ProxyOrders(other, lambda: 0.0).heard(hello)
