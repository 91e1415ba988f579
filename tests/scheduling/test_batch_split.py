"""Claims about a history whose front is computed while its back is fetched, and about several
sources.
"""

from kvrs_engine.scheduling.sequences import Queue, SequencePhase
from tests.scheduling.batch_steps import P, scheduler, sequence, shape, step, submit


def test_the_front_is_computed_while_the_back_is_fetched() -> None:
    """Up to the first page that is awaited and no further; when that has come, the rest behind
    it.
    """
    batches, pages = scheduler()
    one = sequence(17, attempt=2, pulls=(range(2, 4),))

    [pull] = submit(batches, one)

    assert (pull.spans, one.phase, one.queue) == ((range(2, 4),), SequencePhase.SPLIT, Queue.REUSE)
    assert batches.queued_tokens == 9
    assert shape(step(batches)) == [(one, 0, 8, 0)]
    assert one.phase is SequencePhase.PULLING
    assert batches.next_batch() == []
    batches.pulled(one, range(2, 4))
    assert (one.phase, one.computed_tokens) == (SequencePhase.RUNNING, 16)
    assert len(pages.match(one.tags)) == 4
    assert shape(step(batches)) == [(one, 16, 1, 1)]


def test_a_back_that_comes_first_waits_for_the_front() -> None:
    """It is there, and found by others, but nothing behind it is computed before what lies before
    it.
    """
    batches, pages = scheduler(max_batch_tokens=3)
    one = sequence(14, pulls=(range(1, 3),))
    submit(batches, one)

    batches.pulled(one, range(1, 3))

    assert (one.phase, one.computed_tokens, batches.queued_tokens) == (SequencePhase.RUNNING, 0, 6)
    assert pages.match(one.tags[1:3]) == one.pages[1:3]
    assert shape(step(batches)) == [(one, 0, 3, 0)]
    assert shape(step(batches)) == [(one, 3, 1, 0)]
    assert shape(step(batches)) == [(one, 12, 2, 1)]


def test_the_back_may_come_while_the_front_is_in_flight() -> None:
    """The executor has its chunk; what has arrived meanwhile counts from the end of it on."""
    batches, _ = scheduler()
    one = sequence(13, pulls=(range(1, 3),))
    submit(batches, one)
    batch = batches.next_batch()

    batches.pulled(one, range(1, 3))

    assert (one.phase, one.computed_tokens) == (SequencePhase.RUNNING, 0)
    batches.complete(batch, {})
    batches.check()
    assert one.computed_tokens == 12
    assert shape(step(batches)) == [(one, 12, 1, 1)]


def test_what_did_not_come_is_computed_and_what_came_is_not() -> None:
    """Only the middle of a back comes: before and behind it everything is computed, in order."""
    batches, _ = scheduler()
    one = sequence(21, pulls=(range(1, 5),))
    submit(batches, one)

    batches.pulled(one, range(2, 3))

    assert shape(step(batches)) == [(one, 0, 8, 0)]
    assert shape(step(batches)) == [(one, 12, 9, 1)]


def test_several_sources_are_told_of_one_by_one() -> None:
    """The first one breaks off: what the next one does not have of it is computed while that one
    sends.
    """
    batches, _ = scheduler()
    one = sequence(25, pulls=(range(3), range(4, 6)))
    [pull] = submit(batches, one)
    assert (pull.spans, one.phase) == ((range(3), range(4, 6)), SequencePhase.PULLING)

    batches.pulled(one, range(1), more_from=4)

    assert (one.phase, one.computed_tokens) == (SequencePhase.SPLIT, 4)
    assert shape(step(batches)) == [(one, 4, 12, 0)]
    assert one.phase is SequencePhase.PULLING
    batches.pulled(one, range(4, 6))
    assert shape(step(batches)) == [(one, 24, 1, 1)]


def test_sources_that_overlap_are_one_wish() -> None:
    """A page is wanted once, whatever its source; the second begins where the first one ended."""
    batches, _ = scheduler()
    one = sequence(17, pulls=(range(2), range(4)))

    [pull] = submit(batches, one)
    batches.pulled(one, range(1), more_from=1)

    assert (pull.spans, one.phase, one.computed_tokens) == ((range(4),), SequencePhase.PULLING, 4)
    batches.pulled(one, range(1, 4))
    assert shape(step(batches)) == [(one, 16, 1, 1)]


