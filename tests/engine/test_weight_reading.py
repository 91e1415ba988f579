"""The pace at which weights are read, by a clock of the test's own."""

from collections.abc import Callable

import pytest

from kvrs_engine.engine.models.reading import WeightReading


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.before_sleep: Callable[[], object] = lambda: None

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.before_sleep()
        self.now_s += duration_s


def reading(
    clock: Clock, total: int, rate: float | None, after: WeightReading | None = None
) -> WeightReading:
    return WeightReading(total, rate, after, clock, clock.sleep)


def test_a_rate_is_kept_over_all_that_is_read() -> None:
    clock = Clock()
    weights = reading(clock, 1000, 100.0)
    weights.begin()
    weights.took(300)
    assert clock.now_s == pytest.approx(103.0)
    clock.now_s += 4.0  # Of other work, in which the disk could have read on.
    weights.took(300)
    assert clock.now_s == pytest.approx(107.0)
    weights.took(400)
    assert clock.now_s == pytest.approx(110.0)


def test_without_a_rate_nothing_waits() -> None:
    clock = Clock()
    weights = reading(clock, 1000, None, reading(clock, 10, None))
    weights.begin()
    weights.took(1000)
    assert clock.now_s == 100.0


def test_how_long_it_will_still_take_is_known() -> None:
    clock = Clock()
    draft = reading(clock, 200, 100.0)
    weights = reading(clock, 1000, 100.0, draft)
    assert weights.left_s() == pytest.approx(12.0), "the draft comes first"
    draft.end()
    weights.begin()
    assert weights.left_s() == pytest.approx(10.0)
    waiting: list[float | None] = []
    clock.before_sleep = lambda: waiting.append(weights.left_s())
    weights.took(500)
    assert waiting == [pytest.approx(10.0)], "it is counted, and not there yet"
    assert weights.left_s() == pytest.approx(5.0)
    weights.end()
    assert weights.left_s() == 0.0
    weights.end(there_in_s=3.0)
    clock.now_s += 1.0
    assert weights.left_s() == pytest.approx(2.0), "the way into a GPU"
    clock.now_s += 5.0
    assert weights.left_s() == 0.0
    unknown = reading(clock, 1000, None)
    unknown.begin()
    assert unknown.left_s() is None


def test_a_reading_that_does_not_end_is_not_awaited_for_ever() -> None:
    clock = Clock()
    stuck = reading(clock, 1, 100.0)
    weights = reading(clock, 1000, 100.0, stuck)
    weights.begin()  # After a second of real time.
    weights.took(100)
    assert clock.now_s == pytest.approx(101.0)


def test_what_is_read_begins_once() -> None:
    """With the first tensor; a model that another process has loaded never does."""
    clock = Clock()
    weights = reading(clock, 1000, 100.0)
    for _ in range(2):
        weights.begin()
        weights.took(100)
    assert clock.now_s == pytest.approx(102.0)
