"""The batches of a draft model over streams of another instance. Pure: it neither computes nor
chooses.

Beside the drafts of a stream stand alternatives, as far as the step that is verified now may end:
the runner-up of each draft and what follows it. They are computed in the same batches, in pages of
their own from the one on that holds their position, and take no page that a stream needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrs.config.engine import BatchSettings
from kvrs.protocol.speculation import MOST_DRAFTS, Burst, DraftChoice, MirrorUpdate
from kvrs_engine.scheduling.alignment import Alternative, DraftMirror
from kvrs_engine.scheduling.sequences import Chunk, pages_for


@dataclass(slots=True, eq=False)
class MirroredStream:
    number: int
    mirror: DraftMirror
    choice: DraftChoice
    pages: list[int] = field(default_factory=list)
    alternatives: list[Alternative] = field(default_factory=list)


DraftBatch = list[tuple[MirroredStream, Alternative | None, Chunk]]


class DraftBatches:
    """Streams by the numbers that the other instance has given them."""

    def __init__(self, settings: BatchSettings, depth: int, max_positions: int) -> None:
        """`depth`: drafts of a stream that the other instance verifies in a step."""
        self._settings, self._max_positions = settings, max_positions
        # The step that it computes now may choose `depth + 1` tokens, and the next one wants
        # `depth` drafts behind these.
        self._depth, self._lead = depth, 2 * depth + 1
        self._of_alternative = min(depth + 1, MOST_DRAFTS)  # Tokens, the runner-up with them.
        self._streams: dict[int, MirroredStream] = {}
        self._free = list(range(settings.pages))
        self._is_stuck = False  # No stream that has room for drafts can be computed.

    @property
    def has_work(self) -> bool:
        """False: `next` would be empty before the next update."""
        return not self._is_stuck and any(
            len(each.mirror.drafted) < self._lead or any(map(self._has_room, each.alternatives))
            for each in self._streams.values()
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
                self._progress(stream, update.token_ids)
            else:
                self._drop(update.number)

    def next(self) -> DraftBatch:
        """Chunks of all streams and alternatives that have room ahead of what was verified; those
        at the end of their stream want logits. Empty: there is nothing to draft.
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
                self._drop_alternatives()
                if not self._has_pages(stream.pages, end):
                    continue
            wants = end == mirror.tokens
            batch.append((stream, None, Chunk(ids, first, stream.pages, logits=int(wants))))
            left -= len(ids)
        batch += self._next_alternatives(left)
        self._is_stuck = not batch
        return batch

    def advanced(self, batch: DraftBatch, choices: Sequence[tuple[int, int | None]]) -> list[Burst]:
        """A batch was computed, of streams that have not changed since; `choices` has a token for
        each chunk that wanted logits, and its runner-up where that is known. Empty: histories are
        still being computed.
        """
        chosen, bursts = iter(choices), []
        for stream, alternative, chunk in batch:
            if alternative is not None:
                alternative.advanced(*next(chosen))
                ids = list(alternative.token_ids)
                bursts.append(Burst(stream.number, alternative.position, ids, is_alternative=True))
                continue
            draft, runner_up = next(chosen) if chunk.logits else (None, None)
            stream.mirror.advanced(chunk.first_position, len(chunk.token_ids), draft, runner_up)
            if draft is not None:
                bursts.append(Burst(stream.number, *stream.mirror.burst()))
                self._look_aside(stream)
        return bursts

    def _next_alternatives(self, left: int) -> DraftBatch:
        batch: DraftBatch = []
        size = self._settings.page_size_tokens
        for stream in self._streams.values():
            for one in filter(self._has_room, stream.alternatives):
                shared = one.position // size
                ids = stream.mirror.between(one.computed, one.position)
                ids += one.token_ids[max(0, one.computed - one.position) :]
                if len(ids) > left or one.tokens >= self._max_positions:
                    continue
                if not self._has_pages(one.pages, one.tokens - shared * size):
                    continue
                pages = [*stream.pages[:shared], *one.pages]
                batch.append((stream, one, Chunk(ids, one.computed, pages, logits=1)))
                left -= len(ids)
        return batch

    def _has_room(self, alternative: Alternative) -> bool:
        return len(alternative.token_ids) < self._of_alternative

    def _look_aside(self, stream: MirroredStream) -> None:
        """Begin the alternatives at positions where the step that is verified now may end."""
        size, begun = self._settings.page_size_tokens, {one.position for one in stream.alternatives}
        known = len(stream.mirror.chosen)
        for at, runner_up in enumerate(stream.mirror.runners_up[: self._depth + 1], known):
            if runner_up is not None and at not in begun:
                stream.alternatives.append(Alternative(at, [runner_up], at // size * size))

    def _progress(self, stream: MirroredStream, token_ids: Sequence[int]) -> None:
        mirror, others = stream.mirror, stream.alternatives
        taken = mirror.progress(token_ids, others)
        if taken is not None:
            shared = taken.position // self._settings.page_size_tokens
            stream.pages[shared:], taken.pages = taken.pages, stream.pages[shared:]
        # Of drafts that were right those behind the end are, and so is what is beside them.
        last = len(mirror.chosen) + (len(mirror.drafted) if taken is None else 0)
        stream.alternatives = []
        for one in others:
            if len(mirror.chosen) <= one.position < last:
                stream.alternatives.append(one)
            else:
                self._free += one.pages
        self._look_aside(stream)

    def _has_pages(self, pages: list[int], tokens: int) -> bool:
        """Streams that find no page get no drafts until others end."""
        missing = pages_for(tokens, self._settings.page_size_tokens) - len(pages)
        if missing > len(self._free):
            return False
        pages += [self._free.pop() for _ in range(missing)]
        return True

    def _drop_alternatives(self) -> None:
        for stream in self._streams.values():
            for one in stream.alternatives:
                self._free += one.pages
            stream.alternatives = []

    def _drop(self, number: int) -> None:
        if (stream := self._streams.pop(number, None)) is not None:
            self._free += stream.pages
            for one in stream.alternatives:
                self._free += one.pages
