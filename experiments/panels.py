"""A picture of the evidence as data: panels of published points beside ours.

The digest of the data stands in the SVG that is drawn of it (experiments/pictures.py), so that a
test finds a picture that no longer shows the kept results without drawing it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The shape of a series."""

    LINE = "line"
    BARS = "bars"
    BAND = "band"  # Two values, between which a published range lies, at all places.
    DASHED = "dashed"  # A line without marks: a formula, a reference.


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour; `published` ones are grey.

    Attributes:
        x: numbers, or the panel's categories.
        half: of the interval of each point, where there are several runs.
    """

    name: str
    x: Sequence[float | str]
    y: Sequence[float]
    half: Sequence[float] | None = None
    published: bool = False
    kind: Kind = Kind.LINE


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        stacked: bars stand on each other, and lie on their side.
        falling: the largest x is the first.
        limits: of the y axis, where single wide intervals would hide the rest.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    stacked: bool = False
    falling: bool = False
    limits: tuple[float, float] | None = None


def digest(panels: Sequence[Panel]) -> str:
    """The hash of all that is drawn, with figures rounded to what can be seen."""
    data = json.loads(json.dumps([asdict(each) for each in panels]), parse_float=_rounded)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _rounded(figure: str) -> float:
    return float(f"{float(figure):.4g}")
