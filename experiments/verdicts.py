"""Verdicts: what a figure of ours says about the published one.

Pure. A row of docs/evidence.md has one verdict. It is computed where the figures of ours stand
beside published ones as ratios, and judged, with a reason, where they do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from kvrs_lab.report.student import Interval

NEAR = 0.2


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    DIRECTION = "direction"
    NO_DIFFERENCE = "no difference shown"
    OTHER = "other thing"
    KEPT_BAR = "bar kept"
    MISSED_BAR = "missed bar"
    CONSTRUCTION = "by construction"
    EXAMPLE = "worked example"
    MISSING = "missing"


MEANING = {
    Verdict.REPRODUCED: "the published ratio lies in our interval, if that shows an effect, or is "
    f"within {NEAR * 100:.0f} % of ours, as a ratio and as a change",
    Verdict.DIRECTION: "ours goes the same way, by another amount",
    Verdict.NO_DIFFERENCE: "our interval includes no effect",
    Verdict.OTHER: "ours contradicts what was published, or is a measure of something else",
    Verdict.KEPT_BAR: "no figure was published; ours keeps a bar of our own",
    Verdict.MISSED_BAR: "ours misses the bar of its experiment, or the published one",
    Verdict.CONSTRUCTION: "the figure was put in: ours could not have come out otherwise",
    Verdict.EXAMPLE: "an example or a formula of the paper, computed by the product's code; "
    "nothing is measured",
    Verdict.MISSING: "nothing of ours yet",
}

# Of those that are computed, the weakest first.
_STRENGTH = (
    Verdict.OTHER,
    Verdict.NO_DIFFERENCE,
    Verdict.DIRECTION,
    Verdict.REPRODUCED,
)


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of ours beside a published one, both as ratios.

    Attributes:
        half_width: of the interval of ours, where there are several runs.
        nothing: the ratio that means no effect; None for a measure that has none, such as a share.
    """

    what: str
    published: float
    ours: float
    half_width: float | None = None
    nothing: float | None = 1.0

    def verdict(self) -> Verdict:
        half = self.half_width or 0.0
        low, high = self.ours - half, self.ours + half
        if self.published == self.nothing:  # A claim that there is no effect.
            return Verdict.REPRODUCED if low <= self.published <= high else Verdict.OTHER
        if self.nothing is not None and low <= self.nothing <= high:
            return Verdict.NO_DIFFERENCE
        if low <= self.published <= high or self._is_near():
            return Verdict.REPRODUCED
        if self.nothing is None:
            return Verdict.OTHER
        same_way = (self.ours - self.nothing) * (self.published - self.nothing) > 0
        return Verdict.DIRECTION if same_way else Verdict.OTHER

    def _is_near(self) -> bool:
        """True if ratio and change are near: 1.02 is near to 1.10, but no effect of that size."""
        shares = [self.ours / self.published]
        if self.nothing is not None:
            shares.append((self.ours - self.nothing) / (self.published - self.nothing))
        return all(abs(share - 1) <= NEAR for share in shares)


def change(what: str, published: float, ours: Interval) -> Compared:
    """A published change, such as -0.444, beside the mean of ours with its interval."""
    return Compared(what, 1 + published, 1 + ours.mean, ours.half_width)


def of_all(compared: Sequence[Compared]) -> Verdict:
    """The middle verdict of several comparisons, the weaker one of two; one that contradicts the
    publication decides.
    """
    found = sorted((each.verdict() for each in compared), key=_STRENGTH.index)
    return found[0] if found[0] is Verdict.OTHER else found[(len(found) - 1) // 2]


def each_of(compared: Sequence[Compared]) -> str:
    """Which comparisons have which verdict, the strongest first; their names alone where all have
    the same.
    """
    ordered = sorted(compared, key=lambda each: -_STRENGTH.index(each.verdict()))
    by_verdict = {
        verdict: ", ".join(each.what for each in those)
        for verdict, those in groupby(ordered, key=Compared.verdict)
    }
    if len(by_verdict) == 1:
        return next(iter(by_verdict.values()))
    return "; ".join(f"{verdict}: {those}" for verdict, those in by_verdict.items())
