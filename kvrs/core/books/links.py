"""Lower bounds of the bandwidth between nodes, by the newest measurement."""

from dataclasses import dataclass

from kvrs.core.model import events as ev
from kvrs.ids import NodeId
from kvrs.transfer.meter import Measurement, lower_bound

# The bound decreases with every second in which nothing is measured; smaller steps than this change
# no decision.
_STEP = 0.02
# The same measurement, reported twice, is never exactly as old as it says: reports travel.
_SAME_S = 0.5


@dataclass(slots=True)
class _Link:
    measured_s: float
    reported_bytes_per_s: float = 0.0


class LinkBounds:
    """Instances report what they measured, agents publish it by gossip: the newest counts."""

    def __init__(self) -> None:
        self._links: dict[tuple[NodeId, NodeId], _Link] = {}

    def measured(
        self, source: NodeId, target: NodeId, measured: Measurement, now_s: float
    ) -> ev.LinkMeasured | None:
        """Return the event for the policy; None: the bound has not changed enough."""
        measured_s = now_s - measured.age_s
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = _Link(measured_s)
        elif measured_s < link.measured_s - _SAME_S:
            return None
        link.measured_s = max(link.measured_s, measured_s)
        bound = lower_bound(measured)
        if abs(bound - link.reported_bytes_per_s) <= _STEP * link.reported_bytes_per_s:
            return None
        link.reported_bytes_per_s = bound
        return ev.LinkMeasured(source, target, bound)
