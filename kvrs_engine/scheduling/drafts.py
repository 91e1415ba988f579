"""Drafts after decode steps: tokens that a source proposes and the step's logits verify.

Drafts use idle compute only: a step verifies drafts if no prompt wants its tokens, and up to
`MOST_ROWS` rows. In other steps the source still learns the tokens of each stream, so that its
drafts are up to date when the prompts are computed.

Drafts use the rest of a sequence's last page, and one more page while the batch is in flight if
more pages are spare than sequences are admitted.
"""

import collections.abc
from collections.abc import Callable

from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.sequences import Chunk, Sequence, next_chunk, pages_for

# Limit of the rows of a step with drafts. Up to about 150 rows an A100 reads 16-bit weights for
# longer than it multiplies (312 TFLOP/s over 2 TB/s), so more rows take hardly more time.
MOST_ROWS = 128
# Returns tokens that may follow the sequence's last token, at most the given number. A call with 0
# tells the source the sequence's tokens.
Proposals = Callable[[Sequence, int], collections.abc.Sequence[int]]


def with_drafts(
    decodes: collections.abc.Sequence[tuple[Sequence, Chunk]],
    pages: PageManager,
    admitted: int,
    budget: int,
    proposals: Proposals,
) -> list[tuple[Sequence, Chunk]]:
    """Return the decode steps with drafts of at most `budget` tokens, as even as the proposals
    allow: a later draft of a stream is right less often than its first one.
    """
    size = pages.page_size_tokens
    left = min(budget, max(0, MOST_ROWS - len(decodes)))
    batch = []
    for streams, (sequence, chunk) in zip(range(len(decodes), 0, -1), decodes, strict=True):
        own = len(sequence.pages) * size - len(sequence.token_ids)
        most = min(-(-left // streams), own + size)
        drafts = proposals(sequence, most)
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
