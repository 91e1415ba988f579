"""Claims about the wait for a place."""

import pytest

from kvrs.scheduling.places import PlaceWait


def test_while_there_are_places_nobody_waits() -> None:
    """However often some come free."""
    places = PlaceWait()

    for released in range(5):
        places.observe(float(released), released, full=False)

    assert places.expected_s(9.0, waiting=0) == 0.0


def test_a_newcomer_waits_for_one_release_more_than_there_are_before_it() -> None:
    """Every two seconds a place comes free: the first in line gets the next one."""
    places = PlaceWait()

    for released in range(5):
        places.observe(2.0 * released, released, full=True)

    assert places.expected_s(8.0, waiting=0) == pytest.approx(2.0)
    assert places.expected_s(8.0, waiting=3) == pytest.approx(8.0)


def test_several_releases_at_once_count_as_several() -> None:
    """Two in four seconds are one in two."""
    places = PlaceWait()

    for round_ in range(5):
        places.observe(4.0 * round_, 2 * round_, full=True)

    assert places.expected_s(16.0, waiting=1) == pytest.approx(4.0)


def test_the_time_in_which_there_were_places_does_not_count() -> None:
    """Places that come free while nobody lacks one say nothing about those who will."""
    places = PlaceWait()
    places.observe(0.0, 0, full=True)
    places.observe(1.0, 1, full=False)
    places.observe(1000.0, 4, full=False)

    places.observe(2000.0, 4, full=True)

    assert places.expected_s(2000.0, waiting=0) == pytest.approx(1.0)


def test_newer_intervals_weigh_more() -> None:
    """After ten of a new pace hardly a tenth of the old one is left."""
    places = PlaceWait()
    places.observe(0.0, 0, full=True)
    places.observe(100.0, 1, full=True)

    for released in range(2, 14):
        places.observe(99.0 + released, released, full=True)

    assert 1.0 < places.expected_s(112.0, waiting=0) < 10.0


def test_an_interval_that_lasts_is_as_long_as_it_is_already() -> None:
    """Also the first one ever, of which no end was seen."""
    places = PlaceWait()
    places.observe(5.0, 0, full=True)
    assert places.expected_s(12.0, waiting=1) == pytest.approx(14.0)

    places.observe(12.0, 1, full=True)

    assert places.expected_s(12.0, waiting=0) == pytest.approx(7.0)
    assert places.expected_s(32.0, waiting=0) == pytest.approx(20.0)
