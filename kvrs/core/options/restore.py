"""Restore: the target fetches the history's KV from a checkpoint in the host memory of an agent
(LUMEN section 4.2, RaidServe's KV backup), or from rows of an engine's CPU tier that an agent
serves.

The estimate is that of migrate. An agent on the target's own node sends at the measured rate of
that path, and at `host_to_device_bytes_per_s` until the rate is measured.
"""

from operator import attrgetter

from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.options.base import Case, RecoveryOption
from kvrs.core.options.migrate import fetch_plan, fetch_terms, weigh_fetch

_RESTORE = Option.RESTORE


def estimate(case: Case, estimates: list[Estimate]) -> None:
    for source in case.sources:
        if source.is_agent:
            weigh_fetch(case, _RESTORE, source, estimates)


RESTORE = RecoveryOption(
    Option.RESTORE, estimate, fetch_plan, fetch_terms, needs=attrgetter("stream.checkpoints")
)
