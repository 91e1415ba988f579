"""A rank leaves on purpose, or joins, or copies of experts move, while the others serve: nothing is
lost.
"""

from collections.abc import Sequence

from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.ways.base import PossibleWay, Situation, Way


def to(
    now: Situation, groups: Sequence[Sequence[int]], fresh: frozenset[int]
) -> PossibleWay | None:
    """To these ranks, given for each stage, of which `fresh` are new. None: they cannot serve."""
    after = now.reshaped(groups)
    return now.weighed(Way.RESIZE, after, fresh, 0.0) if isinstance(after, Layout) else None


def shifted(now: Situation, after: Layout) -> PossibleWay | None:
    """To other copies of experts on the same ranks. None: these have no room for them."""
    if now.room.missing_bytes(after, now.units):
        return None
    return now.weighed(Way.RESIZE, after, frozenset(), 0.0)


def stay(now: Situation) -> PossibleWay:
    """Back to the layout that serves, in a new formation."""
    return now.weighed(Way.RESIZE, now.layout, frozenset(), 0.0)
