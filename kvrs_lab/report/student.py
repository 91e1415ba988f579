"""Means of repeated runs with their 95 % confidence intervals under Student's t-distribution."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

from kvrs.errors import check_extras


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of `n` runs, plus or minus `half_width`; None: a single run."""

    mean: float
    half_width: float | None
    n: int


@cache
def t975(degrees: float) -> float:
    """The 0.975 quantile for any number of degrees of freedom above 0.

    Raises:
        MissingExtraError: scipy is not installed, which single runs do not need.
    """
    check_extras("report")
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))


def interval(values: Sequence[float]) -> Interval | None:
    """Mean and interval of the values of repeated runs; None for no values."""
    if not values:
        return None
    n = len(values)
    half_width = t975(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else None
    return Interval(fmean(values), half_width, n)
