"""Time of a prefill or a decode step, looked up in measured tables.

A prefill table lies on a uniform grid, so a look-up is one division, whatever the length. Beyond
the grid a fitted quadratic continues without a jump (attention makes prefill quadratic in the long
run) and never falls. `covers` separates measured from extrapolated times.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import gcd
from typing import Self

import msgspec

from kvrs.profiles.prefix_grid import PrefixGrid
from kvrs.protocol.instance import MeasuredPrefill
from kvrs.sums import sum_in_order

_POINTS_OF_CHUNK = 16
_MAX_POINTS = 1024  # Most points of a chunked table, because instances send it to proxies.


@dataclass(frozen=True, slots=True)
class PrefillTable:
    """Prefill time of one model: `seconds[i]` is the time of `i * step_tokens` tokens, alone in
    their batch, `seconds[0]` the overhead of a step.

    Measured dips (more tokens in less time) are noise and are levelled: one more token never costs
    negative time.
    """

    label: str
    source: str
    step_tokens: int
    seconds: Sequence[float]
    covered_from_tokens: int = 0  # Times of fewer tokens are extrapolated, not measured.
    # Times of more tokens are extrapolated; None: the whole grid is measured.
    covered_to_tokens: int | None = None
    grid: PrefixGrid | None = (
        None  # The two-dimensional table, if measured; its first row is this table.
    )
    # True: derived from the sizes of the model and the GPU, without any measurement.
    is_guess: bool = False
    is_estimated: bool = False  # True: computed for this model and GPU from measurements of others.
    _last_tokens: int = field(init=False, repr=False, compare=False)
    _covered_to_tokens: int = field(init=False, repr=False, compare=False)
    _levelled: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)
    step_overhead_s: float = field(init=False, repr=False, compare=False)
    _linear: float = field(init=False, repr=False, compare=False)
    _quadratic: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.step_tokens >= 1, self.step_tokens
        assert len(self.seconds) >= 2, "a table needs at least its overhead and one length"
        assert min(self.seconds) >= 0, self.seconds
        levelled = tuple(accumulate(self.seconds, max))
        slopes = tuple((after - before) / self.step_tokens for before, after in pairwise(levelled))
        linear, quadratic = _fit_from_edge(levelled, self.step_tokens)
        object.__setattr__(self, "seconds", tuple(self.seconds))
        object.__setattr__(self, "_levelled", levelled)
        object.__setattr__(self, "step_overhead_s", levelled[0])
        last, given = self.step_tokens * (len(levelled) - 1), self.covered_to_tokens
        object.__setattr__(self, "_last_tokens", last)
        object.__setattr__(self, "_covered_to_tokens", last if given is None else given)
        object.__setattr__(
            self, "_slopes", (*slopes, 0.0)
        )  # Slope 0 behind the grid's last point, where no interval begins.
        object.__setattr__(self, "_linear", linear)
        object.__setattr__(self, "_quadratic", quadratic)

    @classmethod
    def from_points(cls, label: str, source: str, points: Mapping[int, float]) -> Self:
        """Build a table from (tokens: seconds) points at any distances, with straight lines between
        them.

        The line through the first two points extends down to zero tokens; this part is not covered.
        """
        assert len(points) >= 2, points
        known = sorted(points.items())
        step = gcd(*(tokens for tokens, _ in known))
        (first, first_s), (second, second_s) = known[0], known[1]
        if first > 0:
            known.insert(
                0, (0, max(0.0, first_s - first * (second_s - first_s) / (second - first)))
            )
        seconds = [known[0][1]]
        for (start, start_s), (end, end_s) in pairwise(known):
            slope = (end_s - start_s) / (end - start)
            seconds += [
                start_s + slope * (tokens - start) for tokens in range(start + step, end, step)
            ]
            seconds.append(end_s)
        return cls(label, source, step, seconds, covered_from_tokens=first)

    @classmethod
    def from_quadratic(
        cls,
        label: str,
        source: str,
        coefficients_ms: tuple[float, float, float],
        *,
        max_tokens: int,
        step_tokens: int = 64,
    ) -> Self:
        """Build a table from DistServe's fit `a + b * n + c * n * n` in milliseconds, valid up to
        `max_tokens`.
        """
        a, b, c = coefficients_ms
        grid = range(0, max_tokens + step_tokens, step_tokens)
        return cls(label, source, step_tokens, [(a + b * n + c * n * n) / 1e3 for n in grid])

    @classmethod
    def from_grid(
        cls, label: str, source: str, grid: PrefixGrid, *, covered_from_tokens: int = 0
    ) -> Self:
        """Build a table that also has the time of new tokens behind cached tokens."""
        return cls(
            label,
            source,
            grid.new_step_tokens,
            grid.rows[0],
            covered_from_tokens=covered_from_tokens,
            grid=grid,
        )

    @classmethod
    def from_measured(cls, measured: MeasuredPrefill) -> Self:
        """Build a table from an instance's own measurement, or from an estimate in its form."""
        source = "measured by the instance at its start"
        if measured.is_guess:
            source = "guessed from the size of the model"
        return cls(
            measured.label,
            source,
            measured.step_tokens,
            measured.seconds,
            covered_to_tokens=measured.covered_tokens,
            is_guess=measured.is_guess,
        )

    def scaled(self, factor: float) -> "PrefillTable":
        """Return the table with all times multiplied by `factor`."""
        return self._mapped(lambda seconds: seconds * factor)

    def plus(self, step_s: float) -> "PrefillTable":
        """Return the table with `step_s` added to the time of each step."""
        return self._mapped(lambda seconds: seconds + step_s) if step_s else self

    def _mapped(self, change: Callable[[float], float]) -> "PrefillTable":
        grid = self.grid
        if grid is not None:
            rows = [[change(each) for each in row] for row in grid.rows]
            grid = PrefixGrid(grid.new_step_tokens, grid.cached_step_tokens, rows)
        return PrefillTable(
            self.label,
            self.source,
            self.step_tokens,
            [change(each) for each in self.seconds],
            self.covered_from_tokens,
            self.covered_to_tokens,
            grid,
            self.is_guess,
            self.is_estimated,
        )

    def chunked(self, chunk_tokens: int, max_tokens: int) -> "PrefillTable":
        """Return the table, up to `max_tokens`, of an engine that computes a prompt in chunks: each
        chunk is a step of its own, with the overhead of a step, behind the chunks before it.
        """
        if max_tokens <= chunk_tokens:
            return self
        one, step = self.shared(chunk_tokens, max_tokens), self._step_in(chunk_tokens, max_tokens)
        seconds = [self.step_overhead_s]
        for tokens in range(step, max_tokens + step, step):
            more = -(-tokens // chunk_tokens) - 1
            seconds.append(one.seconds_for(tokens) + more * self.step_overhead_s)
        return self._by_length(step, seconds)

    def shared(self, chunk_tokens: int, max_tokens: int) -> "PrefillTable":
        """Return the chunked table with the overhead of only one step, for the prompts of a queue,
        which share steps.
        """
        if self.grid is None or max_tokens <= chunk_tokens:
            # Unchanged for prompts of one chunk, and without a grid, where the chunks' times add up
            # to the whole.
            return self
        step = self._step_in(chunk_tokens, max_tokens)
        seconds, first, before_s = [self.step_overhead_s], 0, 0.0
        for tokens in range(step, max_tokens + step, step):
            while tokens - first > chunk_tokens:
                before_s += self.extra(first, chunk_tokens) - self.step_overhead_s
                first += chunk_tokens
            seconds.append(before_s + self.extra(first, tokens - first))
        return self._by_length(step, seconds)

    def _step_in(self, chunk_tokens: int, max_tokens: int) -> int:
        finest = min(chunk_tokens // _POINTS_OF_CHUNK, self.step_tokens)
        return max(1, finest, max_tokens // _MAX_POINTS)

    def _by_length(self, step_tokens: int, seconds: Sequence[float]) -> "PrefillTable":
        return PrefillTable(
            self.label,
            self.source,
            step_tokens,
            seconds,
            self.covered_from_tokens,
            self._covered_to_tokens,
            is_guess=self.is_guess,
            is_estimated=self.is_estimated,
        )

    def covers(self, tokens: int) -> bool:
        return self.covered_from_tokens <= tokens <= self._covered_to_tokens

    def seconds_for(self, tokens: int) -> float:
        """Return the prefill time of `tokens` tokens of which none is cached."""
        last = self._last_tokens
        if tokens > last:
            if self.grid is not None:
                return self.grid.seconds_for(0, tokens)
            beyond = tokens - last
            return self._levelled[-1] + beyond * (self._linear + self._quadratic * (tokens + last))
        step = self.step_tokens
        index = tokens // step
        return self._levelled[index] + (tokens - index * step) * self._slopes[index]

    def page_s(self, page_size_tokens: int) -> float:
        """Return the time of one page among many that are computed together: a share of the tokens'
        time, without the overhead of a step.
        """
        return (self.seconds_for(100 * page_size_tokens) - self.step_overhead_s) / 100

    def extra(self, prefix: int, new: int) -> float:
        """Return the prefill time of `new` tokens behind a computed `prefix`.

        The two-dimensional grid gives it, if there is one; else `T(prefix + new) - T(prefix)` plus
        one step's overhead.
        """
        if self.grid is not None:
            return self.grid.seconds_for(prefix, new)
        return self.seconds_for(prefix + new) - self.seconds_for(prefix) + self.step_overhead_s

    def behind(self, prefix: int, tokens: int, whole_s: float) -> tuple[float, bool]:
        """Return the prefill time of `tokens - prefix` tokens behind a computed `prefix`, as
        `extra` does, and whether it is measured. `whole_s`: the time of all `tokens`, which the
        caller knows.
        """
        if self.grid is not None:
            new = tokens - prefix
            is_covered = new >= self.covered_from_tokens and self.grid.covers(prefix, new)
            return self.grid.seconds_for(prefix, new), is_covered
        seconds = whole_s - self.seconds_for(prefix) + self.step_overhead_s
        return seconds, self.covered_from_tokens <= tokens <= self._covered_to_tokens


class DecodeTable(msgspec.Struct, frozen=True):
    """DistServe's fit of a decode step: `a + b * (sum of context tokens) + c * batch`, in two
    regimes of the batch size.
    """

    label: str
    source: str
    large_from_batch: int  # Smallest batch for which the second fit applies.
    small_ms: tuple[float, float, float]
    large_ms: tuple[float, float, float]

    def seconds_for(self, batch: int, context_tokens: int) -> float:
        """Return the seconds of a step for `batch` sequences that have `context_tokens` tokens in
        total.
        """
        a, b, c = self.small_ms if batch < self.large_from_batch else self.large_ms
        return (a + b * context_tokens + c * batch) / 1e3


class DecodeGrid(msgspec.Struct, frozen=True):
    """A measured decode step: `rows[i][j]` seconds for `batches[i]` sequences of `contexts[j]`
    tokens each.

    Times are linear between the points; beyond them the last line continues, never downwards.
    """

    label: str
    source: str
    batches: Sequence[int]
    contexts: Sequence[int]
    rows: Sequence[Sequence[float]]

    def seconds_for(self, batch: int, context_tokens: int) -> float:
        """Return the seconds of a step for `batch` sequences that have `context_tokens` tokens in
        total.
        """
        mean = context_tokens / batch
        i, j = _interval(self.batches, batch), _interval(self.contexts, mean)
        low, high = (_line(self.contexts, row, j, mean) for row in self.rows[i : i + 2])
        return _line(self.batches[i : i + 2], (low, high), 0, batch)


def _interval(axis: Sequence[int], at: float) -> int:
    """Return the index of the point of `axis` at which the interval with `at` begins; outside the
    axis, of the nearest interval.
    """
    return min(max(bisect_right(axis, at) - 1, 0), len(axis) - 2)


def _line(axis: Sequence[int], values: Sequence[float], index: int, at: float) -> float:
    first, last = values[index], values[index + 1]
    along = (at - axis[index]) / (axis[index + 1] - axis[index])
    if last < first and not 0 <= along <= 1:
        # Keep the value at the end: a line that falls is noise, and would become negative beyond.
        return first if along < 0 else last
    return max(0.0, first + along * (last - first))


def _fit_from_edge(seconds: Sequence[float], step_tokens: int) -> tuple[float, float]:
    """Return (b, c) of `T(n) = T(e) + b * (n - e) + c * (n * n - e * e)`, a curve for times beyond
    the grid, which begins at the grid's edge e.

    Least squares over the grid, with b and c never negative: a curve that bends down cannot be
    trusted beyond its data.
    """
    edge = step_tokens * (len(seconds) - 1)
    # Lengths are divided by the edge's, which keeps the normal equations well scaled.
    rows = [
        (i * step_tokens / edge - 1.0, (i * step_tokens / edge) ** 2 - 1.0, s - seconds[-1])
        for i, s in enumerate(seconds)
    ]
    xx = sum_in_order(x * x for x, _, _ in rows)
    zz = sum_in_order(z * z for _, z, _ in rows)
    xz = sum_in_order(x * z for x, z, _ in rows)
    xy = sum_in_order(x * y for x, _, y in rows)
    zy = sum_in_order(z * y for _, z, y in rows)
    determinant = xx * zz - xz * xz
    linear, quadratic = xy / xx, 0.0
    if determinant > 1e-9 * xx * zz:
        linear, quadratic = (xy * zz - zy * xz) / determinant, (zy * xx - xy * xz) / determinant
        if quadratic < 0:
            linear, quadratic = xy / xx, 0.0
        elif linear < 0:
            linear, quadratic = 0.0, zy / zz
    # A flat table is wrong: assume time proportional to length.
    if linear <= 0 and quadratic <= 0:
        linear = seconds[-1]
    return linear / edge, quadratic / edge**2
