"""Lower bounds and means of the bandwidth between nodes, from the newest measurement of each
link: the mean rate predicts, the lower bound decides.
"""

from dataclasses import dataclass

from kvrs.core.model import events as ev
from kvrs.ids import NodeId
from kvrs.transfer.meter import Measurement, lower_bound

# The least relative change of a bound or a mean that is reported: a bound decreases with the age of
# its measurement, and smaller changes affect no decision.
_STEP = 0.02
# Two reports of one measurement differ in its age by up to this time, because of message delays.
_SAME_S = 0.5


@dataclass(slots=True)
class _Link:
    measured_s: float
    bound_bytes_per_s: float = 0.0  # The bound that was reported last.
    mean_bytes_per_s: float = 0.0  # The mean that was reported with it.


class LinkBounds:
    """Keeps the newest measurement of each link. Instances report measurements directly, agents
    publish them by gossip.
    """

    def __init__(self) -> None:
        self._links: dict[tuple[NodeId, NodeId], _Link] = {}

    def measured(
        self, source: NodeId, target: NodeId, measured: Measurement, now_s: float
    ) -> ev.LinkMeasured | None:
        """Note a measurement; return the event for the policy, or None if bound and mean have
        hardly changed.
        """
        measured_s = now_s - measured.age_s
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = _Link(measured_s)
        elif measured_s < link.measured_s - _SAME_S:
            return None
        link.measured_s = max(link.measured_s, measured_s)
        bound, mean = lower_bound(measured), measured.bytes_per_s
        if not (_moved(link.bound_bytes_per_s, bound) or _moved(link.mean_bytes_per_s, mean)):
            return None
        link.bound_bytes_per_s, link.mean_bytes_per_s = bound, mean
        return ev.LinkMeasured(source, target, bound, mean)


def _moved(reported: float, now: float) -> bool:
    return abs(now - reported) > _STEP * reported
