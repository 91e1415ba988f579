"""Tokens made likelier, less likely or impossible: `logit_bias`, `allowed_token_ids`, `bad_words`.

They depend on the parameters and the last output tokens alone, so an attempt that continues a
stream elsewhere needs no more than its history.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor


class Biases:
    """The biases of one stream, in vLLM's order: what is forbidden, then what is biased."""

    def __init__(
        self,
        vocab_size: int,
        *,
        logit_bias: Mapping[int, float],
        allowed_ids: Sequence[int] | None,
        bad_words: Iterable[Sequence[int]],
    ) -> None:
        self._biased = torch.tensor(list(logit_bias), dtype=torch.long)
        self._bias = torch.tensor(list(logit_bias.values()), dtype=torch.float32)
        self._forbidden: Tensor | None = None
        if allowed_ids is not None:
            self._forbidden = torch.ones(vocab_size, dtype=torch.bool)
            self._forbidden[list(allowed_ids)] = False
        self._words = [(tuple(word[:-1]), word[-1]) for word in bad_words if word]
        # How many of the last output tokens `apply` needs.
        self.reach = max((len(beginning) for beginning, _ in self._words), default=0)

    def apply(self, row: Tensor, last_ids: Sequence[int]) -> Tensor:
        """Logits `[vocab]` with the biases in them; the given ones stay as they are."""
        row = row.clone()
        if self._forbidden is not None:
            row[self._forbidden] = -torch.inf
        if self._words:
            row = self._without_words(row, tuple(last_ids))
        row[self._biased] += self._bias
        return row

    def _without_words(self, row: Tensor, last_ids: tuple[int, ...]) -> Tensor:
        """Forbid each word's last token after its beginning; without effect where no token would be
        left.
        """
        ends = [
            end
            for beginning, end in self._words
            if last_ids[len(last_ids) - len(beginning) :] == beginning
        ]
        return without(ends, row)


def without(token_ids: Iterable[int], row: Tensor) -> Tensor:
    """Logits `[vocab]` with those tokens impossible; as they are where no token would be left."""
    rest = row.clone()
    rest[list(token_ids)] = -torch.inf
    return rest if bool(torch.isfinite(rest).any()) else row


def tokenised_words(words: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The ids of each word at the beginning of a text and after a space."""
    written = (form for word in words for form in (word.lstrip(), f" {word.lstrip()}"))
    ids = (tuple(tokenizer.encode(form, add_special_tokens=False).ids) for form in written)
    return [list(each) for each in dict.fromkeys(ids) if each]
