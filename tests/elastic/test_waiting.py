"""Claims about how long an instance waits for ranks, and how often it starts them."""

import pytest

from kvrs_engine.elastic.waiting import (
    AGAIN_S,
    BESIDE_FACTOR,
    HUNG_S,
    MAX_STARTS,
    UNPREDICTED_S,
    Due,
    RankWaits,
    batch_limit_s,
    start_limit_s,
)


def next_of(waiting: RankWaits) -> float:
    next_s = waiting.next_s()
    assert next_s is not None
    return next_s


def test_a_process_that_was_stopped_itself_blames_no_rank() -> None:
    """It reads what ranks have reported meanwhile before it looks again."""
    waiting, now_s = RankWaits(start_s=1.0), 0.0
    waiting.begin(ready_s=0.0, now_s=now_s)

    now_s += 1000.0
    assert waiting.due(now_s) == Due()
    waiting.heard(now_s)
    for _ in range(5):
        now_s = next_of(waiting)
        assert waiting.due(now_s) == Due()
    assert waiting.due(now_s) == Due()
    now_s = next_of(waiting)

    assert waiting.due(now_s) == Due(is_silent=True)
    assert now_s == pytest.approx(1000.0 + HUNG_S)


def test_ranks_may_be_silent_as_much_longer_as_the_whole_takes() -> None:
    """A prediction of minutes is one of few answers."""
    waiting, now_s = RankWaits(start_s=1.0), 0.0
    waiting.begin(ready_s=100.0, now_s=now_s)

    while not waiting.due(now_s).is_silent:
        now_s = next_of(waiting)

    assert now_s == pytest.approx(HUNG_S + 100.0)


def test_a_rank_that_is_needed_is_started_three_times_in_a_re_forming() -> None:
    """Each is counted alone, and the next re-forming counts anew."""
    waiting = RankWaits(start_s=1.0)
    waiting.begin(1.0, now_s=0.0)
    assert all(waiting.may_start(3) for _ in range(MAX_STARTS))
    waiting.begin(1.0, now_s=5.0)  # Anew after a further loss: it is the same one.

    assert not waiting.may_start(3)
    assert waiting.may_start(2)
    waiting.end()
    waiting.begin(1.0, now_s=9.0)
    assert waiting.may_start(3)


def test_a_missing_rank_is_started_after_a_while_and_later_each_time() -> None:
    """Each of its deaths stops the others for a moment; at most a minute lies between them."""
    waiting = RankWaits(start_s=1.0)
    waiting.miss(3, now_s=10.0)
    waiting.miss(2, now_s=10.0, at_once=True)
    assert waiting.due(10.0) == Due(start=(2,))
    waiting.started(2, 10.0)
    waits = []

    for _ in range(9):
        now_s = waiting.missing[3].due_s
        assert 3 in waiting.due(now_s).start
        waiting.started(3, now_s)
        assert 3 not in waiting.due(now_s).start
        waiting.missing[3].put_off(now_s)
        waits.append(waiting.missing[3].due_s - now_s)

    assert waits == pytest.approx([AGAIN_S * 2**at for at in range(7)] + [60.0] * 2)


def test_a_process_beside_the_others_hangs_if_it_loads_for_too_long() -> None:
    """The others do not wait for it; one that has loaded waits for its turn as long as it takes."""
    waiting = RankWaits(start_s=2.0)
    for rank in (2, 3):
        waiting.miss(rank, now_s=0.0, at_once=True)
        waiting.started(rank, 0.0)
    waiting.missing[2].is_loaded = True
    limit_s = HUNG_S + BESIDE_FACTOR * 2.0

    assert waiting.next_s() == limit_s
    assert waiting.due(limit_s - 0.1) == Due()
    assert waiting.due(limit_s) == Due(end=(3,))


def test_nothing_else_is_due_while_the_ranks_re_form() -> None:
    """A rank that is due meanwhile is started when the others serve."""
    waiting = RankWaits(start_s=1.0)
    waiting.miss(3, now_s=0.0)
    waiting.begin(1.0, now_s=0.0)

    assert waiting.due(5.0) == Due()
    assert waiting.next_s() != waiting.missing[3].due_s
    waiting.end()

    assert waiting.next_s() == waiting.missing[3].due_s
    assert waiting.due(5.0) == Due(start=(3,))


def test_a_batch_may_be_late_by_its_prediction() -> None:
    """A short one has a second, since any process may be stopped for a moment; one that nothing
    predicts has a minute.
    """
    assert batch_limit_s(2.0) == 16.0
    assert batch_limit_s(0.001) == 1.0
    assert batch_limit_s(None) == UNPREDICTED_S


def test_ranks_that_start_may_be_silent_by_what_the_last_answer_took() -> None:
    """Before the first answer all of them load, which may take any time."""
    assert start_limit_s(0.0) is None
    assert start_limit_s(2.0) == HUNG_S + 16.0
