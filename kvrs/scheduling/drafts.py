"""Drafts behind decode steps: tokens that a source proposes and the step's logits verify.

They get what is left of a batch's tokens behind decode steps, of which prefill has half if there is
any, and of pages what no other use wants: the rest of a sequence's last page, and one more page
while more are spare than sequences are admitted, for as long as the batch is in flight.
"""

import collections.abc
from collections.abc import Callable, Iterable

from kvrs.scheduling.pages import PageManager
from kvrs.scheduling.sequences import Chunk, Sequence, next_chunk, pages_for

# Tokens that may follow the sequence's last one; at most so many.
Proposals = Callable[[Sequence, int], collections.abc.Sequence[int]]


def with_drafts(
    decodes: Iterable[tuple[Sequence, Chunk]],
    pages: PageManager,
    admitted: int,
    budget: int,
    proposals: Proposals,
) -> list[tuple[Sequence, Chunk]]:
    """The same decode steps, the first in line with drafts: at most `budget` tokens of them."""
    size = pages.page_size_tokens
    batch = []
    for sequence, chunk in decodes:
        own = len(sequence.pages) * size - len(sequence.token_ids)
        most = min(budget, own + size)
        drafts = proposals(sequence, most) if most > 0 else ()
        assert len(drafts) <= most, "more drafts than were asked for"
        if len(drafts) > own:
            page = pages.allocate(1, sequence.base, spare_left=admitted)
            sequence.pages += page or ()
            drafts = drafts if page else drafts[:own]
        if drafts:
            chunk = next_chunk(sequence, 1, size, drafts)
            budget -= len(drafts)
        batch.append((sequence, chunk))
    return batch


def take_back(sequence: Sequence, pages: PageManager) -> None:
    """Release the page that drafts had beyond what the sequence needs."""
    needed = pages_for(len(sequence.token_ids), pages.page_size_tokens)
    if len(sequence.pages) > needed:
        pages.release(sequence.pages[needed:])
        del sequence.pages[needed:]
