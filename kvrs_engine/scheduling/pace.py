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
        """Return the time of one step, which is one pass over the weights for all its rows. A draft
        counts as one more decode step without a context.

        With overhead h, decode table D(rows, context tokens) and p rows of prompts, all pieces of
        prefill take h + sum(prefill(new given computed) - h) and n decode steps with context c take
        D(n, c). Decode steps beside prefill add only D(p + n, c) - D(p, 0): the rows that they add
        to the pass, at the price that the table has for so many rows, and the KV that they read. A
        pass takes at least as long as decode steps of as many rows. The engine's own time per step
        is part of h, and is added to D in a step without prefill. `decode_batch` is the number of
        decode steps beside the chunks, and `context_tokens` their total context.
        """
        overhead_s, prefill_s = self.prefill.step_overhead_s, 0.0
        prompt_rows = prefix_tokens = 0
        for chunk in chunks:
            tokens = len(chunk.token_ids)
            if tokens - chunk.drafts > 1:
                prefill_s += self.prefill.extra(chunk.first_position, tokens) - overhead_s
                prompt_rows += tokens
                prefix_tokens += chunk.first_position
            else:
                decode_batch += tokens
                context_tokens += chunk.first_position + 1
        if not prompt_rows:
            return self._step_s + self._decode_s(decode_batch, context_tokens)
        prompts_s = overhead_s + prefill_s
        if not decode_batch:
            return prompts_s
        rows = prompt_rows + decode_batch
        added_s = self._decode_s(rows, context_tokens) - self._decode_s(prompt_rows, 0)
        least_s = self._step_s + self._decode_s(rows, context_tokens + prefix_tokens)
        # The two fits of a decode table meet with a small step down.
        return max(prompts_s + max(0.0, added_s), least_s)

    def _decode_s(self, rows: int, context_tokens: int) -> float:
        return self._decode.seconds_for(rows, context_tokens) if rows else 0.0
