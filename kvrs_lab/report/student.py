"""Means of repeated runs with their 95 % confidence intervals under Student's t-distribution."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

# The 0.975 quantile of t for 1 to 30 degrees of freedom (any table of it).
_T975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
_Z975 = 1.959964


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of `n` runs, plus or minus `half_width`, which a single run does not have."""

    mean: float
    half_width: float | None
    n: int


def t975(degrees: float) -> float:
    """The 0.975 quantile for any number of degrees of freedom from 1 up; between the table's,
    linear in 1 / degrees.
    """
    assert degrees >= 1
    if degrees > len(_T975):
        # Cornish-Fisher expansion around the normal quantile: right to the fourth digit from here
        # on.
        z = _Z975
        return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    below = math.floor(degrees)
    if below == degrees:
        return _T975[below - 1]
    share = (1 / below - 1 / degrees) / (1 / below - 1 / (below + 1))
    return _T975[below - 1] + share * (t975(below + 1) - _T975[below - 1])


def interval(values: Sequence[float]) -> Interval | None:
    """Mean and interval of the values of repeated runs; None for no values."""
    if not values:
        return None
    n = len(values)
    half_width = t975(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else None
    return Interval(fmean(values), half_width, n)


def ratio(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """Mean of `above` divided by mean of `below`; None where there is no such number.

    The interval comes from the two relative standard errors (delta method), its degrees of freedom
    after Welch-Satterthwaite.
    """
    if not above or not below or fmean(below) == 0:
        return None
    mean = fmean(above) / fmean(below)
    n = min(len(above), len(below))
    if n < 2 or mean == 0:
        return Interval(mean, None, n)
    parts = [(stdev(values) / fmean(values)) ** 2 / len(values) for values in (above, below)]
    if sum(parts) == 0:
        return Interval(mean, 0.0, n)
    spread = sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (above, below), strict=True)
    )
    return Interval(mean, t975(sum(parts) ** 2 / spread) * abs(mean) * math.sqrt(sum(parts)), n)
