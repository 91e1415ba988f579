"""Predictions that correct themselves."""

from math import inf, log, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.core.books.learning import Corrections
from kvrs.core.model.estimates import Option

HALF_LIFE_S = 300.0  # What was learned counts half after five minutes.

seconds = st.floats(0, 1e6, allow_nan=False)
observations = st.lists(
    st.tuples(st.sampled_from(Option), seconds, seconds, st.floats(0, 1000)), max_size=30
)


def learned(ratio: float, *, times: int = 60, most: float = 4.0) -> Corrections:
    """Migrations that take `ratio` times what was predicted, all at second 10."""
    corrections = Corrections(most)
    for _ in range(times):
        corrections.observe(Option.MIGRATE, 0.5, 0.5 * ratio, 10.0)
    return corrections


@given(most=st.floats(1, 100), seen=observations, asked_s=st.floats(0, 1e9))
@settings(deadline=None)
def test_a_factor_never_leaves_its_bounds(
    most: float, seen: list[tuple[Option, float, float, float]], asked_s: float
) -> None:
    """Whatever is observed, in whatever order of times, also when it took no time at all."""
    corrections = Corrections(most)
    for option, raw_s, real_s, now_s in seen:
        corrections.observe(option, raw_s, real_s, now_s)

    for option in Option:
        assert 1 / most <= corrections.factor(option, asked_s) <= most
    assert all(1 / most <= factor <= most for factor in corrections.snapshot().values())


@given(ratio=st.floats(0.26, 3.9), first=st.floats(0.01, 100))
@settings(deadline=None)
def test_a_steady_ratio_is_found_whatever_came_before(ratio: float, first: float) -> None:
    """Real over raw, after a few dozen recoveries, to a percent."""
    corrections = learned(first, times=20)
    for _ in range(40):
        corrections.observe(Option.MIGRATE, 0.5, 0.5 * ratio, 10.0)

    assert corrections.factor(Option.MIGRATE, 10.0) == pytest.approx(ratio, rel=0.01)


@given(ratio=st.floats(0.3, 3.5), times=st.integers(1, 10))
@settings(deadline=None)
def test_every_observation_of_a_steady_ratio_comes_nearer_to_it(ratio: float, times: int) -> None:
    """And none overshoots."""
    before, after = (
        learned(ratio, times=n).factor(Option.MIGRATE, 10.0) for n in (times, times + 1)
    )

    assert abs(log(after / ratio)) <= abs(log(before / ratio))
    assert (after - 1) * (ratio - 1) >= 0


@given(ratio=st.floats(0.25, 4.0), waits=st.lists(st.floats(0, 10_000), min_size=2))
@settings(deadline=None)
def test_what_was_learned_is_forgotten_towards_1(ratio: float, waits: list[float]) -> None:
    """The longer ago the last observation, the less; never past 1."""
    corrections = learned(ratio)

    left = [abs(log(corrections.factor(Option.MIGRATE, 10.0 + wait_s))) for wait_s in sorted(waits)]

    assert left == sorted(left, reverse=True)
    assert corrections.factor(Option.MIGRATE, 10.0 + HALF_LIFE_S) == pytest.approx(
        corrections.factor(Option.MIGRATE, 10.0) ** 0.5
    )
    assert corrections.factor(Option.MIGRATE, 10.0 + 20 * HALF_LIFE_S) == pytest.approx(
        1.0, abs=1e-5
    )


def test_an_observation_after_a_long_pause_counts_from_1() -> None:
    """A correction that has been forgotten does not come back."""
    corrections = learned(4.0)

    corrections.observe(Option.MIGRATE, 0.5, 0.5, 10.0 + 20 * HALF_LIFE_S)

    assert corrections.factor(Option.MIGRATE, 10.0 + 20 * HALF_LIFE_S) == pytest.approx(
        1.0, abs=1e-5
    )


def test_twice_as_long_and_half_as_long_weigh_the_same() -> None:
    """Logarithms: as many of either cancel, to within the weight of the last one."""
    slow, fast = learned(2.0, times=5), learned(0.5, times=5)

    product = slow.factor(Option.MIGRATE, 10.0) * fast.factor(Option.MIGRATE, 10.0)

    assert product == pytest.approx(1.0)


def test_one_outlier_moves_little() -> None:
    """A hung transfer takes a hundred times as long, and is taken for the largest factor there
    is.
    """
    corrections = learned(1.0)

    corrections.observe(Option.MIGRATE, 0.5, 50.0, 10.0)

    assert corrections.factor(Option.MIGRATE, 10.0) == pytest.approx(4**0.2)


def test_each_option_learns_for_itself() -> None:
    """A slow link does not make a prefill slow."""
    corrections = learned(2.0)

    assert corrections.factor(Option.RECOMPUTE, 10.0) == 1.0
    assert set(corrections.snapshot()) == {"migrate"}


def test_the_snapshot_is_of_the_latest_time_that_came_up() -> None:
    """It takes no time as an argument, and must not show what is long forgotten."""
    corrections = learned(4.0)
    factor = corrections.factor(Option.MIGRATE, 10.0 + HALF_LIFE_S)

    assert corrections.snapshot() == {"migrate": factor}


def test_a_bound_of_1_means_no_correction() -> None:
    """`policy.correction_max: 1`."""
    corrections = learned(3.0, most=1.0)

    assert corrections.factor(Option.MIGRATE, 10.0) == 1.0
    assert corrections.snapshot() == {}


@pytest.mark.parametrize(
    ("raw_s", "real_s"),
    [(0.0, 0.0), (0.0, 0.0009), (0.0002, 0.0), (inf, 1.0), (1.0, inf), (nan, 1.0)],
)
def test_what_is_too_short_or_no_number_is_not_learned_from(raw_s: float, real_s: float) -> None:
    """A prediction of zero is a matter of the table, and a microsecond one of the clock."""
    corrections = Corrections(4.0)

    corrections.observe(Option.MIGRATE, raw_s, real_s, 10.0)

    assert corrections.factor(Option.MIGRATE, 10.0) == 1.0


def test_three_milliseconds_are_learned_from() -> None:
    """Below one, clock and polling dominate what is measured."""
    corrections = Corrections(4.0)

    corrections.observe(Option.MIGRATE, 0.001, 0.003, 10.0)

    assert corrections.factor(Option.MIGRATE, 10.0) == pytest.approx(3**0.2)
