"""Which instances run on a degraded or failing GPU, as far as gossip knows."""

from collections.abc import Mapping, Sequence

from kvrs.control.fleet import KnownInstance
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.gpus import GpuHealth, GpuState

_ORDER = list(GpuState)
_HEALTHY = (GpuState.HEALTHY, "")


class Gpus:
    def __init__(self, known: Mapping[InstanceId, KnownInstance]) -> None:
        self._known = known
        self._judgements: dict[InstanceId, tuple[GpuState, str]] = {}

    def judgements(self) -> list[tuple[InstanceId, GpuState, str]]:
        """The last state and reason of every instance whose GPUs were not always healthy."""
        return [(instance, *judgement) for instance, judgement in self._judgements.items()]

    def forget(self, instance: InstanceId) -> None:
        self._judgements.pop(instance, None)

    def seen(
        self, node: NodeId, gpus: Sequence[GpuHealth]
    ) -> list[tuple[InstanceId, GpuState, str]]:
        """Apply what the node's agent reports; return each instance for which the worst of its GPUs
        has changed, with state and reason.

        A GPU that is not reported any more keeps its last state: only the agent is gone.
        """
        changed = []
        for known in self._known.values():
            if known.node != node or known.info is None:
                continue
            own = known.info.gpus
            concerned = [gpu for gpu in gpus if own is None or gpu.uuid in own]
            worst = max(concerned, key=lambda gpu: _ORDER.index(gpu.state), default=None)
            judgement = _HEALTHY if worst is None else (worst.state, worst.reason)
            if judgement != self._judgements.get(known.id, _HEALTHY):
                self._judgements[known.id] = judgement
                changed.append((known.id, *judgement))
        return changed
