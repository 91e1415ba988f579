"""Prefill time in two dimensions: `new` tokens behind `cached` tokens.

The grid is uniform in both axes, so a look-up is two divisions and a bilinear blend of four
numbers, whatever the lengths. Beyond the grid a fitted quadratic continues from the nearest point
of its edge, without a jump.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvrs.sums import sum_in_order

Coefficients = tuple[float, float, float, float]
Row = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PrefixGrid:
    """`rows[i][j]` is the time in seconds of `j * new_step_tokens` new tokens behind `i *
    cached_step_tokens` cached ones.

    Measured dips in either direction are noise and are levelled, as in a `PrefillTable`.
    """

    new_step_tokens: int
    cached_step_tokens: int
    rows: Sequence[Sequence[float]]
    _last_new: int = field(init=False, repr=False, compare=False)
    _last_cached: int = field(init=False, repr=False, compare=False)
    _width: int = field(init=False, repr=False, compare=False)
    _values: Row = field(init=False, repr=False, compare=False)
    _fit: Coefficients = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.new_step_tokens >= 1, self.new_step_tokens
        assert self.cached_step_tokens >= 1, self.cached_step_tokens
        assert len(self.rows) >= 2, "one row has no second length of cached tokens"
        assert len(self.rows[0]) >= 2, "a row needs at least a step's overhead and one length"
        assert all(len(row) == len(self.rows[0]) for row in self.rows), "all rows are equally long"
        levelled = _level(self.rows)
        # Repeat the last column and row, so that the edge needs no special case.
        padded = [(*row, row[-1]) for row in (*levelled, levelled[-1])]
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))
        object.__setattr__(self, "_last_new", self.new_step_tokens * (len(levelled[0]) - 1))
        object.__setattr__(self, "_last_cached", self.cached_step_tokens * (len(levelled) - 1))
        object.__setattr__(self, "_width", len(padded[0]))
        object.__setattr__(self, "_values", tuple(value for row in padded for value in row))
        object.__setattr__(self, "_fit", _fit(levelled, self._last_new, self._last_cached))

    def covers(self, cached: int, new: int) -> bool:
        return cached <= self._last_cached and new <= self._last_new

    def seconds_for(self, cached: int, new: int) -> float:
        """Return the seconds of a prefill of `new` tokens behind `cached` tokens."""
        if cached > self._last_cached or new > self._last_new:
            return self._beyond(cached, new)
        step, cached_step, width, values = (
            self.new_step_tokens,
            self.cached_step_tokens,
            self._width,
            self._values,
        )
        row, column = cached // cached_step, new // step
        at = row * width + column
        along = new / step - column
        low, high = values[at], values[at + width]
        low += along * (values[at + 1] - low)
        high += along * (values[at + width + 1] - high)
        return low + (cached / cached_step - row) * (high - low)

    def _beyond(self, cached: int, new: int) -> float:
        edge_cached = cached if cached < self._last_cached else self._last_cached
        edge_new = new if new < self._last_new else self._last_new
        b, c, d, e = self._fit
        edge = edge_new * (b + c * edge_new + d * edge_cached) + e * edge_cached
        there = new * (b + c * new + d * cached) + e * cached
        return self.seconds_for(edge_cached, edge_new) + there - edge


def _level(rows: Sequence[Sequence[float]]) -> list[Row]:
    """Raise lower values, so that times never fall along a row or a column."""
    levelled: list[Row] = []
    for row in rows:
        along = accumulate(row, max)
        levelled.append(tuple(map(max, along, levelled[-1])) if levelled else tuple(along))
    return levelled


def _fit(rows: Sequence[Row], last_new: int, last_cached: int) -> Coefficients:
    """Return (b, c, d, e) of `T = a + b * new + c * new^2 + d * new * cached + e * cached`, fitted
    to the grid by least squares.

    All are non-negative: attention makes prefill grow with both lengths, and nothing else is known
    beyond the data. A term that the data make negative is left out.
    """
    height, width = len(rows) - 1, len(rows[0]) - 1
    points = [
        (j / width, i / height, value) for i, row in enumerate(rows) for j, value in enumerate(row)
    ]
    # Lengths are divided by those of the edge, which keeps the normal equations well scaled.
    terms = [[1.0, n, n * n, n * p, p] for n, p, _ in points]
    kept = [0, 1, 2, 3, 4]
    while True:
        found = _least_squares(
            [[row[k] for k in kept] for row in terms], [value for *_, value in points]
        )
        worst = min(range(1, len(kept)), key=lambda k: found[k], default=0)
        if worst == 0 or found[worst] >= 0:
            break
        del kept[worst]
    b, c, d, e = (dict(zip(kept, found, strict=True)).get(k, 0.0) for k in (1, 2, 3, 4))
    if b + c <= 0:  # A flat grid is wrong: assume time proportional to length.
        b = max(row[-1] for row in rows)
    return b / last_new, c / last_new**2, d / (last_new * last_cached), e / last_cached


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Solve a least-squares problem by its normal equations; a coefficient that the data do not
    determine is 0.
    """
    size = len(rows[0])
    matrix = [
        [sum_in_order(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)
    ]
    right = [
        sum_in_order(row[i] * value for row, value in zip(rows, values, strict=True))
        for i in range(size)
    ]
    floor = 1e-12 * max(matrix[i][i] for i in range(size))
    solved = [True] * size
    for i in range(size):
        if matrix[i][i] <= floor:
            solved[i] = False
            continue
        for j in range(size):
            if j != i and solved[i]:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
                right[j] -= factor * right[i]
    return [right[i] / matrix[i][i] if solved[i] else 0.0 for i in range(size)]
