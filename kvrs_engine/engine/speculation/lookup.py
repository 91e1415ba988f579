"""Prompt lookup: what followed the last time that a stream's last tokens stood in it.

Pure, one object per stream; a token costs O(1). It helps where text repeats itself (code that is
edited, answers that quote their prompt), without a draft model.

Source: Saxena, "Prompt Lookup Decoding", 2023; the gate is kvrs's own.
"""

from collections.abc import Sequence

_LONGEST, _SHORTEST = 3, 2  # Tokens of the suffix that is looked up.

# A step with drafts takes 1.2 to 1.5 times as long where the batch is small; below so many accepted
# drafts in each it is not worth that.
BREAK_EVEN_TOKENS = 0.4
PROBE_EVERY_TOKENS = 64
_WEIGHT = 0.25  # Of the last step in the mean of accepted drafts.


class PromptLookup:
    """Proposals for one stream, and the gate that stops them while few are accepted."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}  # Behind the last place of a suffix.
        self._indexed = _SHORTEST  # Places before this one are in it.
        self._accepted = 1.0  # Mean of the last steps with drafts.
        self._silent_until = 0

    def propose(self, token_ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow `token_ids`, which have grown since the last call.
        What stands there goes on from its own end: of `a b a` it is `b a b a ...`.
        """
        if len(token_ids) < self._silent_until:
            return []
        self._index(token_ids)
        for size in range(_LONGEST, _SHORTEST - 1, -1):
            start = self._ends.get(tuple(token_ids[-size:]))
            if start is not None:
                period = len(token_ids) - start
                return [token_ids[start + ahead % period] for ahead in range(most)]
        return []

    def verified(self, accepted: int, tokens: int) -> None:
        """A step accepted so many of the last drafts; the stream has so many tokens now."""
        self._accepted += (accepted - self._accepted) * _WEIGHT
        if self._accepted < BREAK_EVEN_TOKENS:
            self._silent_until = tokens + PROBE_EVERY_TOKENS
            self._accepted = BREAK_EVEN_TOKENS  # The probe decides.

    def _index(self, token_ids: Sequence[int]) -> None:
        """All places but the end, so that a suffix does not find itself."""
        for end in range(self._indexed, len(token_ids)):
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._ends[tuple(token_ids[end - size : end])] = end
        self._indexed = max(self._indexed, len(token_ids))
