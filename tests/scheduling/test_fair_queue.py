"""Claims about the fair queue: three classes, their priorities and their shares."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.ids import StreamId
from kvrs.protocol.pages import root_tag
from kvrs_engine.scheduling.fair_queue import TOKEN_COST, FairQueue
from kvrs_engine.scheduling.sequences import Queue, Sequence
from tests.scheduling.batch_steps import leading

ROOT = root_tag("model")
# (attempt, prompt tokens, pages to pull) of a history of ten tokens that makes a sequence of that
# queue.
EXAMPLES = {Queue.REUSE: (2, 10, 1), Queue.RECOMPUTE: (2, 10, 0), Queue.NEW: (1, 10, 0)}


def sequence(
    attempt: int, prompt_tokens: int = 10, pull_pages: int = 0, *, pull_tail: bool = False
) -> Sequence:
    return Sequence(
        StreamId("s"),
        (0, attempt),
        [0] * 10,
        prompt_tokens,
        ROOT,
        False,
        leading(pull_pages),
        pull_tail,
    )


def enqueue(waiting: FairQueue, queue: Queue, tokens: int) -> Sequence:
    one = sequence(*EXAMPLES[queue])
    assert one.queue is queue
    waiting.append(one, tokens)
    return one


def serve(waiting: FairQueue) -> Sequence:
    head = waiting.head()
    assert head is not None
    waiting.remove(head)
    waiting.advance(head)
    waiting.check()
    return head


@pytest.mark.parametrize(
    ("one", "queue"),
    [
        (sequence(1), Queue.NEW),
        (sequence(1, pull_pages=2, pull_tail=True), Queue.NEW),
        (sequence(1, prompt_tokens=0), Queue.NEW),
        (sequence(2), Queue.RECOMPUTE),
        (sequence(1, prompt_tokens=7), Queue.RECOMPUTE),
        (sequence(2, pull_pages=2), Queue.REUSE),
        (sequence(2, pull_tail=True), Queue.REUSE),
        (sequence(1, prompt_tokens=7, pull_pages=2), Queue.REUSE),
    ],
)
def test_the_queue_follows_from_what_a_sequence_is(one: Sequence, queue: Queue) -> None:
    """A later attempt or tokens of an earlier one make a recovery; a hand-off alone does not, nor
    does an unknown prompt.
    """
    assert one.queue is queue


def test_a_sequence_stays_in_its_queue() -> None:
    """Preemption ends the hope for a pull, and is no reason to lose one's turn."""
    one = sequence(2, pull_pages=2)

    one.pulls = ()

    assert one.queue is Queue.REUSE


def test_reuse_goes_before_recompute_and_recompute_before_new() -> None:
    """In the order of arrival."""
    waiting = FairQueue()
    new, recompute, reuse = (
        enqueue(waiting, queue, 10) for queue in (Queue.NEW, Queue.RECOMPUTE, Queue.REUSE)
    )

    served = [serve(waiting) for _ in range(3)]

    assert served == [reuse, recompute, new]
    assert waiting.head() is None


def test_a_recovery_passes_all_new_ones_however_many_wait() -> None:
    """A backlog is when recoveries need their priority most."""
    waiting = FairQueue()
    for _ in range(100):
        enqueue(waiting, Queue.NEW, 500)

    recovery = enqueue(waiting, Queue.RECOMPUTE, 500)

    assert serve(waiting) is recovery


@pytest.mark.parametrize("queue", Queue)
def test_within_a_queue_it_is_first_come_first_served(queue: Queue) -> None:
    """However little the later ones have to compute."""
    waiting = FairQueue()
    joined = [enqueue(waiting, queue, tokens) for tokens in (500, 1, 30, 1)]

    assert [serve(waiting) for _ in joined] == joined


def test_while_all_three_wait_they_share_the_engine() -> None:
    """Eight to four to one, in tokens."""
    waiting = FairQueue()
    for queue in Queue:
        for _ in range(200):
            enqueue(waiting, queue, 10)

    served = Counter(serve(waiting).queue for _ in range(130))

    assert served == {Queue.REUSE: 80, Queue.RECOMPUTE: 40, Queue.NEW: 10}
    assert waiting.lengths() == {Queue.REUSE: 120, Queue.RECOMPUTE: 160, Queue.NEW: 190}


def test_who_did_not_come_saves_nothing_up() -> None:
    """After a day without failures recoveries have their share, not a day's worth of it."""
    waiting = FairQueue()
    for _ in range(100):
        enqueue(waiting, Queue.NEW, 10)
        serve(waiting)
    new = enqueue(waiting, Queue.NEW, 10)

    for _ in range(100):
        enqueue(waiting, Queue.REUSE, 10)
    passed_by = next(count for count in range(100) if serve(waiting) is new)

    assert passed_by == 7  # The eighth has the same finish time and came later.


def test_a_preempted_sequence_keeps_its_rank() -> None:
    """Behind those that are before it, and before all that came after it."""
    waiting = FairQueue()
    before, preempted, after = (enqueue(waiting, Queue.NEW, 10) for _ in range(3))
    waiting.remove(preempted)

    waiting.requeue(preempted)

    assert [serve(waiting) for _ in range(3)] == [before, preempted, after]


arrivals = st.tuples(st.sampled_from(Queue), st.integers(1, 40))


@settings(deadline=None)
@given(steps=st.lists(st.one_of(arrivals, st.just(None)), max_size=120))
def test_no_sequence_is_passed_by_more_than_the_shares_allow(
    steps: list[tuple[Queue, int] | None],
) -> None:
    """For each token of its own queue up to and with its own: 8 of reuse and 4 of recompute pass a
    new one, 2 a recompute.
    """
    waiting = FairQueue()
    tokens: dict[Sequence, int] = {}
    allowed: dict[Sequence, dict[Queue, float]] = {}
    passed: dict[Sequence, Counter[Queue]] = {}

    for step in [*steps, *[None] * len(steps)]:
        if step is not None:
            queue, size = step
            one = enqueue(waiting, queue, size)
            tokens[one] = size
            own = sum(tokens[other] for other in waiting if other.queue is queue)
            allowed[one] = {other: own * TOKEN_COST[queue] / TOKEN_COST[other] for other in Queue}
            passed[one] = Counter()
        elif len(waiting):
            head = serve(waiting)
            for other in waiting:
                if other.arrival < head.arrival:
                    passed[other][head.queue] += tokens[head]

    assert not len(waiting)
    assert all(
        count <= allowed[one][queue]
        for one, counts in passed.items()
        for queue, count in counts.items()
    )
