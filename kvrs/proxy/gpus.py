"""Which instances run on a GPU that is not well, as far as gossip knows. Pure."""

from collections.abc import Callable, Mapping, Sequence

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.gpus import GpuHealth, GpuState
from kvrs.proxy.instances import Known

_ORDER = list(GpuState)
_WELL = (GpuState.HEALTHY, "")


class Gpus:
    def __init__(self, known: Mapping[InstanceId, Known], judged: Callable[[InstanceId, GpuState, str], None]) -> None:
        """`judged` is told of every instance for which the worst of its GPUs has changed."""
        self._known = known
        self._judged = judged
        self._told: dict[InstanceId, tuple[GpuState, str]] = {}

    def seen(self, node: NodeId, gpus: Sequence[GpuHealth]) -> None:
        """What the node's agent says. Of whom nothing is said any more, the last word stands: only the agent is gone."""
        for known in self._known.values():
            if known.node != node or known.info is None:
                continue
            own = known.info.gpus
            concerned = [gpu for gpu in gpus if own is None or gpu.uuid in own]
            worst = max(concerned, key=lambda gpu: _ORDER.index(gpu.state), default=None)
            judgement = _WELL if worst is None else (worst.state, worst.reason)
            if judgement != self._told.get(known.id, _WELL):
                self._told[known.id] = judgement
                self._judged(known.id, *judgement)
