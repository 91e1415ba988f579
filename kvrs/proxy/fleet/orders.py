"""An operator's orders about instances, and supervisors' reports of ended processes, as the admin
port accepts them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from kvrs.core.control import Control
from kvrs.core.fleet.self_tests import RightWeights
from kvrs.core.model import events as ev
from kvrs.errors import RequestError, UpstreamError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import ExitReport, RankRequest
from kvrs.protocol.mirror import MAX_MARK, MAX_MARKS, MAX_MODEL, DrainOrder, Hello
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.proxy.backends.backend import Backend


class RankOrder(msgspec.Struct, frozen=True):
    """An order to a rank to leave or to return."""

    instance: InstanceId
    rank: int
    leaves: bool


def obey(control: Control[Any], order: DrainOrder, now_s: float) -> None:
    """Carry out a drain order, or end the drain if `drain_s` is None. Raises RequestError: no such
    instance, the instance is being removed, or its streams would have nowhere to go.
    """
    name = order.instance
    check_named(name, [known.id for known in control.instances.present()])
    if name in control.drains.leaving:
        raise RequestError(
            f"{name} is being removed; allowed: when it is gone and was added again",
            param="id",
            status=409,
        )
    if order.drain_s is None:
        control.drains.end(name, now_s)
        return
    if (fault := control.drains.fault(name)) is not None:
        raise RequestError(
            f"{name} is not drained: {fault}; allowed: while one is up", param="id", status=409
        )
    control.drains.begin(name, order.drain_s, now_s)


class ProxyOrders:
    """An operator's orders at one proxy, in the form in which proxies and workers exchange them."""

    def __init__(self, control: Control[Any], clock: Callable[[], float]) -> None:
        self._control = control
        self._clock = clock

    def shown(self, me: Hello) -> Hello:
        """Return the hello of this proxy, with the orders that are in force."""
        choice, model = self._control.self_tests.choice, self._control.instances.fingerprint
        return msgspec.structs.replace(
            me,
            drains=self.drains(),
            model=model if len(model) <= MAX_MODEL else "",
            weights=sorted(each for each in choice.marks if len(each) <= MAX_MARK)[:MAX_MARKS],
            weights_ordered_s=choice.ordered_s,
        )

    def heard(self, hello: Hello) -> None:
        """Take over a peer's choice of the model and its weights, if it is a later one."""
        choice = RightWeights(frozenset(hello.weights), hello.weights_ordered_s)
        self._control.heard(hello.model, choice, self._clock())

    def accept(self, instance: str, ordered_s: float) -> None:
        """Let an instance's model and weights be the right ones. Raises RequestError: no such
        instance, or `Control.accept` refuses.
        """
        names = [known.id for known in self._control.instances.present()]
        check_named(instance, names)
        self._control.accept(InstanceId(instance), ordered_s, self._clock())

    def drains(self) -> list[DrainOrder]:
        moves_in_s = self._control.drains.moves_in_s(self._clock())
        return [DrainOrder(name, drain_s) for name, drain_s in moves_in_s.items()]

    def obey(self, order: DrainOrder) -> None:
        """Carry out a drain order. Raises RequestError, like the function `obey`."""
        obey(self._control, order, self._clock())

    def begin(self, orders: Iterable[DrainOrder]) -> None:
        """Begin the drains that another worker has, before this worker serves."""
        for order in orders:
            if order.drain_s is not None and self._control.instances.is_present(order.instance):
                self._control.drains.begin(order.instance, order.drain_s, self._clock())


async def pass_on(
    order: RankOrder, control: Control[Any], backends: Mapping[InstanceId, Backend]
) -> None:
    """Send a rank's order to the rank's instance.

    Raises:
        RequestError: no such instance, no answer, or a refusal.
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


def check_named(instance: str, names: Collection[str]) -> None:
    """Check that an instance is configured. Raises RequestError."""
    if instance not in names:
        raise RequestError(
            f"no instance {instance!r:.80}; allowed: {', '.join(names)}", param="id", status=404
        )


class Exited(msgspec.Struct, frozen=True):
    """A supervisor's report about an instance's ended process."""

    instance: InstanceId
    report: ExitReport


def parse_exit(instance: str, body: bytes) -> Exited:
    """Decode a supervisor's report. Raises RequestError: the body is not a report."""
    try:
        report = msgspec.json.decode(body, type=ExitReport)
    except UNREADABLE as fault:
        raise RequestError(
            f"{fault}; allowed: start, cause of 1 to 200 characters, and is_external"
        ) from None
    return Exited(InstanceId(instance), report)


def note_exit(control: Control[Any], exited: Exited, now_s: float) -> None:
    """Pass a supervisor's report to the policy.

    Raises:
        RequestError: no such instance, or no such start of it was up here.
    """
    name, report = exited.instance, exited.report
    check_named(name, [known.id for known in control.instances.present()])
    epochs = control.instances.known[name].epochs
    if report.start not in epochs:
        seen = ", ".join(map(str, epochs)) or "none, it was not up here"
        raise RequestError(f"start: got {report.start}; allowed: {seen}", param="start", status=409)
    event = ev.InstanceExited(name, epochs[report.start], report.cause, report.is_external)
    control.tell(event, now_s)
