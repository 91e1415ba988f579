"""What one step of an engine computes."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive new tokens of one sequence: one token is a decode step, more are a piece of prefill.

    `pages[i]` is the page that holds positions `[i * page_size, (i + 1) * page_size)` of the sequence; it covers every
    position up to the chunk's last. KV of positions before `first_position` is already in them.
    """

    token_ids: Sequence[int]
    first_position: int
    pages: Sequence[int]
    wants_logits: bool  # Of the chunk's last token.
