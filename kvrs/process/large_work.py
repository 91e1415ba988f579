"""Work on the content of large requests, beside the event loop."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

# To parse more than this takes milliseconds.
LARGE_BYTES = 64 << 10
# Turn of a thread at the interpreter while others wait for it: Python's own, and beside large work.
_TURN_S = 0.005
_SHORT_TURN_S = 0.0005


class LargeWork:
    """Work on the content of requests: a small one's is done at once, a large one's in a thread, so
    that the event loop goes on. One at a time and in short turns of the interpreter: the loop, and
    the thread that computes batches, give theirs away with every call to the system or to torch.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        return work() if size_bytes <= LARGE_BYTES else await self.run_aside(work)

    async def run_aside(self, work: Callable[[], T]) -> T:
        """Run large work in the thread."""
        async with self._turn:
            with short_turns():
                return await asyncio.to_thread(work)


@contextmanager
def short_turns() -> Iterator[None]:
    """Short turns for all threads, within which one of them works for milliseconds."""
    sys.setswitchinterval(_SHORT_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_TURN_S)
