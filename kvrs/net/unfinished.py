"""Bodies of requests that have come in part: how slowly they may come, the memory that they may
take, and which of them are cut when they take more. Pure.

A body is cut off when nothing of it comes for a time, however long it takes as a whole. A client
that sends byte by byte could hold its connection for days by that, so after a grace of several such
times a body needs a mean rate, which is below that of any modem.

A body of up to 64 kB is never cut and takes nothing of the budget. The larger ones share it. Each
moves behind all others when it has grown by another 64 kB, so that the first in line is the one
that has gone without such a step for longest: a client that sends nothing, or byte by byte.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

SMALL_BYTES = 64 << 10
LEAST_BYTES_PER_S = 240
GRACE_PAUSES = 6  # Of the longest pause, before the rate counts.

B = TypeVar("B", bound=Hashable)


def due_s(began_s: float, now_s: float, received_bytes: int, pause_s: float) -> float:
    """When a body is cut off unless more of it comes; `pause_s`: the longest pause."""
    by_rate_s = began_s + GRACE_PAUSES * pause_s + received_bytes / LEAST_BYTES_PER_S
    return min(now_s + pause_s, by_rate_s)


@dataclass(slots=True)
class _Part:
    held_bytes: int
    step_bytes: int  # It had come so far when it moved to its place in line.
    step_s: float


@dataclass(frozen=True, slots=True)
class Cut(Generic[B]):
    """A body that is cut. `quiet_s`: since it last grew by a step."""

    body: B
    held_bytes: int
    quiet_s: float


class UnfinishedBodies(Generic[B]):
    """The larger bodies hold at most the budget together. One that is the only one of them is not
    cut: a budget smaller than the longest body that is allowed would have no use.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._small: dict[B, int] = {}
        self._large: dict[B, _Part] = {}  # In line: the next one to be cut first.
        self.small_bytes = 0
        self.large_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self.small_bytes + self.large_bytes

    def note(self, body: B, held_bytes: int, received_bytes: int, now_s: float) -> list[Cut[B]]:
        """Note what a body takes of memory, and how much of it has come; return those that are
        cut for it, which may include itself. They are forgotten.
        """
        if (part := self._large.get(body)) is not None:
            self.large_bytes += held_bytes - part.held_bytes
            part.held_bytes = held_bytes
            if received_bytes - part.step_bytes >= SMALL_BYTES:
                del self._large[body]
                self._large[body] = _Part(held_bytes, received_bytes, now_s)
        elif received_bytes <= SMALL_BYTES:
            self.small_bytes += held_bytes - self._small.get(body, 0)
            self._small[body] = held_bytes
            return []
        else:
            self.end(body)
            self._large[body] = _Part(held_bytes, received_bytes, now_s)
            self.large_bytes += held_bytes
        return self._cut(now_s)

    def end(self, body: B) -> None:
        """It is whole, or its request is over."""
        self.small_bytes -= self._small.pop(body, 0)
        if (part := self._large.pop(body, None)) is not None:
            self.large_bytes -= part.held_bytes

    def _cut(self, now_s: float) -> list[Cut[B]]:
        found = []
        while self.large_bytes > self._budget_bytes and len(self._large) > 1:
            body, part = next(iter(self._large.items()))
            self.end(body)
            found.append(Cut(body, part.held_bytes, now_s - part.step_s))
        return found
