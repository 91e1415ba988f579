"""Resize: a rank leaves on purpose or joins, or copies of experts move, while the others serve."""

from collections.abc import Sequence

from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.ways.base import PossibleWay, Situation, Way


def to(
    now: Situation, groups: Sequence[Sequence[int]], fresh: frozenset[int]
) -> PossibleWay | None:
    """Return the way to the given ranks of each stage, `fresh` being new; None: they cannot
    serve.
    """
    after = now.reshaped(groups)
    return now.weighed(Way.RESIZE, after, fresh, 0.0) if isinstance(after, Layout) else None


def shifted(now: Situation, after: Layout) -> PossibleWay | None:
    """Return the way to other copies of experts on the same ranks; None: no room for them."""
    if now.room.missing_bytes(after, now.units):
        return None
    return now.weighed(Way.RESIZE, after, frozenset(), 0.0)


def stay(now: Situation) -> PossibleWay:
    """Return the way back to the current layout, in a new formation."""
    return now.weighed(Way.RESIZE, now.layout, frozenset(), 0.0)
