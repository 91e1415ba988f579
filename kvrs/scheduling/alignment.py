"""Where a draft stands beside a stream of another instance. Pure: token ids and positions alone.

Invariants, which the tests hold it to:
1. Drafts lie behind what the other instance has chosen; what it chooses otherwise ends them.
2. KV counts as right only of tokens that stand where they stood when it was computed.
3. A burst counts if it begins at or before the end of the stream and agrees with what was chosen
   since; what lies behind is used. So drafting and verifying need not wait for each other.
"""

from collections.abc import Sequence


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
        agreed = 0
        for drafted, chosen in zip(self.drafted, token_ids, strict=False):
            if drafted != chosen:
                break
            agreed += 1
        self.chosen += token_ids
        if agreed == len(token_ids):
            del self.drafted[:agreed]
        else:
            self._ended = True
            self.drafted.clear()
            self.computed = min(self.computed, len(self.chosen) - len(token_ids) + agreed)
        self.sent = max(self.sent, len(self.chosen)) if self.drafted else len(self.chosen)

    def uncomputed(self, most: int) -> tuple[int, list[int]]:
        """The position and ids of the next tokens to compute, at most so many. The last token is
        always among the rest: its logits are the next draft's.
        """
        first = min(self.computed, self.tokens - 1)
        known = len(self.chosen)
        ids = self.chosen[first : first + most]
        if len(ids) < most:
            ids += self.drafted[max(0, first - known) : first + most - known]
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
        self.stale = 0  # Tokens that came and could not be proposed.

    def came(self, position: int, ids: Sequence[int], begins_anew: bool = False) -> None:
        """Drafts go on where the last ones ended, or begin anew."""
        if self._ids and not begins_anew and position == self._first + len(self._ids):
            self._ids += ids
        else:
            self.stale += len(self._ids)
            self._first, self._ids = position, list(ids)

    def proposal(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Drafts behind these tokens; those that disagree with them are dropped."""
        known = len(token_ids) - self._first
        if known < 0:
            return []  # They may become right.
        if list(token_ids[self._first :]) != self._ids[:known]:
            self.stale += max(0, len(self._ids) - known)
            self._ids = []
            return []
        self._first, self._ids = len(token_ids), self._ids[known:]
        return self._ids[:most]
