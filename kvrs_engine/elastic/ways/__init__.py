"""The ways to re-form an instance, one file each. A new way is named in `Way`, and listed here if
it is possible after a loss.
"""

from kvrs_engine.elastic.ways import replace, reshard, restart
from kvrs_engine.elastic.ways.base import PossibleWay, Situation

AFTER_LOSS = (restart.possible, replace.possible, reshard.possible)


def choices(now: Situation) -> list[PossibleWay]:
    """Return the possible ways after a loss, the cheapest first."""
    found = [choice for possible in AFTER_LOSS for choice in possible(now)]
    return sorted(found, key=lambda choice: choice.cost_s)
