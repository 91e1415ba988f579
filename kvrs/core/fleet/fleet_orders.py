"""Orders of operators about which instances there are, at whichever proxy they were given. Pure.

They reach the other proxies as orders to drain do (`orders.py`), and of two about one instance that
with the higher version counts everywhere. What a proxy uses is `cluster.nodes` of its file with the
orders laid over it; the addresses of its services count as the file's. An order is done with at a
proxy that reads a file which says the same: from then on the file counts there, until a later
order, and once it says something else, other proxies hear no more of the order from there.

An order that a proxy cannot carry out is set aside there, so that others count: until it can, that
instance is as the order before said, or the file.
"""

import copy
from collections.abc import Container, Iterable
from typing import Any

from kvrs.core.fleet.orders import next_version
from kvrs.ids import InstanceId
from kvrs.protocol.mirror import FleetOrder

Nodes = list[dict[str, Any]]  # `cluster.nodes` in plain data, with all keys.


class FleetOrders:
    """The orders that one proxy holds; `me` is its id, `nodes` are those of its file. `awaited`:
    the services that have not been found yet, so that the file does not say yet which instances
    they have.
    """

    def __init__(self, me: str, nodes: Nodes, awaited: Iterable[str] = ()) -> None:
        self._me = me
        self.nodes = nodes
        self._awaited = [*awaited]
        self._held: dict[InstanceId, FleetOrder] = {}
        self._done: set[InstanceId] = set()  # The file says the same, or has done so.
        self._over: set[InstanceId] = set()  # And says something else now.
        self.aside: dict[InstanceId, str] = {}  # Why they cannot be carried out here.
        self._before: dict[InstanceId, FleetOrder] = {}  # What was carried out of those.

    def new(self, instance: InstanceId, node: dict[str, Any] | None, wall_s: float) -> FleetOrder:
        """One that counts before all that are held; `take` has it carried out. `node`: the node
        with this instance alone; None: it is removed.
        """
        version = next_version((order.version for order in self._held.values()), wall_s)
        return FleetOrder(instance, version, self._me, node)

    def take(self, orders: Iterable[FleetOrder]) -> bool:
        """Hold those that are newer; whether there was any."""
        has_newer = False
        for order in orders:
            held = self._held.get(order.instance)
            if held is not None and _rank(held) >= _rank(order):
                continue
            has_newer = True
            if held is not None and held.instance not in self.aside.keys() | self._done:
                self._before[held.instance] = held
            self.aside.pop(order.instance, None)
            self._held[order.instance] = order
            self._done.discard(order.instance)
            self._over.discard(order.instance)
        self._look_at_file()
        return has_newer

    def read(self, nodes: Nodes, awaited: Iterable[str] = ()) -> None:
        """The file has been read again, or its services have other addresses."""
        self.nodes = nodes
        self._awaited = [*awaited]
        self._look_at_file()

    def _look_at_file(self) -> None:
        for name, order in self._held.items():
            if any(name.startswith(f"{service}-") for service in self._awaited):
                continue
            if node_of(self.nodes, name) == order.node:
                self._done.add(name)
            elif name in self._done:
                self._over.add(name)

    def shown(self) -> list[FleetOrder]:
        """For other proxies."""
        return [order for name, order in self._held.items() if name not in self._over]

    def carried_out(self) -> list[FleetOrder]:
        return [order for order in self.shown() if order.instance not in self.aside]

    def changing(self, nodes: Nodes) -> list[InstanceId]:
        """Those that say something else than is in use, the oldest first, also such as are set
        aside.
        """
        held = sorted(self._held.values(), key=_rank)
        return [
            order.instance
            for order in held
            if order.instance not in self._over and node_of(nodes, order.instance) != order.node
        ]

    def over(
        self,
        nodes: Nodes | None = None,
        new: FleetOrder | None = None,
        aside: Container[InstanceId] | None = None,
    ) -> Nodes:
        """`cluster.nodes` as they are to be, of other ones than the file's, with one more order, or
        with others than now set aside.

        The agent of a node is that of the first order that brings it; nodes without instances go,
        unless they have stages of those of others. Orders may come in meanwhile: a reload calls
        this in a thread.
        """
        aside = self.aside if aside is None else aside
        orders = {
            name: self._before.get(name) if name in aside else order
            for name, order in [*self._held.items()]
            if name in aside or name not in self._done
        }
        if new is not None:
            orders[new.instance] = new
        laid = copy.deepcopy(self.nodes if nodes is None else nodes)
        for name, order in orders.items():
            if order is not None and node_of(laid, name) != order.node:
                _take_out(laid, name)
                if order.node is not None:
                    _put_in(laid, order.node)
        used = {
            host["node"]
            for node in laid
            for each in node["instances"]
            for host in each.get("stage_hosts", ())
        }
        return [node for node in laid if node["instances"] or node["id"] in used]


def _rank(order: FleetOrder) -> tuple[int, str]:
    return order.version, order.given_at


def node_of(nodes: Nodes, instance: str) -> dict[str, Any] | None:
    """The node of an instance, with that one alone; None: there is none."""
    for node in nodes:
        for each in node["instances"]:
            if each["id"] == instance:
                return node | {"instances": [each]}
    return None


def _take_out(nodes: Nodes, instance: str) -> None:
    for node in nodes:
        node["instances"] = [each for each in node["instances"] if each["id"] != instance]


def _put_in(nodes: Nodes, wanted: dict[str, Any]) -> None:
    for node in nodes:
        if node["id"] == wanted["id"]:
            node["instances"] = [*node["instances"], *wanted["instances"]]
            return
    nodes.append(copy.deepcopy(wanted))
