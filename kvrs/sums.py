"""Sums of floats that are the same, to the last bit, in each version of Python."""

from collections.abc import Iterable


def sum_in_order(values: Iterable[float]) -> float:
    """Each value is added to those before it. From Python 3.12 on, `sum` makes up for the errors of
    rounding, so that what is decided by it would depend on the version.
    """
    total: float = 0
    for value in values:
        total += value
    return total