def test_what_the_local_cache_has_is_not_fetched() -> None:
    """A split whose front is here already is an ordinary pull of the rest."""
    batches, _ = scheduler()
    short, long = sequence(13), sequence(25, pulls=(range(2, 6),))
    submit(batches, short)
    step(batches)

    [pull] = submit(batches, long)

    assert (pull.spans, long.phase, long.computed_tokens) == (
        (range(3, 6),),
        SequencePhase.PULLING,
        12,
    )


def test_others_get_their_tokens_while_one_is_split() -> None:
    """A front shares the batch with decode steps as any prefill does."""
    batches, _ = scheduler(max_batch_tokens=4)
    other, one = sequence(4, first=100), sequence(17, pulls=(range(2, 4),))
    submit(batches, other)
    step(batches)
    submit(batches, one)

    assert shape(step(batches)) == [(other, 4, 1, 1), (one, 0, 3, 0)]
    assert (batches.pulling, batches.running) == (1, 1)


def test_abort_of_a_split_sequence_waits_for_the_batch_and_for_the_pull() -> None:
    """Whichever of the two is over last gives the pages back."""
    for pull_ends_first in (True, False):
        batches, pages = scheduler(pages=5)
        one = sequence(17, pulls=(range(2, 4),))
        submit(batches, one)
        batch = batches.next_batch()

        batches.finish(one)

        assert pages.free_pages == 0
        batches.check()
        if pull_ends_first:
            batches.pulled(one, range(2, 4))
            assert pages.free_pages == 0
            batches.complete(batch, {})
        else:
            batches.complete(batch, {})
            assert pages.free_pages == 0
            batches.pulled(one, range(2, 3), more_from=3)
            assert pages.free_pages == 0
            batches.pulled(one, range(3, 4))
        assert pages.free_pages == 5
        assert pages.match(one.tags) == []
        batches.check()


def test_abort_when_the_back_has_come_gives_the_pages_back_at_once() -> None:
    """Nothing is written any more; what came stays findable."""
    batches, pages = scheduler(pages=5)
    one = sequence(17, pulls=(range(2, 4),))
    submit(batches, one)
    batches.pulled(one, range(2, 4))

    batches.finish(one)

    assert (pages.free_pages, batches.queued_tokens) == (5, 0)
    assert len(pages.match(one.tags[2:])) == 2


def test_a_split_sequence_is_preempted_as_soon_as_its_pull_is_over() -> None:
    """Before that a socket may be writing; then it loses what it has, front and back, and comes
    back to compute.
    """
    batches, pages = scheduler(pages=8, max_batch_tokens=1, max_running=3)
    older, one = sequence(P), sequence(4 * P + 1, first=100, pulls=(range(1, 4),))
    submit(batches, older)
    submit(batches, one)
    while len(older.pages) < 3 or older.computed_tokens < 3 * P:
        step(batches)
    assert one.phase is SequencePhase.SPLIT
    # The older one needs a page, and no sequence can be preempted for it.
    assert shape(step(batches)) == [(one, 0, 1, 0)]
    batches.pulled(one, range(1, 3))
    assert one.arrived == (range(4, 12),)

    batch = step(batches)

    assert [chosen for chosen, _ in batch] == [older]
    assert batches.waiting == 1
    assert (one.pages, len(one.arrived), len(one.pulls)) == ([], 0, 0)
    assert len(pages.match(one.tags[1:3])) == 2


def test_a_tail_behind_a_back_is_part_of_it() -> None:
    """Full pages and the partial one arrive in one piece, and only the last position is left."""
    batches, _ = scheduler()
    one = sequence(15, pulls=(range(1, 3),), pull_tail=True)

    [pull] = submit(batches, one)
    step(batches)
    batches.pulled(one, range(1, 3), tail=True)

    assert (pull.spans, pull.tail_index, pull.tail_tokens) == ((range(1, 3),), 3, 2)
    assert shape(step(batches)) == [(one, 14, 1, 1)]


def test_places_are_counted_as_they_are_given_back() -> None:
    """By those that had one, however they end."""
    batches, _ = scheduler(max_running=2)
    ran, split, waiting = (
        sequence(5),
        sequence(17, first=100, pulls=(range(2, 4),)),
        sequence(5, first=200),
    )
    submit(batches, ran, split, waiting)
    assert (batches.full, batches.departures) == (True, 0)

    for one in (waiting, ran, split, split):
        batches.finish(one)
    batches.admit()

    assert (batches.full, batches.departures) == (False, 2)
