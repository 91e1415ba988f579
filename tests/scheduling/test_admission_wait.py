"""Claims about the predicted wait for admission."""

import pytest

from kvrs_engine.scheduling.admission_wait import AdmissionWaitEstimator


def test_while_there_are_places_no_request_waits() -> None:
    """However often some come free."""
    estimator = AdmissionWaitEstimator()

    for departures in range(5):
        estimator.observe(float(departures), departures, full=False)

    assert estimator.expected_s(9.0, waiting=0, running=4) == 0.0


def test_a_newcomer_waits_for_one_release_more_than_there_are_before_it() -> None:
    """Every two seconds one departs: the first in the queue is admitted next."""
    estimator = AdmissionWaitEstimator()

    for departures in range(5):
        estimator.observe(2.0 * departures, departures, full=True)

    assert estimator.expected_s(8.0, waiting=0, running=4) == pytest.approx(2.0)
    assert estimator.expected_s(8.0, waiting=3, running=4) == pytest.approx(8.0)


def test_several_releases_at_once_count_as_several() -> None:
    """Two in four seconds are one in two."""
    estimator = AdmissionWaitEstimator()

    for round_ in range(5):
        estimator.observe(4.0 * round_, 2 * round_, full=True)

    assert estimator.expected_s(16.0, waiting=1, running=4) == pytest.approx(4.0)


def test_the_time_in_which_there_were_places_does_not_count() -> None:
    """Departures while none waits do not measure the interval of a full engine."""
    estimator = AdmissionWaitEstimator()
    estimator.observe(0.0, 0, full=True)
    estimator.observe(1.0, 1, full=False)
    estimator.observe(1000.0, 4, full=False)

    estimator.observe(2000.0, 4, full=True)

    assert estimator.expected_s(2000.0, waiting=0, running=4) == pytest.approx(1.0)


def test_newer_intervals_weigh_more() -> None:
    """After ten of a new pace hardly a tenth of the old one is left."""
    estimator = AdmissionWaitEstimator()
    estimator.observe(0.0, 0, full=True)
    estimator.observe(100.0, 1, full=True)

    for departures in range(2, 14):
        estimator.observe(99.0 + departures, departures, full=True)

    assert 1.0 < estimator.expected_s(112.0, waiting=0, running=4) < 10.0


def test_an_overdue_departure_is_waited_for_once() -> None:
    """Streams that began together end together: for 20 s none of 64 departs, of which two a second
    did before. Those 70 that wait do not wait for it 70 times.
    """
    estimator = AdmissionWaitEstimator()
    for departures in range(5):
        estimator.observe(0.5 * departures, departures, full=True)

    assert estimator.expected_s(22.0, waiting=70, running=64) == pytest.approx(20.0 + 70 * 0.5)


def test_a_pause_is_no_part_of_an_interval() -> None:
    """Every half second one departs. In a pause of four seconds none can, and the eight that wait
    do not wait for it eight times.
    """
    estimator = AdmissionWaitEstimator()
    for departures in range(5):
        estimator.observe(0.5 * departures, departures, full=True)

    estimator.pause(2.25)
    estimator.pause(3.0)  # Another rank is lost.

    assert estimator.expected_s(6.25, waiting=8, running=4) == pytest.approx(4.5)
    estimator.go_on(6.25)
    estimator.go_on(6.25)
    assert estimator.expected_s(6.25, waiting=8, running=4) == pytest.approx(4.5)
    estimator.observe(6.5, 5, full=True)
    assert estimator.expected_s(6.5, waiting=8, running=4) == pytest.approx(4.5)


def test_an_engine_that_fills_up_in_a_pause_is_full_from_its_end_on() -> None:
    """The open interval begins there."""
    estimator = AdmissionWaitEstimator()
    estimator.pause(1.0)
    estimator.observe(3.0, 0, full=True)
    assert estimator.expected_s(9.0, waiting=8, running=4) == 0.0

    estimator.go_on(9.0)

    assert estimator.expected_s(10.0, waiting=1, running=4) == pytest.approx(1.25)


def test_an_interval_that_lasts_is_as_long_as_it_is_already() -> None:
    """Also the first one ever, of which no end was seen."""
    estimator = AdmissionWaitEstimator()
    estimator.observe(5.0, 0, full=True)
    assert estimator.expected_s(12.0, waiting=1, running=4) == pytest.approx(7.0 + 7.0 / 4)

    estimator.observe(12.0, 1, full=True)

    assert estimator.expected_s(12.0, waiting=0, running=4) == pytest.approx(7.0)
    assert estimator.expected_s(32.0, waiting=0, running=4) == pytest.approx(20.0)
