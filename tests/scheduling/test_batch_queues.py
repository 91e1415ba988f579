"""Claims about the three queues, in a whole scheduler."""

from kvrs_engine.scheduling.fair_queue import order
from kvrs_engine.scheduling.sequences import Queue, SequencePhase
from tests.scheduling.batch_steps import scheduler, sequence, shape, step, submit


def test_a_recovery_is_computed_before_the_prompts_of_new_ones() -> None:
    """Also before the rest of one that is half computed; only decode steps are not delayed."""
    batches, _ = scheduler(max_batch_tokens=8, max_running=3)
    streaming, half, waiting = sequence(3), sequence(30, first=100), sequence(4, first=200)
    submit(batches, streaming, half)
    step(batches)
    recovery = sequence(10, first=300, attempt=2)
    submit(batches, waiting, recovery)

    steps = [shape(step(batches)) for _ in range(2)]

    assert steps == [
        [(streaming, 3, 1, 1), (recovery, 0, 7, 0)],
        [(streaming, 4, 1, 1), (recovery, 7, 3, 1), (half, 5, 4, 0)],
    ]
    assert waiting.phase is SequencePhase.WAITING


def test_the_three_queues_are_counted_apart() -> None:
    """Waiting sequences count; an admitted one is in no queue any more."""
    batches, _ = scheduler(max_running=1)
    running, new = sequence(4), sequence(4, first=100)
    recompute, reuse, another = (
        sequence(4, attempt=2),
        sequence(9, attempt=2, pull_pages=2),
        sequence(9, attempt=3, pull_pages=1),
    )

    submit(batches, running)
    submit(batches, new, recompute, reuse, another)

    assert batches.waiting_by_queue == {Queue.REUSE: 2, Queue.RECOMPUTE: 1, Queue.NEW: 1}
    assert batches.waiting == 4
    batches.check()


def test_what_is_pulled_costs_no_place_in_line() -> None:
    """A long history that is fetched goes before a short one that is computed, and lets the next
    one pass soon.
    """
    batches, _ = scheduler(max_running=1)
    running = sequence(4)
    submit(batches, running)
    first, second = (
        sequence(41, first=100, attempt=2, pull_pages=10),
        sequence(41, first=200, attempt=2, pull_pages=10),
    )
    computed = sequence(4, first=300, attempt=2)
    submit(batches, computed, first, second)

    assert sorted([computed, first, second], key=order) == [first, second, computed]


def test_a_head_that_is_passed_is_tried_again_by_what_it_saw_itself() -> None:
    """Not by the free pages before the sequence that passed it took some."""
    batches, pages = scheduler(pages=10)
    cached, streaming, big = (
        sequence(8, first=100, prefill_only=True),
        sequence(9),
        sequence(20, first=200),
    )
    submit(batches, cached)
    step(batches)
    batches.finish(cached)
    being_sent = pages.match(cached.tags)
    submit(batches, streaming, big)
    step(batches)
    assert batches.waiting == 1
    pages.release(being_sent)

    submit(batches, sequence(4, first=300, attempt=2, prefill_only=True))

    assert pages.free_pages == 1
    assert big.phase is SequencePhase.RUNNING
