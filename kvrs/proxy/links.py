"""What the links between nodes carry at least, by whoever measured them last. Pure: `now_s` is an argument."""

from dataclasses import dataclass

from kvrs.ids import NodeId
from kvrs.policy.events import LinkMeasured
from kvrs.transfer.meter import Measurement, lower_bound

# The bound sinks with every second in which nothing is measured; smaller steps than this change no decision.
_STEP = 0.02
# The same measurement, told twice, is never exactly as old as it says: reports travel.
_SAME_S = 0.5


@dataclass(slots=True)
class _Link:
    measured_s: float
    told_bytes_per_s: float = 0.0


class Links:
    """Instances say what they measured, and by gossip so do the agents of nodes that cannot be asked. The newest word counts."""

    def __init__(self) -> None:
        self._links: dict[tuple[NodeId, NodeId], _Link] = {}

    def measured(self, source: NodeId, target: NodeId, measured: Measurement, now_s: float) -> LinkMeasured | None:
        """What the policy is to be told, if it does not know that already."""
        measured_s = now_s - measured.age_s
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = _Link(measured_s)
        elif measured_s < link.measured_s - _SAME_S:
            return None
        link.measured_s = max(link.measured_s, measured_s)
        bound = lower_bound(measured)
        if abs(bound - link.told_bytes_per_s) <= _STEP * link.told_bytes_per_s:
            return None
        link.told_bytes_per_s = bound
        return LinkMeasured(source, target, bound)
