"""Streams whose pages are still being saved though their requests have ended here: a prefill
request ends with its one token, and its stream goes on at a decode instance.

Blocks outlive the end of a request in vLLM's prefix cache, until others need them. The first of
them are pinned, a bounded number for a bounded time; the others are saved if they still have the
same content when their turn comes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrs.vllm.tracked import SavedStream

REST_S = 2.0  # An agent that has not taken the pages by then does without them.


class BlockPool(Protocol):
    """vLLM's blocks."""

    def pin(self, block_ids: Sequence[int]) -> None:
        """Keep these from being used for anything else."""

    def unpin(self, block_ids: Sequence[int]) -> None: ...

    def content(self, block_id: int) -> object:
        """A name of what the block has; None: it is not in the prefix cache."""


@dataclass(slots=True)
class _Ended:
    saved: SavedStream
    blocks: list[int]  # Of its full pages.
    contents: list[object]
    pinned: list[int]  # The first of them.
    deadline_s: float


class EndedStreams:
    def __init__(
        self,
        is_sent: Callable[[SavedStream], bool],
        max_pinned: int,
        clock: Callable[[], float],
    ) -> None:
        self.pool: BlockPool | None = None  # Without one nothing outlives its request.
        self.pinned_blocks = 0
        self._is_sent, self._max_pinned, self._clock = is_sent, max_pinned, clock
        self._streams: dict[str, _Ended] = {}  # By request.

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, saved: SavedStream, blocks: Sequence[int]) -> bool:
        """Go on saving these blocks, which its request still has. False: none of them."""
        if self.pool is None or not blocks:
            return False
        pinned = [*blocks[: self._max_pinned - self.pinned_blocks]]
        self.pool.pin(pinned)
        self.pinned_blocks += len(pinned)
        contents = [self.pool.content(block) for block in blocks]
        self._streams[saved.request_id] = _Ended(
            saved, [*blocks], contents, pinned, self._clock() + REST_S
        )
        return True

    def blocks(self, request_id: str, first_page: int, end_page: int) -> list[int]:
        """The blocks of these pages, up to the first that may have another content."""
        ended, found = self._streams.get(request_id), list[int]()
        if ended is None or self.pool is None:
            return found
        for page in range(first_page, min(end_page, len(ended.blocks))):
            block, content = ended.blocks[page], ended.contents[page]
            if page >= len(ended.pinned) and (
                content is None or self.pool.content(block) != content
            ):
                break
            found.append(block)
        return found

    def release(self, *, everything: bool = False) -> list[SavedStream]:
        """Unpin the blocks of streams that were sent, or have had their time. Returns the latter,
        of which nothing is to be sent any more.
        """
        late = []
        for request_id, ended in [*self._streams.items()]:
            if not self._is_sent(ended.saved):
                if not everything and self._clock() < ended.deadline_s:
                    continue
                late.append(ended.saved)
            assert self.pool is not None
            self.pool.unpin(ended.pinned)
            self.pinned_blocks -= len(ended.pinned)
            del self._streams[request_id]
        return late
