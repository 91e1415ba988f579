"""Orders about which instances there are, as several proxies have them."""

from itertools import permutations
from typing import Any

import pytest

from kvrs.core.fleet.fleet_orders import FleetOrders, node_of
from kvrs.ids import InstanceId
from kvrs.protocol.mirror import FleetOrder

D0, D1, P0 = InstanceId("d0"), InstanceId("d1"), InstanceId("p0")


def node(name: str, *instances: str, port: int = 1) -> dict[str, Any]:
    rows = [{"id": each, "port": port} for each in instances]
    return {"id": name, "agent": {"port": 9}, "instances": rows}


FILE = [node("n0", "p0", "d0")]


def names(orders: FleetOrders) -> dict[str, list[str]]:
    return {each["id"]: [row["id"] for row in each["instances"]] for each in orders.over()}


def test_all_proxies_come_to_the_same_in_whatever_sequence_they_hear_orders() -> None:
    """The last order about an instance counts; at the same time that of the higher id."""
    given = [
        FleetOrder(D0, 5, "proxy-0", None),
        FleetOrder(D1, 6, "proxy-0", node("n1", "d1")),
        FleetOrder(D1, 7, "proxy-0", None),
        FleetOrder(D1, 7, "proxy-1", node("n1", "d1", port=2)),
    ]
    for heard in permutations(given):
        orders = FleetOrders("proxy-2", FILE)

        new = [orders.take([order]) for order in heard]
        assert new[0] is True
        assert not orders.take(heard)

        assert names(orders) == {"n0": ["p0"], "n1": ["d1"]}
        assert node_of(orders.over(), D1) == node("n1", "d1", port=2)
        assert {order.instance: order for order in orders.shown()} == {D0: given[0], D1: given[3]}
    assert [row["id"] for row in FILE[0]["instances"]] == ["p0", "d0"]


def test_what_is_set_aside_leaves_what_was_carried_out_before_it() -> None:
    """The instance's former order counts, else the file. A newer order is no longer set aside."""
    orders = FleetOrders("a", FILE)
    orders.take([FleetOrder(D1, 1, "b", node("n1", "d1"))])
    orders.take([FleetOrder(D1, 2, "b", None), FleetOrder(D0, 3, "b", None)])
    in_use = [*FILE, node("n1", "d1")]

    assert orders.changing(in_use) == [D1, D0]
    orders.aside |= {D1: "why", D0: "why"}
    assert names(orders) == {"n0": ["p0", "d0"], "n1": ["d1"]}
    assert [order.version for order in orders.shown()] == [2, 3]
    assert orders.carried_out() == []
    orders.take([FleetOrder(D0, 4, "b", node("n0", "d0", port=5))])
    assert orders.aside == {D1: "why"}
    assert node_of(orders.over(), D0) == node("n0", "d0", port=5)


def test_an_order_is_above_all_that_are_known_where_it_is_given() -> None:
    """Also where the clock is behind that of the proxy which gave the one before."""
    here, there = FleetOrders("a", FILE), FleetOrders("b", FILE)
    there.take([there.new(D0, None, wall_s=1e9)])

    here.take(there.shown())
    back = here.new(D0, node("n0", "d0", port=5), wall_s=5e8)

    assert there.take([back]) is True
    assert names(there) == {"n0": ["p0", "d0"]}
    assert node_of(there.over(), D0) == node("n0", "d0", port=5)


def test_an_order_that_is_only_tried_is_not_held() -> None:
    """The proxy looks first whether it can be carried out."""
    orders = FleetOrders("a", FILE)

    tried = orders.over(new=orders.new(P0, None, 1.0))

    assert [row["id"] for row in tried[0]["instances"]] == ["d0"]
    assert names(orders) == {"n0": ["p0", "d0"]}
    assert orders.shown() == []


@pytest.mark.parametrize(
    ("order", "same", "after"),
    [
        (node("n1", "d1"), [*FILE, node("n1", "d1")], FILE),
        (None, [node("n0", "p0")], FILE),
    ],
)
def test_an_order_is_done_with_once_the_file_says_the_same(
    order: dict[str, Any] | None, same: list[dict[str, Any]], after: list[dict[str, Any]]
) -> None:
    """From then on the file counts, and what other proxies still show does not come back."""
    orders = FleetOrders("a", FILE)
    given = orders.new(D1 if order else D0, order, 1.0)
    orders.take([given])
    assert orders.over() == same
    assert orders.shown() == [given]

    orders.read(same)
    assert orders.over() == same
    assert orders.shown() == [given]  # The files of others may not say it yet.
    orders.read(after)
    orders.take([given])

    assert orders.over() == after
    assert orders.shown() == []


def test_a_later_order_counts_where_the_file_has_overruled_the_one_before() -> None:
    """Here, and at other proxies, which are shown it again."""
    orders = FleetOrders("a", FILE)
    orders.take([orders.new(D0, None, 1.0)])
    orders.read([node("n0", "p0")])
    orders.read(FILE)
    assert orders.changing(FILE) == []

    again = orders.new(D0, None, 2.0)
    orders.take([again])

    assert orders.shown() == [again]
    assert orders.changing(FILE) == [D0]
    assert orders.changing(orders.over()) == []
    assert names(orders) == {"n0": ["p0"]}


def test_an_order_for_what_the_file_says_already_is_done_with_at_once() -> None:
    """So that the file counts when it says something else."""
    orders = FleetOrders("a", [node("n0", "p0")])
    orders.take([orders.new(D0, None, 1.0)])

    orders.read(FILE)

    assert names(orders) == {"n0": ["p0", "d0"]}
    assert orders.shown() == []


def test_other_proxies_hear_that_an_instance_of_no_file_is_removed() -> None:
    """The file of the proxy where it was added says so all along."""
    here, there = FleetOrders("a", FILE), FleetOrders("b", FILE)
    there.take([there.new(D1, node("n1", "d1"), 1.0)])
    here.take(there.shown())

    here.take([here.new(D1, None, 2.0)])
    there.take(here.shown())

    assert names(here) == names(there) == {"n0": ["p0", "d0"]}


def test_a_node_that_has_lost_its_instances_goes() -> None:
    """With its agent."""
    orders = FleetOrders("a", [*FILE, node("n1", "d1")])

    orders.take([orders.new(D1, None, 1.0)])

    assert names(orders) == {"n0": ["p0", "d0"]}


def test_a_node_with_stages_of_other_instances_stays() -> None:
    """It goes with the last instance that has a stage there, had it instances itself or not."""
    divided = node("n0", "p0", "d0")
    divided["instances"][1]["stage_hosts"] = [{"node": "n1"}, {"node": "n2"}]
    orders = FleetOrders("a", [divided, node("n1"), node("n2", "d1")])

    orders.take([FleetOrder(D1, 1, "b", None)])
    assert names(orders) == {"n0": ["p0", "d0"], "n1": [], "n2": []}

    orders.take([FleetOrder(D0, 2, "b", None)])
    assert names(orders) == {"n0": ["p0"]}


def test_an_order_may_come_in_while_a_reload_lays_orders_over_the_file() -> None:
    """The reload reads in a thread, and orders are taken on the event loop."""
    orders = FleetOrders("a", FILE)
    orders.take([FleetOrder(D0, 1, "b", None)])

    class Meanwhile(set[InstanceId]):
        def __contains__(self, name: object) -> bool:
            orders.take([FleetOrder(D1, 2, "b", node("n1", "d1"))])
            return False

    laid = orders.over(aside=Meanwhile())

    assert node_of(laid, D0) is None
    assert names(orders) == {"n0": ["p0"], "n1": ["d1"]}
