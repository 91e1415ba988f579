"""Peers that probably hold pages of a history, and the order in which they are asked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import inf

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.page_messages import TrafficClass
from kvrs.protocol.parts import Cell
from kvrs_engine.scheduling.sequences import Pull


@dataclass(frozen=True, slots=True)
class PullSource:
    """One peer and the full pages of the history that it probably holds."""

    instance: InstanceId  # Or an agent.
    epoch: int | None  # Pages of another epoch are not asked for; None: of any.
    pages: range  # By index into the history; not empty unless there is a hand-off.
    traffic: TrafficClass
    # The retained stream whose partial last page may be pulled too.
    handoff: StreamId | None = None
    within_s: float = inf  # What has not come by then is computed.


def next_source(
    sources: list[PullSource], pull: Pull, first_page: int
) -> tuple[PullSource, range] | None:
    """The next source that probably has pages from `first_page` on, and which of them to ask it
    for. Removes it and the sources before it; None: none is left.
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
    """Pages in a row that lack the same cells; None: they are to be fetched whole. At the end no
    page, where a partial one behind them has to be asked for alone.
    """
    cells: frozenset[Cell] | None = frozenset()
    for cells, group in groupby(wanted, key=gone.get):
        indexes = list(group)
        yield range(indexes[0], indexes[-1] + 1), cells
    if cells is not None:
        yield range(wanted.stop, wanted.stop), None
