"""Drafts behind decode steps: tokens that a source proposes and the step's logits verify.

They get what decode steps and prompts leave of a batch's tokens. Where that is less than one for
each stream, each has one all the same, of at most half of what decode steps leave: a draft that is
right saves a later batch the token that it costs this one, those behind the first are right less
often, and what they cost is missing to the prompts that wait.

Of pages they get what no other use wants: the rest of a sequence's last page, and one more page
while more are spare than sequences are admitted, for as long as the batch is in flight.
"""

import collections.abc
from collections.abc import Callable

from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.sequences import Chunk, Sequence, next_chunk, pages_for

# Tokens that may follow the sequence's last one; at most so many.
Proposals = Callable[[Sequence, int], collections.abc.Sequence[int]]


def with_drafts(
    decodes: collections.abc.Sequence[tuple[Sequence, Chunk]],
    pages: PageManager,
    admitted: int,
    budget: int,
    prompt_tokens: int,
    proposals: Proposals,
) -> list[tuple[Sequence, Chunk]]:
    """The same decode steps, the first in line with drafts. Prompts want `prompt_tokens` of the
    budget.
    """
    size = pages.page_size_tokens
    left = each = budget - prompt_tokens
    if prompt_tokens and left < len(decodes):
        left, each = max(left, budget // 2), 1
    batch = []
    for sequence, chunk in decodes:
        own = len(sequence.pages) * size - len(sequence.token_ids)
        most = min(left, each, own + size)
        drafts = proposals(sequence, most) if most > 0 else ()
        assert len(drafts) <= most, "more drafts than were asked for"
        if len(drafts) > own:
            page = pages.allocate(1, sequence.base, spare_left=admitted)
            sequence.pages += page or ()
            drafts = drafts if page else drafts[:own]
        if drafts:
            chunk = next_chunk(sequence, 1, size, drafts)
            left -= len(drafts)
        batch.append((sequence, chunk))
    return batch


def take_back(sequence: Sequence, pages: PageManager) -> None:
    """Release the page that drafts had beyond what the sequence needs."""
    needed = pages_for(len(sequence.token_ids), pages.page_size_tokens)
    if len(sequence.pages) > needed:
        pages.release(sequence.pages[needed:])
        del sequence.pages[needed:]
