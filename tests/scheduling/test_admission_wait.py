"""Claims about the predicted wait for admission."""

from collections.abc import Iterable

import pytest

from kvrs_engine.scheduling.admission_wait import AdmissionWaitEstimator


def observed(rows: Iterable[tuple[float, int, bool]]) -> AdmissionWaitEstimator:
    """`rows`: a time, how many sequences have departed by then, and whether the engine is full."""
    estimator = AdmissionWaitEstimator()
    for now_s, departures, full in rows:
        estimator.observe(now_s, departures, full=full)
    return estimator


def each(every_s: float, at_once: int = 1) -> list[tuple[float, int, bool]]:
    """Five looks at a full engine from which so many depart at once."""
    return [(every_s * look, at_once * look, True) for look in range(5)]


PLACES = [(float(look), look, False) for look in range(5)]
PAUSED = [(0.0, 0, True), (1.0, 1, False), (1000.0, 4, False), (2000.0, 4, True)]
NEW_PACE = [(0.0, 0, True), (100.0, 1, True), *((99.0 + n, n, True) for n in range(2, 14))]


@pytest.mark.parametrize(
    ("rows", "now_s", "waiting", "running", "expected_s"),
    [
        pytest.param(PLACES, 9.0, 0, 4, 0.0, id="none waits while there are places"),
        pytest.param(each(2.0), 8.0, 0, 4, 2.0, id="the first in the queue waits for one release"),
        pytest.param(each(2.0), 8.0, 3, 4, 8.0, id="and the fourth for four"),
        pytest.param(
            each(4.0, 2), 16.0, 1, 4, 4.0, id="two at once in four seconds are one in two"
        ),
        pytest.param(PAUSED, 2000.0, 0, 4, 1.0, id="the time with places does not count"),
        # Streams that began together end together: for 20 s none of 64 departs.
        pytest.param(each(0.5), 22.0, 70, 64, 55.0, id="an overdue departure is waited for once"),
        # Also the first interval ever, of which no end was seen.
        pytest.param([(5.0, 0, True)], 12.0, 1, 4, 8.75, id="an open interval is as long as it is"),
        pytest.param([(5.0, 0, True), (12.0, 1, True)], 12.0, 0, 4, 7.0, id="until it ends"),
        pytest.param([(5.0, 0, True), (12.0, 1, True)], 32.0, 0, 4, 20.0, id="and then the next"),
    ],
)
def test_the_wait_follows_from_departures_of_a_full_engine(
    rows: list[tuple[float, int, bool]],
    now_s: float,
    waiting: int,
    running: int,
    expected_s: float,
) -> None:
    assert observed(rows).expected_s(now_s, waiting, running) == pytest.approx(expected_s)


def test_newer_intervals_weigh_more() -> None:
    """After ten of a new pace hardly a tenth of the old one is left."""
    assert 1.0 < observed(NEW_PACE).expected_s(112.0, waiting=0, running=4) < 10.0


def test_a_pause_is_no_part_of_an_interval() -> None:
    """Every half second one departs. In a pause of four seconds none can, and the eight that wait
    do not wait for it eight times.
    """
    estimator = observed(each(0.5))

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
