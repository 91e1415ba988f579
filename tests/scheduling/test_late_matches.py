"""Prompts that come together find what the first of them computes."""

import pytest

from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.scheduler import BatchScheduler
from kvrs_engine.scheduling.sequences import Sequence
from tests.scheduling.batch_steps import P, scheduler, sequence, shape, step, submit

PREFIX, OWN, BURST = 64 * P, 2 * P, 12


def burst() -> list[Sequence]:
    """Prompts with one document before the question of each."""
    prompts = [sequence(PREFIX + OWN, prefill_only=True) for _ in range(BURST)]
    for index, prompt in enumerate(prompts):
        prompt.token_ids[PREFIX:] = range(10_000 + index * OWN, 10_000 + (index + 1) * OWN)
    return prompts


def compute(batches: BatchScheduler) -> int:
    """How many tokens are computed until nothing is left."""
    computed = 0
    while batch := batches.next_batch():
        computed += sum(len(chunk.token_ids) for _, chunk in batch)
        for done in batches.complete(batch, {}):
            batches.finish(done)
        batches.check()
        batches.admit()
    return computed


def test_a_burst_computes_its_common_prefix_once() -> None:
    """All are admitted before the first is computed; each takes the pages that are there when its
    own first chunk is due, and gives back the new ones that it had for them.
    """
    batches, pages = scheduler(pages=1024, max_batch_tokens=PREFIX, max_running=BURST)
    prompts = burst()
    submit(batches, *prompts)
    assert batches.running == BURST

    computed = compute(batches)

    # The second prompt begins in the batch in which the first one ends its own part.
    assert computed == PREFIX + BURST * OWN
    assert [prompt.cached_tokens for prompt in prompts] == [0] + [PREFIX] * (BURST - 1)
    assert pages.free_pages == pages.pages


def test_a_prompt_that_has_computed_something_keeps_its_pages() -> None:
    """A recovery that passes it computes the same page; what it has begun it finishes itself."""
    batches, _ = scheduler(max_batch_tokens=4 * P)
    ahead, begun = sequence(4 * P - 2, first=1_000), sequence(4 * P)
    submit(batches, ahead, begun)
    step(batches)
    passes = sequence(4 * P, attempt=2)
    submit(batches, passes)

    computed = [shape(step(batches)) for _ in range(2)]

    assert (passes, 0, 4 * P - 1, 0) in computed[0]
    assert (begun, 2, 4 * P - 2, 1) in computed[1]


def test_a_late_match_ends_before_the_last_position() -> None:
    """The last position is computed for its logits, also where all of the prompt is found."""
    batches, _ = scheduler(pages=64, max_batch_tokens=4 * P)
    first, second = sequence(4 * P), sequence(4 * P)
    submit(batches, first, second)
    step(batches)

    batch = step(batches)

    assert (second, 3 * P, P, 1) in shape(batch)


@pytest.mark.parametrize("admitted", [1, BURST])
def test_a_queue_is_priced_behind_what_is_cached_and_ahead_of_it(admitted: int) -> None:
    """The predicted time of a burst is what it takes, whether its prompts wait for pages or not."""
    pace = Pace("opt-13b-a100-distserve-tp1")
    batches, _ = scheduler(pages=1024, max_batch_tokens=PREFIX, max_running=admitted)
    submit(batches, *burst())

    said_s = batches.queued_s(pace.prefill)
    alone_s = pace.prefill.seconds_for(PREFIX + OWN)
    compute(batches)
    submit(batches, *burst()[:2])
    cached_s = batches.queued_s(pace.prefill)

    extra_s = pace.prefill.extra(PREFIX, OWN) - pace.prefill.step_overhead_s
    steps_s = -(-(PREFIX + BURST * OWN) // PREFIX) * pace.prefill.step_overhead_s
    whole_s = alone_s - pace.prefill.step_overhead_s
    assert said_s == pytest.approx(steps_s + whole_s + (BURST - 1) * extra_s)
    # What is cached of the last page is computed again.
    rest_s = pace.prefill.extra(PREFIX + P, P) - pace.prefill.step_overhead_s
    assert cached_s == pytest.approx(pace.prefill.step_overhead_s + 2 * rest_s)
