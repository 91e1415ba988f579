"""The alignment of draft tokens with a stream of another instance, by token ids and positions.

Invariants, checked by tests:
1. Drafts follow the tokens that the other instance has chosen; a different choice discards them.
2. KV counts as computed only for tokens that are still at the same positions.
3. A burst is used if it begins at or before the end of the stream and agrees with the tokens chosen
   since; its remaining tokens are proposals. So drafting and verifying need not wait for each
   other.
"""

from collections.abc import Iterable, Sequence

from kvrs.protocol.instance import MOST_DRAFTS

_MOST_AHEAD = 2 * MOST_DRAFTS + 1  # The limit of a helper's drafts (`DraftBatches`).


class DraftMirror:
    """One stream of another instance, as the drafting instance knows it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.chosen = list(token_ids)
        self.drafted: list[int] = []  # Drafts after the chosen tokens.
        self.computed = 0  # Number of leading tokens with valid KV of the draft model.
        self.sent = len(self.chosen)  # Number of tokens that the other instance knows.
        self._ended = False  # Drafts that were sent have turned out wrong.

    @property
    def tokens(self) -> int:
        return len(self.chosen) + len(self.drafted)

    def progress(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the other instance has chosen."""
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
        """Return the position and the ids of the next tokens to compute, at most `most`. The last
        token always counts as uncomputed, because its logits give the next draft.
        """
        first, known = min(self.computed, self.tokens - 1), len(self.chosen)
        end = first + most
        ids = self.chosen[first:end]
        if end > known:
            ids += self.drafted[max(0, first - known) : end - known]
        return first, ids

    def advanced(self, first: int, count: int, draft: int | None) -> None:
        """Note that KV of these tokens was computed, and the draft after the last token, if any."""
        self.computed = first + count
        if draft is not None:
            assert self.computed == self.tokens, "a draft follows the last token"
            self.drafted.append(draft)

    def burst(self) -> tuple[int, list[int], bool]:
        """Take the position and the ids of the new drafts, and whether earlier drafts were
        wrong.
        """
        start, self.sent = self.sent, self.tokens
        begins_anew, self._ended = self._ended, False
        return start, self.drafted[start - len(self.chosen) :], begins_anew


class Bursts:
    """Received drafts for one stream, at the instance that verifies them."""

    def __init__(self) -> None:
        self._first = 0
        self._ids: list[int] = []
        self._proposed = 0  # Number of leading drafts that were proposed.
        self.stale = 0  # Drafts that were dropped without a proposal.

    def came(self, position: int, ids: Sequence[int], begins_anew: bool = False) -> None:
        """Add received drafts: they continue the last ones, or replace them."""
        if self._ids and not begins_anew and position == self._first + len(self._ids):
            self._ids = [*self._ids, *ids][:_MOST_AHEAD]
        else:
            self.stale += len(self._ids) - self._proposed
            self._proposed, self._first, self._ids = 0, position, list(ids)

    def proposal(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Return drafts after `token_ids`, at most `most`; drop drafts that disagree with it."""
        known = len(token_ids) - self._first
        if known < 0:
            return []  # The drafts begin later, and may become right.
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
    """Return the length of the common prefix."""
    count = 0
    for one, other in zip(ones, others, strict=False):
        if one != other:
            break
        count += 1
    return count
