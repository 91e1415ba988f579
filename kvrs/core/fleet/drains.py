"""Instances that an operator, or a fault of their node, drains: they get nothing new, and when the
time is over their remaining streams are moved.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvrs.core.fleet.known import Instances
from kvrs.core.model import events as ev
from kvrs.core.model.member import Health, Member
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Role


class NodeFault(NamedTuple):
    """A reason for which instances should leave a machine."""

    cause: str
    drain_s: float  # Longest time that streams stay there; 0: they are moved at once.


class Drains:
    """The drains of one proxy. `produced_on` returns the numbers of tokens that an instance's
    streams have produced, as in `InstanceLost`.
    """

    def __init__(
        self,
        instances: Instances,
        produced_on: Callable[[InstanceId], dict[StreamId, int]],
        tell: Callable[[ev.Event, float], None],
    ) -> None:
        self._instances = instances
        self._produced_on = produced_on
        self._tell = tell
        # Time when the remaining streams of each drained instance are moved.
        self._ordered: dict[InstanceId, float] = {}
        # Fault of the node, for each instance that is drained because of it.
        self._faults: dict[InstanceId, NodeFault] = {}
        # Fault of the node that an operator has overruled, until the node has another one or none.
        self._overruled: dict[InstanceId, NodeFault] = {}
        # Instances that are drained for removal, with the time until which KV retained there is
        # waited for; their drains do not end.
        self.leaving: dict[InstanceId, float] = {}

    def fault(self, instance: InstanceId) -> str | None:
        """Return why an instance cannot be drained (its streams would have nowhere to go); None: it
        can.
        """
        known = self._instances.known[instance]
        if known.health is not Health.UP or instance in self._ordered:
            return None
        others = [
            each
            for each in self._instances.known.values()
            if each is not known and self.remains(each)
        ]
        for role in (Role.PREFILL, Role.DECODE):
            if known.role in (role, Role.BOTH) and not any(
                each.role in (role, Role.BOTH) for each in others
            ):
                return f"no other instance that is up and not drained can do {role.value}"
        return None

    def remains(self, known: Member) -> bool:
        """Return whether the instance is up and may get new streams."""
        return known.health is Health.UP and not self.is_draining(known.id)

    def begin(self, instance: InstanceId, drain_s: float, now_s: float) -> None:
        """Drain an instance: it gets nothing new, and streams that remain after `drain_s` are
        moved.
        """
        self._faults.pop(instance, None)
        self._ordered[instance] = now_s + drain_s
        self._order(instance, moves=drain_s <= 0, now_s=now_s)

    def _order(self, instance: InstanceId, *, moves: bool, now_s: float) -> None:
        cause = self._cause(instance)
        self._tell(ev.DrainOrdered(instance, moves, self._produced_on(instance), **cause), now_s)

    def _cause(self, instance: InstanceId) -> dict[str, str]:
        fault = self._faults.get(instance)
        return {} if fault is None else {"cause": fault.cause}

    def follow_nodes(self, faults: Mapping[InstanceId, NodeFault], now_s: float) -> None:
        """Drain the instances whose node has a fault, and end the drains of those whose node has
        none any more. The drains of operators stay as they are, and a drain that an operator has
        ended does not begin again for the same fault.
        """
        for instance in self._faults.keys() - faults.keys():
            self._end(instance, now_s)
        self._overruled = {
            instance: fault
            for instance, fault in self._overruled.items()
            if faults.get(instance) == fault
        }
        for instance, fault in faults.items():
            is_ordered = instance in self._ordered and instance not in self._faults
            is_known = fault in (self._faults.get(instance), self._overruled.get(instance))
            if not is_known and not is_ordered:
                self._faults[instance] = fault
                self._ordered[instance] = now_s + fault.drain_s
                self._order(instance, moves=fault.drain_s <= 0, now_s=now_s)

    def leave(self, instance: InstanceId, drain_s: float, now_s: float) -> None:
        """Drain an instance, if it is not drained yet, for its removal."""
        self.leaving[instance] = now_s + drain_s
        if instance not in self._ordered:
            self.begin(instance, drain_s, now_s)

    def end(self, instance: InstanceId, now_s: float) -> None:
        """End a drain by an operator's order, unless the instance is being removed."""
        if (fault := self._faults.get(instance)) is not None:
            self._overruled[instance] = fault
        self._end(instance, now_s)

    def _end(self, instance: InstanceId, now_s: float) -> None:
        if instance in self.leaving:
            return
        self._faults.pop(instance, None)
        if self._ordered.pop(instance, None) is not None:
            self._tell(ev.DrainEnded(instance), now_s)

    def forget(self, instance: InstanceId) -> None:
        """Forget a removed instance."""
        self._faults.pop(instance, None)
        self._overruled.pop(instance, None)
        self._ordered.pop(instance, None)
        self.leaving.pop(instance, None)

    def reported(self, instance: InstanceId, now_s: float) -> None:
        """Repeat the order to move streams at each report after the drain's time: before, no target
        may have been up.
        """
        moves_at_s = self._ordered.get(instance)
        if moves_at_s is None or now_s < moves_at_s:
            return
        if self._produced_on(instance):
            self._order(instance, moves=True, now_s=now_s)

    def is_draining(self, instance: InstanceId) -> bool:
        """Return whether an order drains the instance, or its process is about to end."""
        load = self._instances.known[instance].load
        return instance in self._ordered or (load is not None and load.draining)

    def moves_in_s(self, now_s: float) -> dict[InstanceId, float]:
        """Time until the remaining streams are moved, by instance that an operator drains and that
        is not being removed.
        """
        return {
            name: max(0.0, at_s - now_s)
            for name, at_s in self._ordered.items()
            if name not in self.leaving and name not in self._faults
        }

    def describe(self, instance: InstanceId, now_s: float) -> dict[str, Any] | None:
        """The drain as plain data; None: nothing drains the instance."""
        if (moves_at_s := self._ordered.get(instance)) is None:
            return None
        return {"moves_in_s": max(0.0, moves_at_s - now_s), **self._cause(instance)}
