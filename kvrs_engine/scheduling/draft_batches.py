"""The composition of a draft model's batches over streams of another instance."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrs.config.cluster import BatchSettings
from kvrs.protocol.instance import Burst, DraftChoice, MirrorUpdate
from kvrs_engine.scheduling.alignment import DraftMirror
from kvrs_engine.scheduling.sequences import Chunk, pages_for


@dataclass(slots=True, eq=False)
class MirroredStream:
    number: int
    mirror: DraftMirror
    choice: DraftChoice
    pages: list[int] = field(default_factory=list)


DraftBatch = list[tuple[MirroredStream, Chunk]]


class DraftBatches:
    """Composes batches over the mirrored streams, which the other instance numbers."""

    def __init__(self, settings: BatchSettings, depth: int, max_positions: int) -> None:
        """`depth` is the number of drafts of a stream that the other instance verifies per step."""
        self._settings, self._max_positions = settings, max_positions
        # The other instance's current step may choose `depth + 1` tokens, and its next step needs
        # `depth` drafts after them.
        self._lead = 2 * depth + 1
        self._streams: dict[int, MirroredStream] = {}
        self._free = list(range(settings.pages))
        self._is_stuck = False  # No stream can be computed before the next update.

    @property
    def has_work(self) -> bool:
        """False if `next` would be empty until the next update."""
        return not self._is_stuck and any(
            len(each.mirror.drafted) < self._lead for each in self._streams.values()
        )

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def update(self, updates: Sequence[MirrorUpdate]) -> None:
        self._is_stuck = False
        for update in updates:
            stream = self._streams.get(update.number)
            if update.choice is not None:
                self._drop(update.number)
                if update.token_ids:
                    mirror = DraftMirror(update.token_ids)
                    begun = MirroredStream(update.number, mirror, update.choice)
                    self._streams[update.number] = begun
            elif stream is not None and update.token_ids:
                stream.mirror.progress(update.token_ids)
            else:
                self._drop(update.number)

    def next(self) -> DraftBatch:
        """Return chunks of the streams that need drafts; chunks that reach the end of their stream
        want logits. Empty: there is nothing to draft.
        """
        batch: DraftBatch = []
        left = self._settings.max_batch_tokens
        for stream in self._streams.values():
            mirror = stream.mirror
            if not left or len(mirror.drafted) >= self._lead:
                continue
            first, ids = mirror.uncomputed(left)
            end = first + len(ids)
            if end >= self._max_positions:
                continue
            if not self._has_pages(stream.pages, end):
                continue
            wants = end == mirror.tokens
            batch.append((stream, Chunk(ids, first, stream.pages, logits=int(wants))))
            left -= len(ids)
        self._is_stuck = not batch
        return batch

    def advanced(self, batch: DraftBatch, choices: Sequence[int]) -> list[Burst]:
        """Apply a computed batch, whose streams have not changed since, and return the new drafts.

        `choices` has a token for each chunk that wanted logits. The result is empty while only
        histories are computed.
        """
        chosen, bursts = iter(choices), []
        for stream, chunk in batch:
            draft = next(chosen) if chunk.logits else None
            stream.mirror.advanced(chunk.first_position, len(chunk.token_ids), draft)
            if draft is not None:
                bursts.append(Burst(stream.number, *stream.mirror.burst()))
        return bursts

    def _has_pages(self, pages: list[int], tokens: int) -> bool:
        """Allocate pages for `tokens`; False: too few are free until other streams end."""
        missing = pages_for(tokens, self._settings.page_size_tokens) - len(pages)
        if missing > len(self._free):
            return False
        pages += [self._free.pop() for _ in range(missing)]
        return True

    def _drop(self, number: int) -> None:
        if (stream := self._streams.pop(number, None)) is not None:
            self._free += stream.pages
