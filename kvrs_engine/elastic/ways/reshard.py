"""Reshard: the survivors go on, and read the lost units from the host."""

from collections.abc import Iterator

from kvrs_engine.elastic.layouts import Layout
from kvrs_engine.elastic.ways.base import PossibleWay, Situation, Way


def possible(now: Situation) -> Iterator[PossibleWay]:
    """Yield the way with the ranks that are starting, and the way without them."""
    gone = [now.absent]
    if now.starting:
        gone.append(now.absent | now.starting)
    for each in gone:
        after = now.without(each)
        if isinstance(after, Layout):
            start_s = now.start_s(after)
            yield now.weighed(Way.RESHARD, after, frozenset(), start_s, restores=True)
