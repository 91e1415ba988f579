"""Claims about the batch scheduler that its machine (`test_scheduler_machine.py`) does not make."""

from functools import partial

import pytest

from kvrs.config.cluster import BatchSettings
from kvrs.ids import StreamId
from kvrs_engine.scheduling.drafts import MOST_ROWS
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.scheduler import BatchScheduler
from kvrs_engine.scheduling.sequences import Sequence, SequencePhase
from kvrs_engine.scheduling.shares import PrefillCost, shared_out
from tests.scheduling.batch_steps import P, S, scheduler, sequence, shape, step, submit


def test_prefill_is_cut_into_chunks_and_only_the_last_wants_logits() -> None:
    """A chunk fills the token budget; logits are of use only at the end of the history."""
    batches, _ = scheduler(max_batch_tokens=6)
    one = sequence(14)
    submit(batches, one)

    steps = [shape(step(batches)) for _ in range(4)]

    assert steps == [
        [(one, 0, 6, 0)],
        [(one, 6, 6, 0)],
        [(one, 12, 2, 1)],
        [(one, 14, 1, 1)],
    ]
    assert one.token_ids[14:] == [7, 7]


def test_decode_steps_alone_cannot_keep_the_oldest_from_prefill() -> None:
    """Where they could fill the batch, one token is the oldest's."""
    batches, _ = scheduler(max_batch_tokens=2)
    oldest, other, another = sequence(9), sequence(1, first=100), sequence(1, first=200)
    submit(batches, oldest, other, another)

    batch = step(batches)

    assert shape(batch) == [(other, 0, 1, 1), (oldest, 0, 1, 0)]


def test_drafts_have_no_batch_that_a_prompt_wants() -> None:
    """Alone they fill the pages that they may have; beside a prompt they are only asked for, so
    that their source learns the tokens.
    """
    batches, _ = scheduler(max_batch_tokens=7)
    streaming, late_prompt = sequence(3), sequence(4, first=100)
    submit(batches, streaming)
    step(batches)
    asked: list[tuple[Sequence, int]] = []

    def proposals(one: Sequence, most: int) -> list[int]:
        asked.append((one, most))
        return [0] * most

    alone = batches.next_batch(proposals)
    batches.abandon(alone)
    submit(batches, late_prompt)
    beside = batches.next_batch(proposals)

    assert shape(alone) == [(streaming, 3, 5, 5)]
    assert shape(beside) == [(streaming, 3, 1, 1), (late_prompt, 0, 4, 1)]
    assert asked == [(streaming, 4), (streaming, 0)]


@pytest.mark.parametrize(
    ("streams", "drafts"),
    [
        pytest.param(4, [2, 2, 2, 2], id="all that are proposed"),
        pytest.param(6, [2, 2, 1, 1, 1, 1], id="what the batch has, evenly"),
        pytest.param(8, [1, 1, 1, 1, 1, 1, 0, 0], id="one for as many as possible"),
    ],
)
def test_drafts_are_dealt_evenly(streams: int, drafts: list[int]) -> None:
    """A later draft of a stream is right less often than the first one of another stream."""
    batches, _ = scheduler(max_batch_tokens=14, max_running=8)
    submit(batches, *(sequence(1, first=100 * number) for number in range(streams)))
    step(batches)

    batch = batches.next_batch(lambda one, most: [0] * min(2, most))

    assert [chunk.drafts for _, chunk in batch] == drafts


def test_a_step_with_drafts_has_no_more_rows_than_are_read_at_once() -> None:
    """Beyond `MOST_ROWS` a row costs time, so that many decode steps leave nothing to drafts."""
    batches, _ = scheduler(max_batch_tokens=1000, max_running=200, pages=400)
    submit(batches, *(sequence(1, first=1000 * number) for number in range(100)))
    step(batches)

    some = batches.next_batch(lambda one, most: [0] * most)
    batches.abandon(some)
    submit(batches, *(sequence(1, first=1000 * number) for number in range(100, 140)))
    step(batches)
    none = batches.next_batch(lambda one, most: [0] * most)

    assert sum(len(chunk.token_ids) for _, chunk in some) == MOST_ROWS
    assert sum(len(chunk.token_ids) for _, chunk in none) == 140


def test_a_common_prefix_is_computed_once() -> None:
    """The second sequence takes the full pages of the first and computes only what differs."""
    batches, pages = scheduler()
    first, second = sequence(10), sequence(10)
    second.token_ids[9] = 99
    submit(batches, first)
    step(batches)

    submit(batches, second)

    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert second.computed_tokens == 2 * P
    assert [pages.references[page] for page in first.pages] == [2, 2, 1]


def test_the_last_position_is_computed_even_when_all_is_cached() -> None:
    """Its logits are needed, and logits are not cached."""
    batches, _ = scheduler()
    first, second = sequence(8), sequence(8)
    submit(batches, first)
    step(batches)

    submit(batches, second)

    assert second.computed_tokens == P
    assert (second, P, P, 1) in shape(step(batches))


