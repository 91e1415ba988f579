"""The position of a draft beside a stream of another instance. Pure: token ids and positions alone.

Invariants, which the tests hold it to:
1. Drafts lie behind what the other instance has chosen; what it chooses otherwise ends them.
2. KV counts as right only of tokens that stand where they stood when it was computed.
3. A burst counts if it begins at or before the end of the stream and agrees with what was chosen
   since; what lies behind is used. So drafting and verifying need not wait for each other.
"""

from collections.abc import Iterable, Sequence

from kvrs.protocol.speculation import MOST_DRAFTS

_MOST_AHEAD = 2 * MOST_DRAFTS + 1  # A helper drafts no further (`DraftBatches`).


class DraftMirror:
    """One stream of another instance, as the instance that makes drafts sees it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.chosen = list(token_ids)
        self.drafted: list[int] = []  # Behind them.
        self.computed = 0  # The draft's KV of so many leading tokens is right.
        self.sent = len(self.chosen)  # Tokens, chosen or drafted, that the other one knows.
        self._ended = False  # Drafts that were sent are wrong.

    @property
    def tokens(self) -> int:
        return len(self.chosen) + len(self.drafted)

    def progress(self, token_ids: Sequence[int]) -> None:
        """The stream has further tokens."""
        agreed = _agreed(self.drafted, token_ids)
        self.chosen += token_ids
        if agreed == len(token_ids):
            del self.drafted[:agreed]
            self.sent = max(self.sent, len(self.chosen)) if self.drafted else len(self.chosen)
            return
        self._ended, self.sent = True, len(self.chosen)
        self.drafted.clear()
        self.computed = min(self.computed, len(self.chosen) - len(token_ids) + agreed)

    def uncomputed(self, most: int) -> tuple[int, list[int]]:
        """The position and ids of the next tokens to compute, at most so many. The last token is
        always among the rest: its logits are the next draft's.
        """
        first, known = min(self.computed, self.tokens - 1), len(self.chosen)
        end = first + most
        ids = self.chosen[first:end]
        if end > known:
            ids += self.drafted[max(0, first - known) : end - known]
        return first, ids

    def advanced(self, first: int, count: int, draft: int | None) -> None:
        """KV of these tokens was computed; behind the last of all, `draft` was chosen."""
        self.computed = first + count
        if draft is not None:
            assert self.computed == self.tokens, "a draft follows the last token"
            self.drafted.append(draft)

    def burst(self) -> tuple[int, list[int], bool]:
        """The position and ids of drafts that were not sent before, and whether those that were
        are wrong.
        """
        start, self.sent = self.sent, self.tokens
        begins_anew, self._ended = self._ended, False
        return start, self.drafted[start - len(self.chosen) :], begins_anew


class Bursts:
    """Drafts that have come for one stream, at the instance that verifies them."""

    def __init__(self) -> None:
        self._first = 0
        self._ids: list[int] = []
        self._proposed = 0  # So many leading ones.
        # Tokens that were never proposed: the stream has gone on otherwise.
        self.stale = 0

    def came(self, position: int, ids: Sequence[int], begins_anew: bool = False) -> None:
        """Drafts go on where the last ones ended, or begin anew."""
        if self._ids and not begins_anew and position == self._first + len(self._ids):
            self._ids = [*self._ids, *ids][:_MOST_AHEAD]
        else:
            self.stale += len(self._ids) - self._proposed
            self._proposed, self._first, self._ids = 0, position, list(ids)

    def proposal(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Drafts behind these tokens; those that disagree with them are dropped."""
        known = len(token_ids) - self._first
        if known < 0:
            return []  # They may become right.
        since = list(token_ids[self._first :])
        if since != self._ids[:known]:
            self.stale += len(self._ids) - max(_agreed(since, self._ids), self._proposed)
            self._ids = []
        else:
            self._ids = self._ids[known:]
        self._first = len(token_ids)
        proposed = self._ids[:most]
        self._proposed = len(proposed)
        return proposed


def _agreed(ones: Iterable[int], others: Iterable[int]) -> int:
    """How many leading tokens of both are the same."""
    count = 0
    for one, other in zip(ones, others, strict=False):
        if one != other:
            break
        count += 1
    return count
