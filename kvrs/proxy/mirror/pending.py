"""Streams with updates that wait to be sent to one peer, and until when."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from math import inf
from typing import Generic, TypeVar

S = TypeVar("S")


class Pending(Generic[S]):
    """Streams with something new, in the order in which they have had it: those whose clients wait
    for the peer go at once, and alone; all go together when the first of them is due.
    """

    def __init__(self) -> None:
        self._all: dict[S, None] = {}
        self._urgent: dict[S, None] = {}
        self._due_s = inf
        self._changed = asyncio.Event()

    def add(self, stream: S, within_s: float) -> None:
        """0 seconds: it is urgent."""
        self._all[stream] = None
        if within_s <= 0:
            self._urgent[stream] = None
            self._changed.set()
        else:
            self.hurry(within_s)

    def hurry(self, within_s: float = 0.0) -> None:
        """Have all go in this time at the latest."""
        due_s = asyncio.get_running_loop().time() + within_s
        if due_s < self._due_s:
            self._due_s = due_s
            self._changed.set()

    def clear(self) -> None:
        self._all.clear()
        self._urgent.clear()

    async def next(self) -> bool:
        """Wait until something is to be sent; whether all is, or what is urgent."""
        loop = asyncio.get_running_loop()
        while not self._urgent and loop.time() < self._due_s:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(None if self._due_s == inf else self._due_s):
                    await self._changed.wait()
        if loop.time() < self._due_s:
            return False
        self._due_s = inf
        return True

    def take(self, *, urgent_only: bool) -> Iterator[S]:
        """Those that are to be sent, each removed as it is taken."""
        waiting = self._urgent if urgent_only else self._all
        while waiting:
            stream = next(iter(waiting))
            self._all.pop(stream, None)
            self._urgent.pop(stream, None)
            yield stream
