"""Checks of a simulated instance's pages before a batch, and notes of contents after it."""

from collections.abc import Mapping

from kvrs_engine.scheduling.sequences import Chunk, Sequence
from kvrs_lab.sim.calls import Batch
from kvrs_lab.sim.computing import ComputingInstance
from kvrs_lab.sim.process import require

Drafted = list[tuple[Sequence, Chunk, list[int]]]


def note_computed(engine: ComputingInstance, batch: Batch) -> Drafted:
    """Note the pages that known tokens have filled. Return the chunks with drafts: drafts may be
    wrong, and the pages may have no tags yet.
    """
    size = engine.pages.page_size_tokens
    contents = engine.contents
    for sequence, chunk in batch:
        first, drafts = chunk.first_position, chunk.drafts
        end = first + len(chunk.token_ids) - drafts
        if first // size == end // size and first % size and not drafts:
            continue  # The page was begun earlier and is not full.
        for index in range(first // size, end // size):
            engine.received(chunk.pages[index], sequence.tags[index])
        for page in chunk.pages[end // size :]:
            contents[page] = None
    return [(sequence, chunk, list(chunk.pages)) for sequence, chunk in batch if chunk.drafts]


def note_verified(
    engine: ComputingInstance, drafted: Drafted, sampled: Mapping[Sequence, list[int]]
) -> None:
    size = engine.pages.page_size_tokens
    for sequence, chunk, pages in drafted:
        for index in range(chunk.first_position // size, sequence.computed_tokens // size):
            engine.received(pages[index], sequence.tags[index])
        assert engine.drafts is not None
        engine.drafts.counts.verified(chunk.drafts, len(sampled[sequence]) - 1)


def verify(engine: ComputingInstance, batch: Batch) -> None:
    """Check that the pages of new chunks hold the KV of their history."""
    for sequence, chunk in batch:
        if sequence not in engine.unverified:
            continue
        engine.unverified.discard(sequence)
        what = f"{engine.id} computes {sequence.stream}"
        for index in range(chunk.first_position // engine.pages.page_size_tokens):
            right = engine.contents[chunk.pages[index]] == sequence.tags[index]
            require(right, f"{what} with a wrong page {index}")
            gone = engine.ranks is not None and engine.ranks.gone(chunk.pages[index])
            require(not gone, f"{what} with cells that are gone")
