"""The spread of real costs around predicted ones."""

from math import exp, inf, log, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.core.books.learning import FIRST_ERROR, NINE_OF_TEN, Spread

seconds = st.floats(0, 1e6, allow_nan=False)


def observed(ratio: float, *, events: int, victims: int = 1) -> Spread:
    """Recoveries that take `ratio` times what was predicted."""
    spread = Spread()
    for _ in range(events * victims):
        spread.observe(0.5, 0.5 * ratio, victims)
    return spread


@given(st.lists(st.tuples(seconds, seconds, st.integers(0, 50)), max_size=30), seconds)
def test_an_interval_holds_its_prediction(
    seen: list[tuple[float, float, int]], predicted_s: float
) -> None:
    """Whatever is observed, also when it took no time at all; its ends stay finite."""
    spread = Spread()
    for said_s, real_s, victims in seen:
        spread.observe(said_s, real_s, victims)

    low_s, high_s = spread.interval(predicted_s)
    assert 0 <= low_s <= predicted_s <= high_s < inf


@given(ratio=st.floats(0.15, 6.0), victims=st.integers(1, 40))
def test_a_steady_ratio_is_found(ratio: float, victims: int) -> None:
    """After many events, in either direction."""
    spread = observed(ratio, events=60, victims=victims)

    assert spread.error == pytest.approx(abs(log(ratio)), abs=0.01)


def test_the_victims_of_an_event_count_as_one_observation() -> None:
    """Two deaths with forty victims weigh as much as two with one."""
    assert observed(3.0, events=2, victims=40).error == pytest.approx(
        observed(3.0, events=2).error, rel=0.02
    )


def test_the_first_events_count_beside_what_was_assumed() -> None:
    """Then the mean is of ten events, and older ones fade."""
    assert observed(1.0, events=1).error == pytest.approx(FIRST_ERROR / 2)
    assert observed(1.0, events=3).error == pytest.approx(FIRST_ERROR / 4)
    late = observed(1.0, events=50)
    late.observe(0.5, 0.5 * exp(1.0))
    assert late.error == pytest.approx(0.1, abs=0.01)


def test_the_ends_of_an_interval_are_as_far_as_nine_of_ten_errors() -> None:
    """By a multiple of their mean, alike in both directions."""
    spread = Spread()
    spread.error = 0.2
    low_s, high_s = spread.interval(1.0)

    assert log(high_s) == pytest.approx(NINE_OF_TEN * 0.2)
    assert low_s == pytest.approx(1 / high_s)


def test_one_hung_transfer_counts_as_a_factor_of_ten() -> None:
    spread = observed(1.0, events=50)
    spread.observe(0.01, 10_000.0)

    assert spread.error == pytest.approx(log(10.0) / 10, rel=0.1)


@pytest.mark.parametrize(
    ("predicted_s", "real_s"),
    [(0.0, 0.0001), (0.0005, 0.0), (nan, 1.0), (1.0, nan), (inf, 1.0), (1.0, inf)],
)
def test_what_is_too_short_or_no_number_says_nothing(predicted_s: float, real_s: float) -> None:
    """Or below a millisecond: that shows the clock."""
    spread = Spread()
    spread.observe(predicted_s, real_s)

    assert spread.error <= FIRST_ERROR
