"""Work on the contents of large requests in a thread, so that the event loop goes on."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

# Size of a request above which parsing takes milliseconds and is done in a thread.
LARGE_BYTES = 64 << 10
# Seconds after which the interpreter changes threads: Python's default, and during large work.
_TURN_S = 0.005
_SHORT_TURN_S = 0.0005


class LargeWork:
    """Runs work on requests: for a small request at once, for a large one in a thread, so that the
    event loop goes on. Large work runs one at a time and in short interpreter turns: the loop and
    the thread that computes batches give theirs up at every call to the system or to torch.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        return work() if size_bytes <= LARGE_BYTES else await self.run_aside(work)

    async def run_aside(self, work: Callable[[], T]) -> T:
        """Run work in the thread for large work, and return its result."""
        async with self._turn:
            with short_turns():
                return await asyncio.to_thread(work)


@contextmanager
def short_turns() -> Iterator[None]:
    """Shorten the interpreter's turns for all threads while this block works for milliseconds."""
    sys.setswitchinterval(_SHORT_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(_TURN_S)