def test_equal_pages_computed_side_by_side_become_one() -> None:
    """Two copies would waste a page, and a lease on the second would protect one that cannot be
    found.
    """
    batches, pages = scheduler()
    first, second = sequence(8), sequence(8)
    submit(batches, first, second)
    free_before = pages.free_pages

    step(batches)

    assert first.pages == second.pages
    assert pages.free_pages == free_before + 2


def test_a_finished_hand_off_is_retained_with_its_partial_page() -> None:
    """The lease is named by the stream and holds everything that was computed."""
    batches, pages = scheduler(pages=4)
    one = sequence(10, prefill_only=True)
    submit(batches, one)
    step(batches)
    run = list(one.pages)

    batches.finish(one, retain_until_s=5.0)

    assert [pages.retained_page(S, index) for index in range(4)] == [*run, None]
    assert pages.retained_tokens(S) == 10
    assert pages.free_pages == 4
    pages.check()


def test_admission_is_first_come_first_served() -> None:
    """A small sequence does not overtake a big one that does not fit yet."""
    batches, _ = scheduler(pages=4)
    big, bigger, small = sequence(8), sequence(14, first=100), sequence(1, first=200)
    submit(batches, big, bigger, small)

    assert (batches.running, batches.waiting) == (1, 2)

    batches.finish(big)
    batches.admit()

    assert bigger.phase is SequencePhase.RUNNING
    assert small.phase is SequencePhase.WAITING


def test_a_newcomer_leaves_a_page_for_each_that_produces() -> None:
    """Else it would be preempted, or be in the way, as soon as one of them has filled a page."""
    batches, _ = scheduler(pages=4)
    producing, latest = sequence(8), sequence(8, first=100)

    submit(batches, producing, latest)

    assert (batches.running, batches.waiting) == (1, 1)
    batches.finish(producing)
    batches.admit()
    assert latest.phase is SequencePhase.RUNNING


def test_the_head_of_the_queue_is_tried_again_when_someone_leaves() -> None:
    """Also when no page comes free by it, because a peer is still being sent those of the one that
    left.
    """
    batches, pages = scheduler(pages=4)
    leaving, head = sequence(4), sequence(12, first=100)
    submit(batches, leaving)
    step(batches)
    pages.match(leaving.tags)
    submit(batches, head)
    assert batches.waiting == 1

    batches.finish(leaving)
    batches.admit()

    assert head.phase is SequencePhase.RUNNING


def test_what_can_never_fit_is_refusable() -> None:
    """The last token produced needs no KV; everything else does."""
    batches, _ = scheduler(pages=4)

    assert batches.fits(16, 0)
    assert batches.fits(16, 1)
    assert not batches.fits(16, 2)
    assert not batches.fits(17, 0)
    with pytest.raises(AssertionError, match="refuse"):
        batches.add(sequence(17))


def crowded() -> tuple[BatchScheduler, PageManager, Sequence, Sequence]:
    """Two streams own all six pages, and the next decode step of the older one needs a seventh."""
    batches, pages = scheduler(pages=6)
    older, younger = sequence(7), sequence(7, first=100, stream=StreamId("younger"))
    submit(batches, older, younger)
    for _ in range(6):
        step(batches)
    assert pages.free_pages == 0
    assert older.computed_tokens == younger.computed_tokens == 12
    return batches, pages, older, younger


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    """Only what was evicted meanwhile is computed a second time, produced tokens included."""
    batches, _, older, younger = crowded()
    step(batches)
    batches.finish(older)

    batches.admit()

    assert younger.computed_tokens == 8  # Its third page was the one that the older needed.
    assert shape(step(batches)) == [(younger, 8, 5, 1)]
    assert younger.token_ids == [*range(100, 107), *[7] * 7]


def test_a_preempted_sequence_does_not_pull_again() -> None:
    """The peer may have let go of its pages since; what is not cached here is computed."""
    batches, pages = scheduler(pages=5)
    older, puller = sequence(4), sequence(12, first=100, pull_pages=2)
    submit(batches, older)
    submit(batches, puller)
    for _ in range(5):
        step(batches)
    batches.pulled(puller, range(2))
    step(batches)
    batches.finish(older)
    pages.reset_cache()

    pulls = batches.admit()

    assert pulls == []
    assert shape(step(batches)) == [(puller, 0, 12, 1)]


def test_no_request_is_admitted_while_another_has_no_page_to_go_on() -> None:
    """Else a latest that pulls could take each page that comes free, and keep it."""
    batches, pages = scheduler(pages=5)
    cached, streaming, latest = (
        sequence(8, first=100, prefill_only=True),
        sequence(9),
        sequence(1, first=200),
    )
    submit(batches, cached)
    step(batches)
    batches.finish(cached)
    being_sent = pages.match(cached.tags)
    submit(batches, streaming)
    for _ in range(4):
        step(batches)
    assert pages.free_pages == 0
    assert batches.next_batch() == []

    pages.release(being_sent)
    submit(batches, latest)

    assert latest.phase is SequencePhase.WAITING
    assert batches.full, (
        "the latest waits, though `max_running` is not reached and it fits into the free pages"
    )
    assert shape(step(batches)) == [(streaming, 12, 1, 1)]


