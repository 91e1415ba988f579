"""A rank leaves on purpose, or joins, while the others serve: nothing is lost."""

from collections.abc import Sequence

from kvrs.elastic.layouts import Layout
from kvrs.elastic.ways.base import PossibleWay, Situation, Way


def to(
    now: Situation, groups: Sequence[Sequence[int]], fresh: frozenset[int]
) -> PossibleWay | None:
    """To these ranks, given for each stage, of which `fresh` are new. None: they cannot serve."""
    after = now.reshaped(groups)
    return now.weighed(Way.RESIZE, after, fresh, 0.0) if isinstance(after, Layout) else None


def stay(now: Situation) -> PossibleWay:
    """Back to the layout that serves, in a new formation."""
    return now.weighed(Way.RESIZE, now.layout, frozenset(), 0.0)
