"""Instances that an operator, or a fault of their node, drains: they get nothing new, and when the
time is over their remaining streams are moved.

Instances on degraded or failing GPUs, by gossip, and the ranks that leave these GPUs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from kvrs.core.fleet.known import Instances
from kvrs.core.model import events as ev
from kvrs.core.model.member import Health, Member
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import GpuHealth, GpuState, InstanceInfo, Role

_ORDER = list(GpuState)
_HEALTHY = (GpuState.HEALTHY, "")


class RankDue(msgspec.Struct, frozen=True):
    """A request to a rank to leave its failing GPU, or to return to a recovered one."""

    instance: InstanceId
    gpu: str
    rank: int
    leaves: bool


@dataclass(slots=True)
class _Asked:
    rank: int
    info: InstanceInfo  # The instance's information at the time of the request.
    has_agreed: bool | None = None  # Answer to the request; None: no answer yet.


class Gpus:
    """Judges GPUs by their agents' reports. A rank with a failing GPU leaves its instance, and the
    other ranks go on. If it cannot leave, and for degraded GPUs, the whole instance is judged.
    """

    def __init__(self, known: Mapping[InstanceId, Member]) -> None:
        self._known = known
        self._names: dict[NodeId, str] = {}
        self._judgements: dict[InstanceId, tuple[GpuState, str]] = {}
        self._asked: dict[tuple[InstanceId, str], _Asked] = {}
        self._due: list[RankDue] = []

    def forget(self, instance: InstanceId) -> None:
        self._judgements.pop(instance, None)
        self._asked = {key: asked for key, asked in self._asked.items() if key[0] != instance}

    def seen(
        self, node: NodeId, gpus: Sequence[GpuHealth]
    ) -> list[tuple[InstanceId, GpuState, str]]:
        """Apply a report of the node's agent; return the instances whose worst GPU has changed,
        with state and reason.

        A GPU that is no longer reported keeps its last state: only the agent is gone.
        """
        names = {gpu.name for gpu in gpus}
        self._names[node] = names.pop() if len(names) == 1 else ""
        changed = []
        for known in self._known.values():
            if known.node != node or not known.was_up:
                continue
            for gpu in gpus:
                self._due += self._ranks_on(known.id, known.info, gpu)
            own = known.info.gpus
            concerned = [
                gpu
                for gpu in gpus
                if (own is None or gpu.uuid in own) and not self._is_left(known.id, gpu)
            ]
            worst = max(concerned, key=lambda gpu: _ORDER.index(gpu.state), default=None)
            judgement = _HEALTHY if worst is None else (worst.state, worst.reason)
            if judgement != self._judgements.get(known.id, _HEALTHY):
                self._judgements[known.id] = judgement
                changed.append((known.id, *judgement))
        return changed

    def name_of(self, node: NodeId) -> str:
        """Return the name of the node's GPUs; empty: not reported, or of several kinds."""
        return self._names.get(node, "")

    def take_due(self) -> list[RankDue]:
        """Take the due requests to instances; `answered` takes each answer."""
        due, self._due = self._due, []
        return due

    def answered(self, due: RankDue, *, refused: bool) -> None:
        if due.leaves and (asked := self._asked.get((due.instance, due.gpu))) is not None:
            asked.has_agreed = not refused

    def _ranks_on(
        self, instance: InstanceId, info: InstanceInfo, gpu: GpuHealth
    ) -> Iterator[RankDue]:
        key = instance, gpu.uuid
        asked = self._asked.get(key)
        if asked is not None and asked.has_agreed is None:
            return
        if gpu.state is GpuState.FAILING:
            for each in info.ranks:
                # After a refusal ask again only when the instance's information has changed.
                if gpu.uuid in each.gpus and (asked is None or asked.info is not info):
                    self._asked[key] = _Asked(each.rank, info)
                    yield RankDue(instance, gpu.uuid, each.rank, leaves=True)
                    return
        elif asked is not None:
            del self._asked[key]
            if asked.has_agreed:
                yield RankDue(instance, gpu.uuid, asked.rank, leaves=False)

    def _is_left(self, instance: InstanceId, gpu: GpuHealth) -> bool:
        """Return whether the GPU's rank has left the instance, or was asked to and has
        not refused.
        """
        asked = self._asked.get((instance, gpu.uuid))
        return asked is not None and asked.has_agreed is not False


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
