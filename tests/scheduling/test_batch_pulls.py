"""Claims about pulls, and about sequences that end before their time."""

from kvrs_engine.scheduling.sequences import SequencePhase
from tests.scheduling.batch_steps import scheduler, sequence, shape, step, submit


def test_a_pull_asks_for_what_the_local_cache_lacks() -> None:
    """Pages before `first_page` are here already; the last position is not asked for."""
    batches, _ = scheduler()
    short, long = sequence(5), sequence(13, pull_pages=3, pull_tail=True)
    submit(batches, short)
    step(batches)

    [pull] = submit(batches, long)

    assert long.phase is SequencePhase.PULLING
    assert pull.spans == (range(1, 3),)
    assert (pull.tail_index, pull.tail_tokens) == (
        None,
        0,
    )  # The history ends one token into page 3: nothing is left to pull.


def test_the_tail_is_pulled_up_to_the_position_before_the_last() -> None:
    """The last position of the history is always computed here."""
    batches, _ = scheduler()
    one = sequence(11, pull_pages=2, pull_tail=True)

    [pull] = submit(batches, one)
    batches.pulled(one, range(2), tail=True)

    assert (pull.tail_index, pull.tail_tokens) == (2, 2)
    assert shape(step(batches)) == [(one, 10, 1, 1)]


def test_a_last_page_that_is_just_full_is_pulled_as_a_tail() -> None:
    """All of it but the last position is of use; its tag is not, since the last position makes the
    page full.
    """
    batches, pages = scheduler()
    one = sequence(8, pull_pages=2, pull_tail=True)

    [pull] = submit(batches, one)
    batches.pulled(one, range(1), tail=True)

    assert (pull.spans, pull.tail_index, pull.tail_tokens) == ((range(1),), 1, 3)
    assert len(pages.match(one.tags)) == 1
    assert shape(step(batches)) == [(one, 7, 1, 1)]


def test_a_tail_is_not_pulled_behind_a_gap() -> None:
    """A peer that holds fewer full pages than the history has cannot have its tail in the right
    place.
    """
    batches, _ = scheduler()
    one = sequence(15, pull_pages=2, pull_tail=True)

    [pull] = submit(batches, one)

    assert (pull.spans, pull.tail_index) == ((range(2),), None)


def test_abort_while_waiting_leaves_the_queue() -> None:
    """Nothing was owned, nothing is left, and the next is not held up."""
    batches, pages = scheduler(pages=4)
    running, waiting, behind = sequence(9), sequence(16, first=100), sequence(1, first=200)
    submit(batches, running, waiting, behind)

    batches.finish(waiting)

    assert batches.waiting == 1
    assert batches.queued_tokens == 9 + 1
    batches.finish(running)
    batches.admit()
    assert behind.phase is SequencePhase.RUNNING
    pages.check()
    batches.check()


def test_abort_in_flight_keeps_the_pages_until_the_batch_is_complete() -> None:
    """The executor may still be writing into them; what it sampled is not wanted any more."""
    batches, pages = scheduler(pages=5)
    one, other = sequence(5), sequence(5, first=100)
    submit(batches, one, other)
    batch = batches.next_batch()

    batches.finish(one)

    assert pages.free_pages == 1
    batches.check()
    assert batches.complete(batch, {other: [7]}) == []
    assert pages.free_pages == 3
    assert len(one.token_ids) == 5
    assert len(other.token_ids) == 6
    batches.check()


def test_abort_between_batches_gives_the_pages_back_at_once() -> None:
    """Nothing is written; what was computed stays findable."""
    batches, pages = scheduler(pages=4)
    one = sequence(9)
    submit(batches, one)
    step(batches)

    batches.finish(one)
    batches.finish(one)

    assert pages.free_pages == 4
    assert len(pages.match(one.tags)) == 2
    assert (batches.running, batches.queued_tokens) == (0, 0)


def test_a_stalled_sequence_that_is_aborted_delays_no_other() -> None:
    """Admission waits for a stalled sequence only while there is one."""
    batches, _ = scheduler(pages=5, max_running=3)
    older, puller, latest = (
        sequence(4),
        sequence(12, first=100, pull_pages=2),
        sequence(1, first=200),
    )
    submit(batches, older)
    submit(batches, puller)
    for _ in range(5):
        step(batches)
    assert batches.next_batch() == []
    batches.add(latest)

    batches.finish(older)
    batches.admit()

    assert latest.phase is SequencePhase.RUNNING
