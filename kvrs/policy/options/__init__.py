"""The recovery options, one file each. A new one is listed here and named in `Option`."""

from collections.abc import Mapping

from kvrs.policy.model.actions import Plan
from kvrs.policy.model.estimates import Estimate, Option
from kvrs.policy.model.streams import Stream
from kvrs.policy.options.base import Books, RecoveryOption
from kvrs.policy.options.in_place import IN_PLACE
from kvrs.policy.options.migrate import MIGRATE
from kvrs.policy.options.recompute import RECOMPUTE
from kvrs.policy.options.restore import RESTORE
from kvrs.policy.options.reuse import REUSE
from kvrs.policy.options.split import SPLIT

# In the order in which they are weighed: split stands on the fetches before it.
ALL = (REUSE, MIGRATE, RESTORE, SPLIT, RECOMPUTE)
# Weighed for streams of an instance that re-forms, at that instance alone (`policy/staying.py`).
BY_NAME: Mapping[Option, RecoveryOption] = {each.option: each for each in (*ALL, IN_PLACE)}


def takes_slot(estimate: Estimate) -> bool:
    """The plan of the estimate fetches pages into the target."""
    has_source = estimate.source is not None or estimate.second is not None
    return BY_NAME[estimate.option].fetches and has_source and not estimate.by_prefill


def plan_of(books: Books, stream: Stream, estimate: Estimate) -> Plan:
    """How to carry out an estimate that was just made for the stream."""
    return BY_NAME[estimate.option].plan(books, stream, estimate)
