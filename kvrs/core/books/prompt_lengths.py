"""Lengths of text prompts in tokens, learned from the prompts that prefill has tokenised.

The bytes of a request give a first guess. How many tokens a byte has depends on the tokenizer, and
on what the clients of a model send: prose, code, or a script with several bytes a character.
"""

from collections import OrderedDict
from dataclasses import dataclass

_KEPT = 31 / 32  # Of what earlier prompts weigh, with each prompt.
_MOST = 8.0  # The factor is in [1 / _MOST, _MOST].
_NAMES_MAX = 256


@dataclass(slots=True)
class _Sums:
    tokens: float = 0.0
    guessed: float = 0.0


class PromptLengths:
    """One factor for the guesses of each model or adapter; long prompts weigh more."""

    def __init__(self) -> None:
        self._sums: OrderedDict[str, _Sums] = OrderedDict()

    def expected(self, name: str, guessed_tokens: int) -> int:
        """The length of a prompt that is guessed to have so many tokens, at least 1."""
        sums = self._sums.get(name)
        factor = 1.0 if sums is None else sums.tokens / sums.guessed
        return max(1, round(guessed_tokens * min(_MOST, max(1 / _MOST, factor))))

    def observe(self, name: str, guessed_tokens: int, tokens: int) -> None:
        """A prompt has turned out to have so many tokens; 0: its answer had no ids."""
        if guessed_tokens <= 0 or tokens <= 0:
            return
        sums = self._sums.setdefault(name, _Sums())
        self._sums.move_to_end(name)
        sums.tokens = sums.tokens * _KEPT + tokens
        sums.guessed = sums.guessed * _KEPT + guessed_tokens
        if len(self._sums) > _NAMES_MAX:
            self._sums.popitem(last=False)
