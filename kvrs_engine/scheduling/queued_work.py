"""Predicted time of the work that an engine has queued, behind what its prefix cache holds."""

from bisect import bisect_left
from collections.abc import Iterable

from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.tags import Tag
from kvrs.sums import sum_in_order
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.sequences import Sequence, coverable_pages


def queued_s(
    sequences: Iterable[Sequence], pages: PageManager, prefill: PrefillTable, step_tokens: int
) -> float:
    """Seconds to compute what is left of unfinished sequences, which come in the order in which
    they are computed. O(pages of those that have computed nothing).

    The sum over sequences of `prefill(new given computed)`, each without the overhead of a step,
    plus one overhead for each of the steps of `step_tokens` that they share. A sequence that has
    computed nothing finds the pages in the cache, and those of the sequences before it.
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
    """How many leading tokens a sequence will find. A page stands for all before it, so that the
    first one that is missing is searched for by halves.
    """
    size, tags = pages.page_size_tokens, sequence.tags
    found = bisect_left(
        range(coverable_pages(sequence, size)),
        True,
        key=lambda index: tags[index] not in ahead and not pages.holds(tags[index]),
    )
    return found * size
