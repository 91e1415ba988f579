"""Replace: the lost ranks are started again with empty memory."""

from collections.abc import Iterator
from math import inf

from kvrs_engine.elastic.ways.base import PossibleWay, Situation, Way


def possible(now: Situation) -> Iterator[PossibleWay]:
    ranks = frozenset(now.layout.ranks)
    if now.dead & ranks and now.costs.replace_s < inf:
        fresh, start_s = ranks & now.absent, now.costs.replace_s
        yield now.weighed(Way.REPLACE, now.layout, fresh, start_s, restores=True)
