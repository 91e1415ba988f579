"""Restart: the lost processes are started again, and attach to their memory, which survived."""

from collections.abc import Iterator

from kvrs_engine.elastic.ways.base import PossibleWay, Situation, Way


def possible(now: Situation) -> Iterator[PossibleWay]:
    ranks = frozenset(now.layout.ranks)
    if not now.dead & ranks:
        fresh = ranks & now.absent
        start_s = now.start_s(now.layout, fresh)
        yield now.weighed(Way.RESTART, now.layout, fresh, start_s, reads_gone=True)
