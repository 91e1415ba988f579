"""Orders of an operator about instances, as the admin port takes them and workers pass them on."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from kvrs.config.file import Config
from kvrs.control.core import Control
from kvrs.control.orders import DrainOrders
from kvrs.errors import RequestError, UpstreamError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import RankRequest
from kvrs.protocol.mirror import StandingOrder
from kvrs.proxy.backends.backend import Backend


class DrainOrder(msgspec.Struct, frozen=True):
    """Drain the instance: what runs there is moved after `drain_s`. None: the end of that."""

    instance: InstanceId
    drain_s: float | None
    is_trial: bool = False  # Whether it could be carried out; it is not.


class RankOrder(msgspec.Struct, frozen=True):
    """A rank of the instance leaves, or comes back."""

    instance: InstanceId
    rank: int
    leaves: bool


class OrderRefused(msgspec.Struct, frozen=True):
    status: int
    message: str


def obey(control: Control[Any], order: DrainOrder, now_s: float, wall_s: float) -> None:
    """Raises RequestError: there is no such instance, or its streams would have nowhere to go."""
    name = order.instance
    _check_there(name, [known.id for known in control.instances.present()])
    if order.drain_s is not None and (fault := control.drains.fault(name)) is not None:
        raise RequestError(
            f"{name} is not drained: {fault}; allowed: while one is up", param="id", status=409
        )
    if not order.is_trial:
        control.orders.give(name, order.drain_s, now_s, wall_s)


class StandingOrders:
    """The orders of a proxy, by its clock, as the other proxies exchange them."""

    def __init__(self, orders: DrainOrders, clock: Callable[[], float]) -> None:
        self._orders = orders
        self._clock = clock

    def shown(self) -> list[StandingOrder]:
        return self._orders.shown(self._clock())

    def take(self, orders: list[StandingOrder]) -> bool:
        return self._orders.take(orders, self._clock())


async def pass_on(
    order: RankOrder, control: Control[Any], backends: Mapping[InstanceId, Backend]
) -> None:
    """Have the instance carry it out.

    Raises:
        RequestError: there is no such instance, it does not answer, or it refuses.
    """
    name, instances = order.instance, control.instances
    _check_there(name, [known.id for known in instances.present()])
    if (info := instances.known[name].info) is None:
        raise RequestError(f"{name} is not up; allowed: while it is", param="id", status=409)
    request = RankRequest(order.rank, order.leaves, info.epoch)
    try:
        answer = await backends[name].order_rank(request)
    except UpstreamError as fault:
        raise RequestError(f"{name} does not answer: {fault}", param="id", status=503) from None
    if answer.refused is not None:
        raise RequestError(f"{name} refuses: {answer.refused}", param="rank", status=409)


class FleetChange(msgspec.Struct, frozen=True):
    """Other `cluster.nodes`, in plain data."""

    nodes: list[Any]
    is_trial: bool = False


class _NewInstance(msgspec.Struct):
    node: str
    id: str
    agent: dict[str, Any] | None = None


def with_instance(config: Config, body: bytes) -> list[Any]:
    """`cluster.nodes` with one more instance: its keys, and `node`; a new node may have `agent`.

    Raises RequestError: the body is no instance, or its id is taken.
    """
    try:
        asked, fields = msgspec.json.decode(body, type=_NewInstance), msgspec.json.decode(body)
    except msgspec.DecodeError as fault:
        raise RequestError(
            f"{fault}; allowed: the keys of an instance (id, role, host, port, ...) and its node"
        ) from None
    if any(asked.id == instance.id for _, instance in config.cluster.instances()):
        raise RequestError(f"{asked.id} is there already", param="id", status=409)
    instance = {key: value for key, value in fields.items() if key not in ("node", "agent")}
    nodes = _nodes(config)
    node = next((each for each in nodes if each["id"] == asked.node), None)
    if node is not None and asked.agent is not None:
        raise RequestError(f"node {asked.node} has its agent", param="agent", status=409)
    if node is None:
        node = {"id": asked.node, "instances": [], "agent": asked.agent or {}}
        nodes.append(node)
    node["instances"].append(instance)
    return nodes


def without_instance(config: Config, instance: str) -> list[Any]:
    """`cluster.nodes` without it, and without its node if that has no other one.

    Raises RequestError: there is none.
    """
    names = [each.id for _, each in config.cluster.instances()]
    _check_there(instance, names)
    nodes = _nodes(config)
    for node in nodes:
        node["instances"] = [each for each in node["instances"] if each["id"] != instance]
    return [node for node in nodes if node["instances"]]


def _check_there(instance: str, names: Collection[str]) -> None:
    """Raises RequestError."""
    if instance not in names:
        raise RequestError(
            f"no instance {instance!r:.80}; allowed: {', '.join(names)}", param="id", status=404
        )


def _nodes(config: Config) -> list[Any]:
    return [node.model_dump(mode="json") for node in config.cluster.nodes]
