"""Published figures, and means of ours, for the comparisons of each paper."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from experiments.kept import EXPERIMENTS
from kvrs_lab.report.student import Interval, interval

Rows = tuple[Mapping[str, str], ...]


@cache
def published(paper: str) -> Rows:
    """The published figures of a paper, each with the figure or table that it comes from."""
    with (EXPERIMENTS / "published" / f"{paper}.csv").open() as file:
        return tuple(csv.DictReader(file))


def value(paper: str, **wanted: str) -> float:
    """The one published figure that has these columns."""
    found = [
        float(row["value"])
        for row in published(paper)
        if all(row[column] == each for column, each in wanted.items())
    ]
    assert len(found) == 1, f"{paper}: {len(found)} published figures of {wanted}"
    return found[0]


def mean_of(values: Iterable[float]) -> Interval:
    """Mean and interval of the figures of repeated runs.

    Raises:
        ValueError: there are none.
    """
    found = interval(list(values))
    if found is None:
        raise ValueError("got no values; allowed: those of one run or more")
    return found


def half_widths(found: Sequence[Interval]) -> list[float] | None:
    """The error bars of points; None: all are of single runs."""
    if all(each.half_width is None for each in found):
        return None
    return [each.half_width or 0.0 for each in found]
