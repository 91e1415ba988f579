"""The recovery options. A new option is listed here and named in `Option`."""

from collections.abc import Mapping

from kvrs.core.model.estimates import Estimate, Option
from kvrs.core.options.base import RecoveryOption
from kvrs.core.options.in_place import IN_PLACE, SUBSTITUTE
from kvrs.core.options.migrate import MIGRATE, RESTORE, REUSE
from kvrs.core.options.recompute import RECOMPUTE
from kvrs.core.options.replay import REPLAY
from kvrs.core.options.split import SPLIT

# Options in the order of estimation: split needs the estimates of the fetches before it.
ALL = (REUSE, MIGRATE, RESTORE, SPLIT, RECOMPUTE, REPLAY)
# Options for the streams of an instance that re-forms, at that instance (`core/staying.py`).
STAYING = (IN_PLACE, SUBSTITUTE)
BY_NAME: Mapping[Option, RecoveryOption] = {each.option: each for each in (*ALL, *STAYING)}


def takes_slot(estimate: Estimate) -> bool:
    """Return whether the plan of the estimate fetches pages into the target."""
    has_source = estimate.source is not None or estimate.second is not None
    return BY_NAME[estimate.option].fetches and has_source and not estimate.by_prefill
