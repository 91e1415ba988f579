"""Orders of an operator about instances, and reports of supervisors about processes that have
ended, as the admin port takes them.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec
from msgspec import structs

from kvrs.config.file import Config
from kvrs.core.control import Control
from kvrs.core.fleet.fleet_orders import FleetOrders, Nodes
from kvrs.core.fleet.orders import DrainOrders
from kvrs.core.model import events as ev
from kvrs.errors import RequestError, UpstreamError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import ExitReport, RankRequest
from kvrs.protocol.mirror import Hello
from kvrs.proxy.backends.backend import Backend
from kvrs.proxy.reload import nodes_of
from kvrs.proxy.wire.peer import UNREADABLE


class DrainOrder(msgspec.Struct, frozen=True):
    """Drain the instance: what runs there is moved after `drain_s`. None: the end of that."""

    instance: InstanceId
    drain_s: float | None


class RankOrder(msgspec.Struct, frozen=True):
    """A rank of the instance leaves, or comes back."""

    instance: InstanceId
    rank: int
    leaves: bool


def obey(control: Control[Any], order: DrainOrder, now_s: float, wall_s: float) -> None:
    """Raises RequestError: there is no such instance, it is being removed, or its streams would
    have nowhere to go.
    """
    name = order.instance
    check_named(name, [known.id for known in control.instances.present()])
    if control.drains.leaves(name):
        raise RequestError(
            f"{name} is being removed; allowed: when it is gone and was added again",
            param="id",
            status=409,
        )
    if order.drain_s is not None and (fault := control.drains.fault(name)) is not None:
        raise RequestError(
            f"{name} is not drained: {fault}; allowed: while one is up", param="id", status=409
        )
    control.orders.give(name, order.drain_s, now_s, wall_s)


class StandingOrders:
    """The orders of a proxy, by its clock, as the other proxies exchange them. `heard` is called
    with new ones about the fleet.
    """

    def __init__(
        self,
        drains: DrainOrders,
        fleet: FleetOrders,
        clock: Callable[[], float],
        heard: Callable[[], None],
    ) -> None:
        self._drains = drains
        self._fleet = fleet
        self._clock = clock
        self._heard = heard

    def tell(self, me: Hello) -> Hello:
        """The hello of this proxy, with all orders."""
        drains = self._drains.shown(self._clock())
        return structs.replace(me, orders=drains, fleet=self._fleet.shown())

    def take(self, hello: Hello) -> bool:
        """True if the other proxy has an order that was not known here."""
        is_new = self._drains.take(hello.orders, self._clock())
        if self._fleet.take(hello.fleet):
            self._heard()
            return True
        return is_new


async def pass_on(
    order: RankOrder, control: Control[Any], backends: Mapping[InstanceId, Backend]
) -> None:
    """Have the instance carry it out.

    Raises:
        RequestError: there is no such instance, it does not answer, or it refuses.
    """
    name, instances = order.instance, control.instances
    check_named(name, [known.id for known in instances.present()])
    if (info := instances.known[name].info) is None:
        raise RequestError(f"{name} is not up; allowed: while it is", param="id", status=409)
    request = RankRequest(order.rank, order.leaves, info.epoch)
    try:
        answer = await backends[name].order_rank(request)
    except UpstreamError as fault:
        raise RequestError(f"{name} does not answer: {fault}", param="id", status=503) from None
    if answer.refused is not None:
        raise RequestError(f"{name} refuses: {answer.refused}", param="rank", status=409)


class _NewInstance(msgspec.Struct):
    node: str
    id: str
    agent: dict[str, Any] | None = None


def with_instance(config: Config, body: bytes) -> tuple[InstanceId, Nodes]:
    """An instance, and `cluster.nodes` with it: the body has its keys, and `node`; a new node may
    have `agent`.

    Raises RequestError: the body is no instance, or its id is taken.
    """
    try:
        asked, fields = msgspec.json.decode(body, type=_NewInstance), msgspec.json.decode(body)
    except UNREADABLE as fault:
        raise RequestError(
            f"{fault}; allowed: the keys of an instance (id, role, host, port, ...) and its node"
        ) from None
    if any(asked.id == instance.id for _, instance in config.cluster.instances()):
        raise RequestError(f"{asked.id} is there already", param="id", status=409)
    instance = {key: value for key, value in fields.items() if key not in ("node", "agent")}
    nodes = nodes_of(config)
    node = next((each for each in nodes if each["id"] == asked.node), None)
    if node is not None and asked.agent is not None:
        raise RequestError(f"node {asked.node} has its agent", param="agent", status=409)
    if node is None:
        node = {"id": asked.node, "instances": [], "agent": asked.agent or {}}
        nodes.append(node)
    node["instances"].append(instance)
    return InstanceId(asked.id), nodes


def check_there(config: Config, instance: str) -> None:
    """Raises RequestError: there is none of that id."""
    check_named(instance, [each.id for _, each in config.cluster.instances()])


def check_named(instance: str, names: Collection[str]) -> None:
    """Raises RequestError."""
    if instance not in names:
        raise RequestError(
            f"no instance {instance!r:.80}; allowed: {', '.join(names)}", param="id", status=404
        )


class Exited(msgspec.Struct, frozen=True):
    """A report and the instance that it is about."""

    instance: InstanceId
    report: ExitReport


def parse_exit(instance: str, body: bytes) -> Exited:
    """Raises RequestError: the body is no report."""
    try:
        report = msgspec.json.decode(body, type=ExitReport)
    except UNREADABLE as fault:
        raise RequestError(
            f"{fault}; allowed: start, cause of 1 to 200 characters, and is_external"
        ) from None
    return Exited(InstanceId(instance), report)


def note_exit(control: Control[Any], exited: Exited, now_s: float) -> None:
    """Tell the policy.

    Raises:
        RequestError: there is no such instance, or no such start of it was up here.
    """
    name, report = exited.instance, exited.report
    check_named(name, [known.id for known in control.instances.present()])
    epochs = control.instances.known[name].epochs
    if report.start not in epochs:
        seen = ", ".join(map(str, epochs)) or "none, it was not up here"
        raise RequestError(f"start: got {report.start}; allowed: {seen}", param="start", status=409)
    event = ev.InstanceExited(name, epochs[report.start], report.cause, report.is_external)
    control.tell(event, now_s)
