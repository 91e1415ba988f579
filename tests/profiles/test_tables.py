"""Prefill and decode tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.profiles.prefix_grid import PrefixGrid
from kvrs.profiles.tables import DecodeTable, PrefillTable
from kvrs.protocol.instance import MeasuredPrefill
from kvrs_testkit.examples import examples

SEED_POINTS = {512: 0.03, 1024: 0.06, 2048: 0.12}

tables = st.builds(
    PrefillTable,
    st.just("drawn"),
    st.just("hypothesis"),
    st.integers(1, 512),
    st.lists(st.floats(0, 10, allow_subnormal=False), min_size=2, max_size=12),
)


def test_a_look_up_between_two_grid_points_lies_on_the_line_between_them() -> None:
    """Linear interpolation on a uniform grid."""
    table = PrefillTable("t", "s", 100, [0.01, 0.02, 0.06])

    assert table.seconds_for(0) == 0.01
    assert table.seconds_for(100) == 0.02
    assert table.seconds_for(150) == pytest.approx(0.04)
    assert table.seconds_for(200) == 0.06


def test_points_at_any_distances_become_a_table_through_all_of_them() -> None:
    """The seed lists 512, 1024 and 2048 tokens; 1536 lies on the line between two of them."""
    table = PrefillTable.from_points("t", "s", SEED_POINTS)

    assert [table.seconds_for(n) for n in SEED_POINTS] == pytest.approx(list(SEED_POINTS.values()))
    assert table.seconds_for(1536) == pytest.approx(0.09)


def test_a_page_among_many_takes_no_step_of_its_own() -> None:
    """10 ms for each step, and 1 ms for each token."""
    table = PrefillTable("test", "made up", 1000, [0.01, 1.01, 2.01])

    assert table.page_s(16) == pytest.approx(0.016)


def test_only_lengths_within_the_measurements_are_covered() -> None:
    """Lengths outside the measurements are marked."""
    table = PrefillTable.from_points("t", "s", SEED_POINTS)

    assert [table.covers(n) for n in (0, 511, 512, 2048, 2049)] == [False, False, True, True, False]


def test_beyond_its_grid_a_quadratic_table_follows_the_same_quadratic() -> None:
    """Outside the measured range the fitted quadratic answers: for data that are quadratic,
    exactly.
    """
    table = PrefillTable.from_quadratic("t", "s", (18.0, 0.1, 7e-6), max_tokens=2048)

    assert table.seconds_for(100_000) == pytest.approx(
        (18.0 + 0.1 * 1e5 + 7e-6 * 1e10) / 1e3, rel=1e-6
    )


@given(tables, st.integers(0, 10_000), st.integers(1, 10_000))
@examples(150)
def test_more_tokens_never_take_less_time(table: PrefillTable, tokens: int, more: int) -> None:
    """Non-decreasing everywhere: inside, outside, across the edge, and when the measurement
    dips.
    """
    assert table.seconds_for(tokens + more) >= table.seconds_for(tokens) - 1e-9


@given(tables)
@examples(100)
def test_there_is_no_jump_at_the_edge_of_the_grid(table: PrefillTable) -> None:
    """The quadratic starts where the grid ends."""
    edge = table.step_tokens * (len(table.seconds) - 1)
    slope_scale = max(table.seconds) * len(table.seconds)

    jump = table.seconds_for(edge + 1) - table.seconds_for(edge)

    assert 0 <= jump <= 4 * slope_scale / table.step_tokens + 1e-9


@given(st.floats(0.001, 1), st.integers(1, 512))
@examples(30)
def test_beyond_its_grid_no_table_is_flat(seconds: float, step: int) -> None:
    """Also a table that measured the same time everywhere does not predict that any length takes no
    longer.
    """
    table = PrefillTable("t", "s", step, [seconds, seconds, seconds])

    assert table.seconds_for(20 * step) > table.seconds_for(2 * step)


def test_extra_is_the_difference_of_two_lengths_and_one_steps_overhead() -> None:
    """`prefill(n given p) = T(p + n) - T(p) + step_overhead`; with no prefix it is T(n)."""
    table = PrefillTable("t", "s", 100, [0.01, 0.02, 0.06])

    assert table.extra(100, 50) == pytest.approx(0.04 - 0.02 + 0.01)
    assert table.extra(0, 150) == pytest.approx(table.seconds_for(150))


def test_a_prompt_in_chunks_has_the_overhead_of_each_step() -> None:
    """`T(n) + (steps - 1) * overhead`, with a step for every chunk that is begun."""
    table = PrefillTable("t", "s", 32, [0.01 + 0.001 * 32 * n for n in range(20)])

    chunked = table.chunked(64, 200)

    for tokens, steps in ((64, 1), (68, 2), (128, 2), (200, 4)):
        whole_s = table.seconds_for(tokens)
        assert chunked.seconds_for(tokens) == pytest.approx(whole_s + (steps - 1) * 0.01)
    assert chunked.step_overhead_s == 0.01
    assert chunked.covers(200)


def test_a_chunk_takes_what_it_takes_behind_those_before_it() -> None:
    """With a table in two dimensions that is not the difference of two lengths."""
    grid = PrefixGrid(64, 256, [[0.01, 0.02, 0.03, 0.04, 0.05], [0.01, 0.03, 0.05, 0.07, 0.09]])
    table = PrefillTable.from_grid("t", "s", grid)

    chunked = table.chunked(128, 256)

    assert chunked.seconds_for(128) == pytest.approx(0.03)
    assert chunked.seconds_for(256) == pytest.approx(0.03 + (0.03 + 0.05) / 2)


def test_a_table_in_chunks_knows_what_was_measured() -> None:
    """It goes on with all overheads, and marks what lies beyond as extrapolated, also once it was
    sent.
    """
    table = PrefillTable("t", "s", 32, [0.01 + 0.001 * 32 * n for n in range(5)])

    chunked = table.chunked(64, 1000)
    sent = MeasuredPrefill("t", chunked.step_tokens, [*chunked.seconds], chunked.covered_to_tokens)

    assert chunked.seconds_for(960) == pytest.approx(0.96 + 15 * 0.01)
    for each in (chunked, PrefillTable.from_measured(sent)):
        assert each.covers(128)
        assert not each.covers(192)
    assert table.chunked(128, 128) is table


def test_a_table_in_chunks_has_a_bounded_number_of_points() -> None:
    table = PrefillTable("t", "s", 128, [0.01 + 0.1 * n for n in range(1025)])

    assert len(table.chunked(16, 1 << 17).seconds) <= 1025


def test_a_table_that_is_made_of_a_guess_is_a_guess() -> None:
    """A measured table is none; what is scaled or divided into chunks was measured no more than its
    source.
    """
    measured = PrefillTable("t", "s", 32, [0.01 + 0.001 * n for n in range(5)])
    guess = PrefillTable("t", "s", 32, [0.01 + 0.001 * n for n in range(5)], is_guess=True)

    assert not measured.is_guess
    assert not measured.scaled(2.0).is_guess
    assert all(made.is_guess for made in (guess.scaled(2.0), guess.plus(0.1)))
    assert guess.chunked(64, 1000).is_guess


def test_what_an_instance_measured_of_itself_becomes_a_table() -> None:
    """The instance protocol carries a uniform grid."""
    table = PrefillTable.from_measured(MeasuredPrefill("self", 64, [0.001, 0.002, 0.004]))

    assert (table.label, table.step_overhead_s) == ("self", 0.001)
    assert table.seconds_for(96) == pytest.approx(0.003)


def test_a_decode_step_takes_the_fit_of_its_batch_size() -> None:
    """DistServe's two regimes: the second from the threshold on."""
    table = DecodeTable("t", "s", 10, (10.0, 0.1, 1.0), (5.0, 0.1, 2.0))

    assert table.seconds_for(9, 100) == pytest.approx(0.029)
    assert table.seconds_for(10, 100) == pytest.approx(0.035)
