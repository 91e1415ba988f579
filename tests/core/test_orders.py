"""Orders to drain, as several proxies have them."""

from itertools import permutations

import pytest

from kvrs.core.control import Control
from kvrs.errors import RequestError
from kvrs.ids import NodeId
from kvrs.protocol.instance import Role
from kvrs.protocol.mirror import StandingOrder
from kvrs.proxy.fleet.orders import DrainOrder, obey
from kvrs_lab.sim.streams import SimStream
from tests.core.test_core import D0, P0, Driver

N0 = NodeId("n0")


def moves_in_s(control: Control[SimStream], now_s: float = 0.0) -> float | None:
    """When what runs at d0 is moved; None: it is not drained."""
    described = control.drains.describe(D0, now_s)
    return None if described is None else float(described["moves_in_s"])


def test_the_last_order_counts_in_whatever_sequence_they_are_heard() -> None:
    """All proxies come to the same, whichever of them they hear of first."""
    orders = [
        StandingOrder(D0, 5, "proxy-0", 10.0),
        StandingOrder(D0, 6, "proxy-0", None),
        StandingOrder(D0, 7, "proxy-0", 20.0),
        StandingOrder(D0, 7, "proxy-1", 30.0),  # At the same time; the higher id counts.
    ]

    for heard in permutations(orders):
        control = Driver().control
        for order in heard:
            control.orders.take([order], 0.0)
        assert moves_in_s(control) == 30.0
        assert control.orders.shown(0.0) == [orders[3]]


@pytest.mark.parametrize("drain_s", [None, 8.0])
def test_an_order_is_above_all_that_are_known_where_it_is_given(drain_s: float | None) -> None:
    """Also where the clock is behind that of the proxy which gave the one before."""
    here, there = Driver().control, Driver().control
    there.orders.give(D0, 5.0, 0.0, wall_s=1e9)

    here.orders.take(there.orders.shown(0.0), 0.0)
    here.orders.give(D0, drain_s, 0.0, wall_s=5e8)
    there.orders.take(here.orders.shown(0.0), 0.0)

    assert moves_in_s(here) == moves_in_s(there) == drain_s


def test_what_is_repeated_does_not_begin_anew() -> None:
    """Each hello has the order, with the time that is left by the clock of its sender."""
    here, there = Driver().control, Driver().control
    there.orders.give(D0, 10.0, 0.0, wall_s=1.0)

    new = [here.orders.take(there.orders.shown(at_s), 100.0 + at_s) for at_s in (4.0, 5.0, 20.0)]

    assert new == [True, False, False]
    assert moves_in_s(here, 105.0) == 5.0
    assert [order.moves_in_s for order in there.orders.shown(20.0)] == [0.0]


def test_an_order_is_forgotten_with_its_instance() -> None:
    """A proxy that has not removed it yet does not bring the order back."""
    here, there = Driver().control, Driver().control
    there.orders.give(D0, 10.0, 0.0, wall_s=1.0)
    there.orders.give(P0, 10.0, 0.0, wall_s=1.0)
    here.orders.take(there.orders.shown(0.0), 0.0)

    here.instances.remove(here.instances.known[D0])
    here.orders.forget(D0)
    heard = here.orders.take(there.orders.shown(1.0), 1.0)

    assert not heard
    assert [order.instance for order in here.orders.shown(1.0)] == [P0]


def test_an_instance_that_is_added_again_is_not_drained() -> None:
    """By a proxy that is still removing the one before, which was drained by an order."""
    here, there = Driver().control, Driver().control
    there.orders.give(D0, 10.0, 0.0, wall_s=1.0)
    here.orders.take(there.orders.shown(0.0), 0.0)
    for control in (here, there):
        control.drains.leave(D0, 30.0, 1.0)

    here.instances.remove(here.instances.known[D0])
    here.orders.forget(D0)
    here.drains.forget(D0)
    here.instances.add(D0, N0, Role.DECODE)
    heard = here.orders.take(there.orders.shown(2.0), 2.0)

    assert not heard
    assert moves_in_s(here) is None


def test_an_instance_whose_removal_is_set_aside_elsewhere_is_not_drained_once_it_is_back() -> None:
    """The other proxy has it all the time, with the order to drain it from before."""
    here, there = Driver().control, Driver().control
    there.orders.give(D0, 10.0, 0.0, wall_s=1.0)
    here.orders.take(there.orders.shown(0.0), 0.0)

    here.instances.remove(here.instances.known[D0])
    here.orders.forget(D0)
    here.drains.forget(D0)
    shown_while_gone = here.orders.shown(1.0)
    here.instances.add(D0, N0, Role.DECODE)
    here.orders.take(there.orders.shown(2.0), 2.0)
    there.orders.take(here.orders.shown(2.0), 2.0)

    assert shown_while_gone == []
    assert moves_in_s(here) is moves_in_s(there) is None


def test_the_drain_of_an_instance_that_is_removed_does_not_end() -> None:
    """The operator is told; an order that was given elsewhere changes nothing either."""
    control = Driver().control
    control.drains.leave(D0, 5.0, 0.0)

    for drain_s in (None, 60.0):
        with pytest.raises(RequestError, match="being removed") as refused:
            obey(control, DrainOrder(D0, drain_s), 0.0, 1.0)
        assert refused.value.status == 409
    control.orders.take([StandingOrder(D0, 9, "proxy-0", None)], 0.0)

    assert moves_in_s(control) == 5.0