def test_queued_tokens_are_those_not_computed_yet() -> None:
    """Tokens that the cache gave or a batch computed are not queued; a produced token is, until its
    own step.
    """
    batches, _ = scheduler(max_batch_tokens=6)
    one = sequence(10)
    batches.add(one)
    counts = [batches.queued_tokens]
    batches.admit()

    for _ in range(3):
        step(batches)
        counts.append(batches.queued_tokens)

    assert counts == [10, 4, 1, 1]


@pytest.mark.parametrize(
    ("prompts", "tokens", "max_batch_tokens"),
    [(1, 512, 256), (4, 512, 256), (64, 512, 2048), (32, 1792, 256)],
)
def test_what_is_queued_takes_as_long_as_was_said(
    prompts: int, tokens: int, max_batch_tokens: int
) -> None:
    """Many short prompts are no long one: attention is quadratic in each of them, not in their
    sum.
    """
    pace = Pace("opt-13b-a100-distserve-tp1")
    batches, _ = scheduler(
        pages=prompts * tokens // P, max_batch_tokens=max_batch_tokens, max_running=prompts
    )
    submit(
        batches,
        *(sequence(tokens, first=index * 10_000, prefill_only=True) for index in range(prompts)),
    )

    said_s, real_s = batches.queued_s(pace.prefill), 0.0
    while batch := batches.next_batch():
        real_s += pace.batch_s([chunk for _, chunk in batch])
        for done in batches.complete(batch, {}):
            batches.finish(done)

    assert said_s == pytest.approx(real_s)
    assert batches.queued_s(pace.prefill) == 0.0


def test_streams_that_run_delay_others_by_at_most_a_step() -> None:
    """Each of them computes one more token, all in one batch."""
    pace = Pace("opt-13b-a100-distserve-tp1")
    batches, _ = scheduler(pages=256, max_running=64)
    submit(batches, *(sequence(4, first=index * 100) for index in range(32)))
    while batches.queued_tokens > 32:
        step(batches)

    assert 0.0 < batches.queued_s(pace.prefill) < 2 * pace.prefill.step_overhead_s


def test_a_batch_that_is_not_in_flight_is_our_bug() -> None:
    """Each is completed once."""
    batches, _ = scheduler()
    submit(batches, sequence(5))
    batch = batches.next_batch()

    batches.complete(batch, {batch[0][0]: [7]})
    with pytest.raises(AssertionError, match="in flight"):
        batches.complete(batch, {})


def test_a_sequence_in_flight_is_not_preempted() -> None:
    """Its pages may still be written: they would not come free for the one before it."""
    batches, pages = scheduler(pages=5, max_batch_tokens=100)
    older, younger = sequence(2 * P - 1), sequence(2 * P - 1, first=100)
    submit(batches, older)
    first = batches.next_batch()
    submit(batches, younger)
    second = batches.next_batch()
    batches.complete(first, {older: [7]})
    for position in range(2 * P - 1, 3 * P):
        assert shape(step(batches)) == [(older, position, 1, 1)]
    assert pages.free_pages == 0

    assert batches.next_batch() == []
    assert batches.waiting == 0
    batches.complete(second, {younger: [7]})

    assert shape(step(batches)) == [(older, 3 * P, 1, 1)]
    assert batches.waiting == 1


def test_a_sequence_has_the_base_of_what_is_found_of_it() -> None:
    """Its other pages are of that base too; without a prefix it keeps the one it was given."""
    batches, pages = scheduler(max_batch_tokens=100)
    first, same, other = sequence(3 * P), sequence(3 * P + 1), sequence(3 * P, first=100)
    first.base, same.base, other.base = 1, 2, 2
    submit(batches, first)
    step(batches)
    submit(batches, same, other)

    batch = step(batches)

    assert {chunk.base for one, chunk in batch if one in (first, same)} == {1}
    assert {chunk.base for one, chunk in batch if one is other} == {2}
    assert [{pages.bases[page] for page in one.pages} for one in (first, same, other)] == [
        {1},
        {1},
        {2},
    ]


def test_prefill_is_shared_out_as_the_ranks_want_it() -> None:
    """Sequences of other bases come into a batch that the first in line could fill alone; those of
    which none is taken are not in it.
    """
    manager = PageManager(64, P)
    settings = BatchSettings(page_size_tokens=P, pages=64, max_batch_tokens=8, max_running=8)
    cost = PrefillCost(step_ps=1, dense_ps=1, base_ps=100, per_position_ps=0)
    batches = BatchScheduler(settings, manager, partial(shared_out, cost=cost))
    first, same, other = (sequence(20, first=100 * at) for at in range(3))
    first.base, same.base, other.base = 1, 1, 2
    submit(batches, first, same, other)

    batch = step(batches)

    assert shape(batch) == [(first, 0, 4, 0), (other, 0, 4, 0)]
