"""Sum of floats, equal to the last bit in every version of Python."""

from collections.abc import Iterable


def sum_in_order(values: Iterable[float]) -> float:
    """Return the sum of the values, added one after the other. From Python 3.12 on `sum`
    compensates rounding errors, so decisions made by it would depend on the version.
    """
    total: float = 0
    for value in values:
        total += value
    return total
