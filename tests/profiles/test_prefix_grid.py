"""Prefill in two dimensions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.profiles.prefix_grid import PrefixGrid
from kvrs.profiles.tables import PrefillTable
from kvrs_testkit.examples import examples

ROWS = [[0.01, 0.02, 0.04], [0.01, 0.03, 0.07]]

grids = st.integers(2, 5).flatmap(
    lambda width: st.builds(
        PrefixGrid,
        st.integers(1, 256),
        st.integers(1, 512),
        st.lists(
            st.lists(st.floats(0, 10, allow_subnormal=False), min_size=width, max_size=width),
            min_size=2,
            max_size=5,
        ),
    )
)


def attention_s(cached: int, new: int) -> float:
    """Seconds of attention, in the form of the fitted quadratic."""
    return 0.01 + 1e-5 * new + 2e-9 * new * new + 4e-9 * new * cached + 1e-7 * cached


def attention_grid() -> PrefixGrid:
    return PrefixGrid(
        64, 256, [[attention_s(i * 256, j * 64) for j in range(17)] for i in range(5)]
    )


def test_a_look_up_blends_the_four_points_around_it() -> None:
    """Bilinear: straight lines along both axes."""
    grid = PrefixGrid(100, 1000, ROWS)

    assert grid.seconds_for(0, 100) == 0.02
    assert grid.seconds_for(1000, 200) == 0.07
    assert grid.seconds_for(500, 200) == pytest.approx((0.04 + 0.07) / 2)
    assert grid.seconds_for(500, 150) == pytest.approx((0.03 + 0.05) / 2)


@given(grids, st.integers(0, 4), st.integers(0, 4))
@examples(80)
def test_the_grid_goes_through_its_points_or_above_a_dip(grid: PrefixGrid, i: int, j: int) -> None:
    """A measured point is answered as measured, or as the largest before it in row and column."""
    i, j = i % len(grid.rows), j % len(grid.rows[0])
    largest = max(value for row in grid.rows[: i + 1] for value in row[: j + 1])

    found = grid.seconds_for(i * grid.cached_step_tokens, j * grid.new_step_tokens)

    assert found == pytest.approx(largest)


@given(
    grids, st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 3000), st.integers(0, 3000)
)
@examples(150)
def test_more_of_either_length_never_takes_less_time(
    grid: PrefixGrid, cached: int, new: int, more: int, longer: int
) -> None:
    """Non-decreasing along both axes: inside, outside, across every edge, and when the measurement
    dips.
    """
    here = grid.seconds_for(cached, new)

    assert grid.seconds_for(cached + more, new) >= here - 1e-9
    assert grid.seconds_for(cached, new + longer) >= here - 1e-9


@pytest.mark.parametrize(("cached", "new"), [(5000, 100), (100, 5000), (4000, 4000), (100_000, 16)])
def test_beyond_the_grid_the_fitted_quadratic_goes_on(cached: int, new: int) -> None:
    """For times that are a quadratic of both lengths, exactly."""
    assert attention_grid().seconds_for(cached, new) == pytest.approx(
        attention_s(cached, new), rel=1e-3
    )


def test_there_is_no_jump_at_an_edge_of_the_grid() -> None:
    """The quadratic starts from the nearest point of the edge."""
    grid = PrefixGrid(100, 1000, ROWS)

    assert grid.seconds_for(1001, 200) == pytest.approx(grid.seconds_for(1000, 200), abs=1e-3)
    assert grid.seconds_for(1000, 201) == pytest.approx(grid.seconds_for(1000, 200), abs=1e-3)


def test_extra_asks_the_grid_where_there_is_one() -> None:
    """`prefill(n given p)` from the two-dimensional table, else `T(p + n) - T(p) + overhead`."""
    table = PrefillTable.from_grid("t", "s", PrefixGrid(100, 1000, ROWS))
    line = PrefillTable("t", "s", 100, ROWS[0])

    assert table.extra(1000, 200) == 0.07
    assert table.extra(1000, 200) != pytest.approx(line.extra(1000, 200))


@pytest.mark.parametrize(
    "grid",
    [attention_grid(), PrefixGrid(100, 1000, [[0.01, 0.02, 0.04, 0.05], [0.01, 0.05, 0.06, 0.2]])],
)
def test_without_a_prefix_both_ways_to_ask_agree(grid: PrefixGrid) -> None:
    """Recomputing asks by length, fetching asks by prefix and length: for one case both must give
    one thing.
    """
    table = PrefillTable.from_grid("t", "s", grid)

    for tokens in (0, 100, 250, 1024, 9000):
        assert table.extra(0, tokens) == pytest.approx(table.seconds_for(tokens))


def test_lengths_outside_the_grid_are_marked() -> None:
    """Extrapolation is marked: in either direction, and below the first measured
    length.
    """
    table = PrefillTable.from_grid("t", "s", PrefixGrid(100, 1000, ROWS), covered_from_tokens=50)

    def is_covered(prefix: int, new: int) -> bool:
        tokens = prefix + new
        seconds, is_covered = table.behind(prefix, tokens, table.seconds_for(tokens))
        assert seconds == table.extra(prefix, new)
        return is_covered

    assert is_covered(1000, 200)
    assert not is_covered(1001, 100)
    assert not is_covered(100, 201)
    assert not is_covered(100, 49)
