"""Presence, frequency and repetition penalties, as vLLM and OpenAI define them.

They depend on which tokens stand before and after `prompt_tokens`, so a resumed stream counts as
the lost one did.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class Penalties:
    """The counts of one stream. Every operation is elementwise and on its own, so the results are
    the same bits everywhere.
    """

    def __init__(
        self,
        vocab_size: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        presence: float,
        frequency: float,
        repetition: float,
    ) -> None:
        self._presence = presence
        self._frequency = frequency
        self._repetition = repetition
        self._counts = torch.bincount(
            torch.tensor(output_ids, dtype=torch.long), minlength=vocab_size
        ).float()
        self._seen = self._counts > 0  # In prompt or output.
        self._seen[list(prompt_ids)] = True

    def count(self, token_id: int) -> None:
        """Note an output token."""
        self._counts[token_id] += 1
        self._seen[token_id] = True

    def apply(self, row: Tensor) -> Tensor:
        """Logits `[vocab]` with the penalties in them; the given ones stay as they are."""
        if self._repetition != 1:
            # Keskar et al. 2019 (CTRL), section 4.1, with the sign that makes it a penalty for
            # negative logits too.
            shrunk = torch.where(row > 0, row / self._repetition, row * self._repetition)
            row = torch.where(self._seen, shrunk, row)
        row = row - self._counts * self._frequency
        return row - (self._counts > 0) * self._presence
