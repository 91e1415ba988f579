"""Drafts for streams of another instance, by a small model: one batch a step, over all streams that
have room ahead of what was verified.
"""

import time
from collections.abc import Sequence

from torch import Tensor

from kvrs.config.engine import EngineSettings
from kvrs.engine.sampler import SamplingParams, sample
from kvrs.engine.speculation.alignment import DraftMirror
from kvrs.engine.worker import Worker
from kvrs.protocol.speculation import Burst, DraftChoice, MirrorUpdate
from kvrs.scheduling.pace import Pace
from kvrs.scheduling.sequences import Chunk, pages_for


class _Drafted:
    def __init__(self, update: MirrorUpdate, choice: DraftChoice) -> None:
        self.mirror = DraftMirror(update.token_ids)
        self.params = SamplingParams(
            temperature=choice.temperature,
            top_p=choice.top_p,
            top_k=choice.top_k,
            min_p=choice.min_p,
            seed=choice.seed,
        )
        self.pages: list[int] = []


class Drafting:
    """All methods are called by one thread at a time."""

    def __init__(
        self, worker: Worker, settings: EngineSettings, depth: int, pace: Pace | None = None
    ) -> None:
        self._worker, self._settings, self._depth, self._pace = worker, settings, depth, pace
        self._streams: dict[int, _Drafted] = {}
        self._free = list(range(settings.pages))
        self._is_stuck = False  # No stream that has room for drafts can be computed.

    def update(self, updates: Sequence[MirrorUpdate]) -> None:
        self._is_stuck = False
        for update in updates:
            stream = self._streams.get(update.number)
            if update.choice is not None:
                self._drop(update.number)
                if update.token_ids:
                    self._streams[update.number] = _Drafted(update, update.choice)
            elif stream is not None and update.token_ids:
                stream.mirror.progress(update.token_ids)
            else:
                self._drop(update.number)

    def step(self) -> list[Burst]:
        """Compute one batch; returns new drafts. Empty: there is nothing to draft, or histories are
        still being computed.
        """
        batch: list[tuple[int, _Drafted, int, int]] = []
        chunks: list[Chunk] = []
        left = self._settings.max_batch_tokens
        for number, stream in self._streams.items():
            mirror = stream.mirror
            if not left or len(mirror.drafted) >= self._depth:
                continue
            first, ids = mirror.uncomputed(left)
            end = first + len(ids)
            if end >= self._worker.max_positions or not self._has_pages(stream, end):
                continue
            wants = end == mirror.tokens
            chunks.append(Chunk(ids, first, stream.pages, logits=int(wants)))
            batch.append((number, stream, first, len(ids)))
            left -= len(ids)
        if not chunks:
            self._is_stuck = True
            return []
        logits, bursts = iter(self._execute(chunks)), []
        for chunk, (number, stream, first, count) in zip(chunks, batch, strict=True):
            mirror, draft = stream.mirror, None
            if chunk.logits:
                draft = sample(next(logits), stream.params, mirror.tokens)
            mirror.advanced(first, count, draft)
            if draft is not None:
                bursts.append(Burst(number, *mirror.burst()))
        return bursts

    @property
    def has_work(self) -> bool:
        """False: a step would do nothing before the next update."""
        return not self._is_stuck and any(
            len(each.mirror.drafted) < self._depth for each in self._streams.values()
        )

    def _execute(self, chunks: Sequence[Chunk]) -> Tensor:
        began_s = time.monotonic()
        logits = self._worker.execute(chunks)
        if self._pace is not None:
            time.sleep(max(0.0, began_s + self._pace.batch_s(chunks) - time.monotonic()))
        return logits

    def _has_pages(self, stream: _Drafted, tokens: int) -> bool:
        """Streams that find no page get no drafts until others end."""
        missing = pages_for(tokens, self._settings.page_size_tokens) - len(stream.pages)
        if missing > len(self._free):
            return False
        stream.pages += [self._free.pop() for _ in range(missing)]
        return True

    def _drop(self, number: int) -> None:
        if (stream := self._streams.pop(number, None)) is not None:
            self._free += stream.pages
