"""Instances on degraded or failing GPUs, by gossip, and the ranks that leave these GPUs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvrs.core.model.member import Member
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import GpuHealth, GpuState, InstanceInfo

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
