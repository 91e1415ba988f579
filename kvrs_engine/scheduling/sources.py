"""The peers that probably have pages of a history, and the order in which they are asked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import inf

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.pages import Cell, TrafficClass
from kvrs_engine.scheduling.sequences import Pull


@dataclass(frozen=True, slots=True)
class PullSource:
    """One peer and the full pages of the history that it probably has."""

    instance: InstanceId  # An instance or an agent.
    epoch: int | None  # Required epoch of the peer; None: any.
    pages: range  # Page indexes in the history; empty only for a hand-off of the partial page.
    traffic: TrafficClass
    # The retained stream whose partial last page may be pulled too.
    handoff: StreamId | None = None
    within_s: float = inf  # Time limit; pages that have not arrived by then are computed.


def next_source(
    sources: list[PullSource], pull: Pull, first_page: int
) -> tuple[PullSource, range] | None:
    """Take the next source that probably has pages from `first_page` on, and the pages to request.

    Removes the source and the sources before it from the list; None: no source is left.
    """
    while sources:
        source = sources.pop(0)
        wanted = range(max(first_page, source.pages.start), min(pull.end_page, source.pages.stop))
        if wanted:
            return source, wanted
        if source.handoff is not None and first_page == pull.tail_index:
            return source, range(first_page, first_page)
    return None


def alike(
    wanted: range, gone: Mapping[int, frozenset[Cell]]
) -> Iterator[tuple[range, frozenset[Cell] | None]]:
    """Divide the wanted pages into runs with the same missing cells; None: fetch whole pages. An
    empty run at the end stands for a partial page that must be requested alone.
    """
    cells: frozenset[Cell] | None = frozenset()
    for cells, group in groupby(wanted, key=gone.get):
        indexes = list(group)
        yield range(indexes[0], indexes[-1] + 1), cells
    if cells is not None:
        yield range(wanted.stop, wanted.stop), None
