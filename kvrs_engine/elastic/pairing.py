"""The choice of the instance for which a restarted instance drafts tokens (LUMEN section 4.4)."""

from collections.abc import Mapping

from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport


def by_congestion(loads: Mapping[InstanceId, LoadReport], own: InstanceId) -> list[InstanceId]:
    """Return the instances that want drafts, do not drain, and have no other helper than `own` or
    its previous process, sorted by longest queueing delay, then most streams.
    """
    wanting = [
        (load.queue_delay_s, load.running, name)
        for name, load in loads.items()
        if load.speculation is not None
        and load.speculation.wants_helper
        and load.speculation.helper in (None, own)
        and not load.draining
    ]
    return [name for _, _, name in sorted(wanting, reverse=True)]
