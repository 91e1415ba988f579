"""The instance for which a restarted instance makes drafts (LUMEN, section 4.4). Pure."""

from collections.abc import Mapping

from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport


def by_congestion(loads: Mapping[InstanceId, LoadReport], own: InstanceId) -> list[InstanceId]:
    """Those that want drafts, do not end and have no helper but the former process of `own`: the
    one at which a new request waits longest first, of equal ones that with the most streams.
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
