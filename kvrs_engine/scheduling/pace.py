"""Batch times of another GPU, by a named profile (docs/research/profiles.md)."""

from collections.abc import Sequence

from kvrs.profiles.catalog import decode_table, engine_step_s, load_s, prefill_table
from kvrs_engine.scheduling.sequences import Chunk


class Pace:
    """Predicts the times of a batch and of a model load on the profiled GPU. Tokens and KV stay
    real; only the time is that of another machine.
    """

    def __init__(self, profile: str) -> None:
        self.prefill = prefill_table(profile)
        self.load_s = load_s(profile)
        self._decode = decode_table(profile)
        self._step_s = engine_step_s(profile)

    def batch_s(
        self, chunks: Sequence[Chunk], decode_batch: int = 0, context_tokens: int = 0
    ) -> float:
        """Return the time of one step: all its pieces of prefill as one batch, then all its decode
        steps as another. A draft counts as one more decode step without a context.

        With overhead h and decode table D(batch, context tokens) the time is
        h + sum(prefill(new given computed) - h) + D. The tables are fits of such batches, so h is
        paid once for all pieces of prefill. The engine's own time per step is part of h, and is
        added to D in a step without prefill. `decode_batch` is the number of decode steps beside
        the chunks, and `context_tokens` their total context.
        """
        prefill_s = 0.0
        for chunk in chunks:
            tokens = len(chunk.token_ids)
            if tokens - chunk.drafts > 1:
                prefill_s += (
                    self.prefill.extra(chunk.first_position, tokens) - self.prefill.step_overhead_s
                )
            else:
                decode_batch += tokens
                context_tokens += chunk.first_position + 1
        decode_s = self._decode.seconds_for(decode_batch, context_tokens) if decode_batch else 0.0
        return decode_s + (prefill_s + self.prefill.step_overhead_s if prefill_s else self._step_s)
