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
    UNDECIDED = "undecided"
    CONTRADICTED = "contradicted"
    UNATTAINABLE = "unattainable"
    NO_POWER = "without power"
    KEPT_BAR = "bar kept"
    MISSED_BAR = "bar missed"
    CONSTRUCTION = "by construction"
    EXAMPLE = "worked example"
    MISSING = "missing"


MEANING = {
    Verdict.REPRODUCED: "the published ratio lies in our interval, if that shows an effect, or is "
    f"within {NEAR * 100:.0f} % of ours, as a ratio and as a change; or ours keeps a published "
    "limit",
    Verdict.DIRECTION: "ours goes the same way, by another amount",
    Verdict.UNDECIDED: "our interval includes no effect, or a published limit",
    Verdict.CONTRADICTED: "ours goes the other way, is beyond a published limit, or is another "
    "share",
    Verdict.UNATTAINABLE: "the published figure contradicts the paper's own equation",
    Verdict.NO_POWER: "worked, but what the setting acts on had no effect in these runs",
    Verdict.KEPT_BAR: "no figure was published; ours keeps a bar of our own",
    Verdict.MISSED_BAR: "no figure was published; ours misses a bar of our own",
    Verdict.CONSTRUCTION: "the figure was put in: ours could not have come out otherwise",
    Verdict.EXAMPLE: "an example or a formula of the paper, computed by the product's code; "
    "nothing is measured",
    Verdict.MISSING: "nothing of ours yet",
}

# Of comparisons, the weakest first; each of the first three decides over a row alone.
_STRENGTH = (
    Verdict.CONTRADICTED,
    Verdict.UNATTAINABLE,
    Verdict.MISSED_BAR,
    Verdict.UNDECIDED,
    Verdict.DIRECTION,
    Verdict.REPRODUCED,
    Verdict.KEPT_BAR,
)
_DECIDES = 3


class Claim(StrEnum):
    """The claim of a published figure: equality, or a limit."""

    EQUAL = "="
    AT_MOST = "<="
    AT_LEAST = ">="


class Headline(StrEnum):
    """The verdict on the first claim of a paper."""

    HOLDS = "holds"
    DIRECTION = "holds in direction"
    NOT_SHOWN = "not shown"
    CANNOT = "cannot be shown here"


_HEADLINES = {
    Verdict.REPRODUCED: Headline.HOLDS,
    Verdict.DIRECTION: Headline.DIRECTION,
    Verdict.UNATTAINABLE: Headline.CANNOT,
    Verdict.MISSING: Headline.CANNOT,
}


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of ours beside a published one, both as ratios.

    Attributes:
        published: None where the paper claims no figure, and `bar` is one of our own.
        half_width: of the interval of ours, where there are several runs.
        nothing: the ratio that means no effect; None for a measure that has none, such as a share.
        claim: of the published figure, or of the bar.
        least: the least value that the paper's own equation allows.
        form: of the figures for readers: `change`, `share`, `times`, or the unit.
    """

    what: str
    published: float | None
    ours: float
    half_width: float | None = None
    nothing: float | None = 1.0
    claim: Claim = Claim.EQUAL
    least: float | None = None
    bar: float | None = None
    form: str = "change"

    def verdict(self) -> Verdict:
        half = self.half_width or 0.0
        low, high = self.ours - half, self.ours + half
        if self.published is None:
            assert self.bar is not None, f"{self.what}: neither published nor a bar"
            keeps = high <= self.bar if self.claim is Claim.AT_MOST else low >= self.bar
            return Verdict.KEPT_BAR if keeps else Verdict.MISSED_BAR
        if self.least is not None and self.published < self.least:
            return Verdict.UNATTAINABLE
        if self.claim is not Claim.EQUAL:
            return self._of_limit(self.published, low, high)
        if self.published == self.nothing:  # A claim that there is no effect.
            return Verdict.REPRODUCED if low <= self.published <= high else Verdict.CONTRADICTED
        if self.nothing is not None and low <= self.nothing <= high:
            return Verdict.UNDECIDED
        if low <= self.published <= high or self._is_near(self.published):
            return Verdict.REPRODUCED
        if self.nothing is None:
            return Verdict.CONTRADICTED
        same_way = (self.ours - self.nothing) * (self.published - self.nothing) > 0
        return Verdict.DIRECTION if same_way else Verdict.CONTRADICTED

    def _of_limit(self, limit: float, low: float, high: float) -> Verdict:
        """The verdict on `at most` or `at least`: the whole interval has to keep it."""
        if self.claim is Claim.AT_LEAST:
            low, high, limit = -high, -low, -limit
        if high <= limit:
            return Verdict.REPRODUCED
        return Verdict.CONTRADICTED if low > limit else Verdict.UNDECIDED

    def _is_near(self, published: float) -> bool:
        """True if ratio and change are near: 1.02 is near to 1.10, but no effect of that size."""
        shares = [self.ours / published] if published else []
        if self.nothing is not None:
            shares.append((self.ours - self.nothing) / (published - self.nothing))
        return all(abs(share - 1) <= NEAR for share in shares)

    def shown(self) -> tuple[str, str]:
        """The published figure, or the bar, and ours, for readers."""
        limit = self.published if self.published is not None else self.bar
        assert limit is not None
        sign = {Claim.EQUAL: "", Claim.AT_MOST: "≤ ", Claim.AT_LEAST: "≥ "}[self.claim]
        ours = _as(self.form, self.ours)
        if self.half_width is not None:
            ours += f" ± {_as(self.form, self.half_width, is_width=True)}"
        bar = "bar " if self.published is None else ""
        return f"{bar}{sign}{_as(self.form, limit)}", ours


def _as(form: str, value: float, *, is_width: bool = False) -> str:
    match form:
        case "change":
            return f"{value:.1%}" if is_width else f"{value - 1:+.1%}"
        case "share":
            return f"{value:.1%}"
        case "times":
            return f"{value:.2g}" if is_width else f"{_rounded(value)}x"
        case unit:
            return f"{value:.2g}" if is_width else f"{_rounded(value)} {unit}"


def _rounded(value: float) -> str:
    return f"{value:{'.3g' if 0.01 <= abs(value) < 1000 else ',.2f' if value < 1 else ',.0f'}}"


def change(what: str, published: float, ours: Interval) -> Compared:
    """A published change, such as -0.444, beside the mean of ours with its interval."""
    return Compared(what, 1 + published, 1 + ours.mean, ours.half_width)


def of_all(compared: Sequence[Compared], power: Compared | None = None) -> Verdict:
    """The middle verdict of several comparisons, the weaker one of two. One that contradicts the
    publication, or has a figure that is unattainable, decides; `power` is an effect without which
    the comparisons have nothing to show.
    """
    if power is not None and power.verdict() in (Verdict.UNDECIDED, Verdict.CONTRADICTED):
        return Verdict.NO_POWER
    found = sorted((each.verdict() for each in compared), key=_STRENGTH.index)
    if found[0] in _STRENGTH[:_DECIDES]:
        return found[0]
    return found[(len(found) - 1) // 2]


def headline(verdict: Verdict) -> Headline:
    return _HEADLINES.get(verdict, Headline.NOT_SHOWN)


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
