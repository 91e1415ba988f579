"""Short words for the stories about the batch scheduler."""

from kvrs.config.cluster import BatchSettings
from kvrs.ids import StreamId
from kvrs.protocol.pages import root_tag
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.scheduler import BatchScheduler
from kvrs_engine.scheduling.sequences import Chunk, Pull, Sequence

P = 4  # Tokens per page.
ROOT = root_tag("model")
S = StreamId("s")
Batch = list[tuple[Sequence, Chunk]]


def sequence(
    tokens: int,
    *,
    first: int = 0,
    prefill_only: bool = False,
    pull_pages: int = 0,
    pulls: tuple[range, ...] = (),
    pull_tail: bool = False,
    stream: StreamId = S,
    attempt: int = 1,
) -> Sequence:
    """With the history `first`, `first + 1`, ...: equal beginnings for equal `first`. `pull_pages`
    are the leading ones.
    """
    history = list(range(first, first + tokens))
    return Sequence(
        stream,
        (0, attempt),
        history,
        tokens,
        ROOT,
        prefill_only,
        pulls or leading(pull_pages),
        pull_tail,
    )


def leading(pages: int) -> tuple[range, ...]:
    return (range(pages),) if pages else ()


def scheduler(
    pages: int = 64, max_batch_tokens: int = 64, max_running: int = 8
) -> tuple[BatchScheduler, PageManager]:
    manager = PageManager(pages, P)
    batch_settings = BatchSettings(
        page_size_tokens=P, pages=pages, max_batch_tokens=max_batch_tokens, max_running=max_running
    )
    return BatchScheduler(batch_settings, manager), manager


def submit(batches: BatchScheduler, *sequences: Sequence) -> list[Pull]:
    for one in sequences:
        batches.add(one)
    return batches.admit()


def step(batches: BatchScheduler) -> Batch:
    """One batch from decision to completion; everyone samples token 7."""
    batch = batches.next_batch()
    if batch:
        batches.complete(batch, {one: [7] for one, chunk in batch if chunk.logits})
    batches.check()
    return batch


def shape(batch: Batch) -> list[tuple[Sequence, int, int, int]]:
    return [(one, chunk.first_position, len(chunk.token_ids), chunk.logits) for one, chunk in batch]
