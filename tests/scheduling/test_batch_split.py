"""Claims about a history whose front is computed while its back is fetched, and about several
sources.
"""

from kvrs_engine.scheduling.sequences import Queue, SequencePhase
from tests.scheduling.batch_steps import scheduler, sequence, shape, step, submit


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


def test_abort_when_the_back_has_come_gives_the_pages_back_at_once() -> None:
    """Nothing is written any more; what came stays findable."""
    batches, pages = scheduler(pages=5)
    one = sequence(17, pulls=(range(2, 4),))
    submit(batches, one)
    batches.pulled(one, range(2, 4))

    batches.finish(one)

    assert (pages.free_pages, batches.queued_tokens) == (5, 0)
    assert len(pages.match(one.tags[2:])) == 2


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
