"""The computation of drafts for streams of another instance by a small model, one batch per
step.
"""

import time
from collections.abc import Sequence

from torch import Tensor

from kvrs.config.cluster import EngineSettings
from kvrs.protocol.instance import Burst, DraftChoice
from kvrs_engine.engine.sampler import SamplingParams, sample
from kvrs_engine.engine.worker import Worker
from kvrs_engine.scheduling.draft_batches import DraftBatches
from kvrs_engine.scheduling.pace import Pace
from kvrs_engine.scheduling.sequences import Chunk


class Drafting:
    """Computes the batches that `batches` composes. Updates of the streams go to `batches`
    directly; only one thread at a time may use both.
    """

    def __init__(
        self, worker: Worker, settings: EngineSettings, depth: int, pace: Pace | None = None
    ) -> None:
        self._worker, self._pace = worker, pace
        self.batches = DraftBatches(settings, depth, worker.max_positions)

    def step(self) -> list[Burst]:
        """Compute one batch and return the new drafts; none while only histories are computed."""
        batch = self.batches.next()
        if not batch:
            return []
        logits = iter(self._execute([chunk for _, chunk in batch]))
        choices = [
            sample(
                next(logits),
                _params(stream.choice),
                chunk.first_position + len(chunk.token_ids),
            )
            for stream, chunk in batch
            if chunk.logits
        ]
        return self.batches.advanced(batch, choices)

    def _execute(self, chunks: Sequence[Chunk]) -> Tensor:
        began_s = time.monotonic()
        logits = self._worker.execute(chunks)
        if self._pace is not None:
            time.sleep(max(0.0, began_s + self._pace.batch_s(chunks) - time.monotonic()))
        return logits


def _params(choice: DraftChoice) -> SamplingParams:
    return SamplingParams(
        temperature=choice.temperature,
        top_p=choice.top_p,
        top_k=choice.top_k,
        min_p=choice.min_p,
        seed=choice.seed,
    )
