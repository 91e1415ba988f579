"""The position of a draft beside a stream of another instance. Pure: token ids and positions alone.

Invariants, which the tests hold it to:
1. Drafts lie behind what the other instance has chosen; what it chooses otherwise ends them.
2. KV counts as right only of tokens that stand where they stood when it was computed.
3. A burst counts if it begins at or before the end of the stream and agrees with what was chosen
   since; what lies behind is used. So drafting and verifying need not wait for each other.
4. An alternative stands for drafts of which the token at its position is wrong: both sides take it
   up where it agrees with what was chosen, so the step behind a wrong draft may have drafts too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrs.protocol.speculation import MOST_DRAFTS

_MOST_AHEAD = 2 * MOST_DRAFTS + 1  # A helper drafts no further (`DraftBatches`).


@dataclass(slots=True, eq=False)
class Alternative:
    """The runner-up of a draft, and drafts behind it."""

    position: int  # Of the runner-up; all tokens before are those of the mirror.
    token_ids: list[int]
    # The draft's KV of so many leading tokens is right, in pages of the mirror first.
    computed: int
    runners_up: list[int | None] = field(default_factory=list)  # Of all but the first token.
    pages: list[int] = field(default_factory=list)  # From the one on that holds its position.

    @property
    def tokens(self) -> int:
        return self.position + len(self.token_ids)

    def advanced(self, draft: int, runner_up: int | None) -> None:
        """KV of all its tokens was computed; behind them, `draft` was chosen."""
        self.computed = self.tokens
        self.token_ids.append(draft)
        self.runners_up.append(runner_up)


class DraftMirror:
    """One stream of another instance, as the instance that makes drafts sees it."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.chosen = list(token_ids)
        self.drafted: list[int] = []  # Behind them.
        self.runners_up: list[int | None] = []  # Of each of these; None: not known.
        self.computed = 0  # The draft's KV of so many leading tokens is right.
        self.sent = len(self.chosen)  # Tokens, chosen or drafted, that the other one knows.
        self._ended = False  # Drafts that were sent are wrong.

    @property
    def tokens(self) -> int:
        return len(self.chosen) + len(self.drafted)

    def progress(
        self, token_ids: Sequence[int], alternatives: Iterable[Alternative] = ()
    ) -> Alternative | None:
        """The stream has further tokens. Returns the alternative whose drafts take the place of
        wrong ones.
        """
        agreed = _agreed(self.drafted, token_ids)
        self.chosen += token_ids
        if agreed == len(token_ids):
            del self.drafted[:agreed], self.runners_up[:agreed]
            self.sent = max(self.sent, len(self.chosen)) if self.drafted else len(self.chosen)
            return None
        self._ended, self.sent = True, len(self.chosen)
        others = list(token_ids[agreed:])
        wrong = len(self.chosen) - len(others)
        for one in alternatives:
            if one.position == wrong and one.token_ids[: len(others)] == others:
                self.drafted = one.token_ids[len(others) :]
                self.runners_up = one.runners_up[len(others) - 1 :]
                self.computed = one.computed
                return one
        self.drafted.clear()
        self.runners_up.clear()
        self.computed = min(self.computed, wrong)
        return None

    def uncomputed(self, most: int) -> tuple[int, list[int]]:
        """The position and ids of the next tokens to compute, at most so many. The last token is
        always among the rest: its logits are the next draft's.
        """
        first = min(self.computed, self.tokens - 1)
        return first, self.between(first, first + most)

    def between(self, first: int, end: int) -> list[int]:
        """The tokens at these positions, as far as there are any."""
        known = len(self.chosen)
        ids = self.chosen[first:end]
        if end > known:
            ids += self.drafted[max(0, first - known) : end - known]
        return ids

    def advanced(
        self, first: int, count: int, draft: int | None, runner_up: int | None = None
    ) -> None:
        """KV of these tokens was computed; behind the last of all, `draft` was chosen."""
        self.computed = first + count
        if draft is not None:
            assert self.computed == self.tokens, "a draft follows the last token"
            self.drafted.append(draft)
            self.runners_up.append(runner_up)

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
        self._alternatives: dict[int, list[int]] = {}  # By their first position.
        # Tokens, but for those of alternatives, that were never proposed: the stream has gone on
        # otherwise.
        self.stale = 0

    def came(
        self,
        position: int,
        ids: Sequence[int],
        begins_anew: bool = False,
        is_alternative: bool = False,
    ) -> None:
        """Drafts go on where the last ones ended, or begin anew; an alternative comes whole."""
        if is_alternative:
            if position in self._alternatives or len(self._alternatives) <= MOST_DRAFTS:
                self._alternatives[position] = list(ids)
        elif self._ids and not begins_anew and position == self._first + len(self._ids):
            self._ids = [*self._ids, *ids][:_MOST_AHEAD]
        else:
            # Those of an alternative that was taken up come once more.
            at = self._first - position
            if at < 0 or list(ids[at : at + len(self._ids)]) != self._ids:
                self.stale += len(self._ids) - self._proposed
                self._proposed = 0
            elif self._ids:
                self._proposed += at
            self._first, self._ids = position, list(ids)
            self._alternatives.clear()

    def proposal(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Drafts behind these tokens; those that disagree with them are dropped."""
        known = len(token_ids) - self._first
        if known < 0:
            return []  # They may become right.
        since = list(token_ids[self._first :])
        if since != self._ids[:known]:
            self.stale += len(self._ids) - max(_agreed(since, self._ids), self._proposed)
            self._ids = self._alternative(token_ids)
            self._alternatives.clear()
        else:
            self._ids = self._ids[known:]
            for position in [at for at in self._alternatives if at < len(token_ids)]:
                del self._alternatives[position]
        self._first = len(token_ids)
        proposed = self._ids[:most]
        self._proposed = len(proposed)
        return proposed

    def _alternative(self, token_ids: Sequence[int]) -> list[int]:
        """Drafts behind these tokens, of the alternative that agrees with them."""
        for position, ids in self._alternatives.items():
            known = len(token_ids) - position
            if known > 0 and list(token_ids[position:]) == ids[:known]:
                return ids[known:]
        return []


def _agreed(ones: Iterable[int], others: Iterable[int]) -> int:
    """How many leading tokens of both are the same."""
    count = 0
    for one, other in zip(ones, others, strict=False):
        if one != other:
            break
        count += 1
    return count
