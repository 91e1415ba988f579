"""Predicted lengths of text prompts in tokens, learned from tokenised prompts.

The size of a request in bytes gives a first guess. The number of tokens per byte depends on the
tokenizer and on the text: prose, code, or a script with several bytes a character.
"""

from collections import OrderedDict
from dataclasses import dataclass

_KEPT = 31 / 32  # Decay of the weight of earlier prompts with each new prompt.
_MOST = 8.0  # The factor is in [1 / _MOST, _MOST].
_NAMES_MAX = 256


@dataclass(slots=True)
class _Sums:
    tokens: float = 0.0
    guessed: float = 0.0


class PromptLengths:
    """Learns the ratio of real to guessed tokens of each model or adapter, weighted by length."""

    def __init__(self) -> None:
        self._sums: OrderedDict[str, _Sums] = OrderedDict()

    def expected(self, name: str, guessed_tokens: int) -> int:
        """Return `guessed_tokens` corrected by the ratio learned for this model or adapter, at
        least 1.
        """
        sums = self._sums.get(name)
        factor = 1.0 if sums is None else sums.tokens / sums.guessed
        return max(1, round(guessed_tokens * min(_MOST, max(1 / _MOST, factor))))

    def observe(self, name: str, guessed_tokens: int, tokens: int) -> None:
        """Note the real length of a prompt; `tokens` is 0 if the engine sent no token ids."""
        if guessed_tokens <= 0 or tokens <= 0:
            return
        sums = self._sums.setdefault(name, _Sums())
        self._sums.move_to_end(name)
        sums.tokens = sums.tokens * _KEPT + tokens
        sums.guessed = sums.guessed * _KEPT + guessed_tokens
        if len(self._sums) > _NAMES_MAX:
            self._sums.popitem(last=False)
