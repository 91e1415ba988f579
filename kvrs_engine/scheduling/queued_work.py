"""The predicted time of an engine's queued work, without the tokens in its prefix cache."""

from bisect import bisect_left
from collections.abc import Iterable

from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.pages import Tag
from kvrs.sums import sum_in_order
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.sequences import Sequence, coverable_pages


def queued_s(
    sequences: Iterable[Sequence], pages: PageManager, prefill: PrefillTable, step_tokens: int
) -> float:
    """Return the time to compute the rest of unfinished sequences, given in order of computation.

    The time is the sum of `prefill(new given computed)` over the sequences, each without the
    overhead of a step, plus one overhead for each of the shared steps of `step_tokens`. A sequence
    that has computed nothing will find its pages in the cache or among the pages of the sequences
    before it. Takes O(pages of such sequences) time.
    """
    ahead: set[Tag] = set()
    works: list[tuple[int, int]] = []
    for sequence in sequences:
        tokens, work = len(sequence.token_ids), sequence.work_tokens
        if sequence.has_only_found:
            work = min(work, tokens - _findable_tokens(sequence, pages, ahead))
            ahead.update(sequence.tags)
        if work:
            works.append((tokens, work))
    steps = -(-sum(work for _, work in works) // step_tokens)
    computing_s = sum_in_order(
        prefill.extra(tokens - work, work) - prefill.step_overhead_s for tokens, work in works
    )
    return steps * prefill.step_overhead_s + computing_s


def _findable_tokens(sequence: Sequence, pages: PageManager, ahead: set[Tag]) -> int:
    """Return the number of leading tokens that a sequence will find cached, by bisection: a page is
    cached only with all pages before it.
    """
    size, tags = pages.page_size_tokens, sequence.tags
    found = bisect_left(
        range(coverable_pages(sequence, size)),
        True,
        key=lambda index: tags[index] not in ahead and not pages.holds(tags[index]),
    )
    return found * size
