"""Drafts after decode steps: tokens that a source proposes and the step's logits verify.

Drafts get the tokens of a batch that decode steps and prompts leave. If that is less than one per
stream, each stream still gets one draft, up to half of the tokens that decode steps leave: a first
draft that is right saves the same cost in a later batch, while later drafts are right less often
and delay the waiting prompts.

Drafts use the rest of a sequence's last page, and one more page while the batch is in flight if
more pages are spare than sequences are admitted.
"""

import collections.abc
from collections.abc import Callable

from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.sequences import Chunk, Sequence, next_chunk, pages_for

# Returns tokens that may follow the sequence's last token, at most the given number.
Proposals = Callable[[Sequence, int], collections.abc.Sequence[int]]


def with_drafts(
    decodes: collections.abc.Sequence[tuple[Sequence, Chunk]],
    pages: PageManager,
    admitted: int,
    budget: int,
    prompt_tokens: int,
    proposals: Proposals,
) -> list[tuple[Sequence, Chunk]]:
    """Return the decode steps with drafts, the first in line first. Prompts need `prompt_tokens` of
    the budget.
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
    """Release the additional page of the sequence's drafts."""
    needed = pages_for(len(sequence.token_ids), pages.page_size_tokens)
    if len(sequence.pages) > needed:
        pages.release(sequence.pages[needed:])
        del sequence.pages[needed:]
