"""Tokens of calls that get one with every step of an instance, on their way to a proxy.

A step is one message for all of them, and its arrival one entry in a list. The journal of a stream
takes what has come for it when it is read, with the times at which it came.
"""

from array import array
from dataclasses import dataclass
from typing import Protocol

from kvrs.core.fleet.silence import Delivered
from kvrs_lab.sim.process import IN_ORDER_S


class Taker(Protocol):
    """An attempt."""

    def token_of_flow(self, now_s: float) -> None:
        """Its next token, which its journal does not take by itself."""


class TokenFlow:
    """The steps of one instance for one proxy."""

    def __init__(self, delivered: Delivered) -> None:
        self.calls = 0  # That are in it at present.
        self.sent = 0  # Steps.
        self.latest_s = 0.0  # When the last message arrives of any of its calls.
        self.times_s = array("d")  # When each step has come.
        # Of attempts that are over or mirrored, as long as steps are to come.
        self.closed: list[FlowPart] = []
        self._delivered = delivered

    def keeps_order(self, at_s: float) -> bool:
        """A message that arrives then is behind all others of each of its calls."""
        return at_s > self.latest_s + IN_ORDER_S

    def send(self, at_s: float) -> None:
        """A step that arrives then."""
        self.sent += 1
        self.latest_s = at_s

    def came(self, calls: int, now_s: float) -> None:
        """The next step has come, which was sent to so many calls."""
        step = len(self.times_s)
        self.times_s.append(now_s)
        if self.closed:
            late = [part for part in self.closed if part.has(step)]
            for part in late:
                part.attempt.token_of_flow(now_s)
            self.closed = [part for part in self.closed if part.has_after(step)]
            calls -= len(late)  # An attempt that is not over notes it itself.
        if calls:
            self._delivered.last_s = now_s


@dataclass(slots=True, eq=False)
class FlowPart:
    """The steps of one call, without those of them that its journal has taken."""

    flow: TokenFlow
    attempt: Taker
    first: int
    end: int | None = None  # None: it goes on.

    def has(self, step: int) -> bool:
        return self.first <= step and (self.end is None or step < self.end)

    def has_after(self, step: int) -> bool:
        return self.end is None or step + 1 < self.end

    def take(self) -> "array[float]":
        """When each step has come that has not been taken, and take them."""
        end = max(self.first, len(self.flow.times_s))  # Its first step may be still to come.
        if self.end is not None and self.end < end:
            end = self.end
        first, self.first = self.first, end
        return self.flow.times_s[first:end]

    @property
    def is_over(self) -> bool:
        """All has been taken, and nothing more comes."""
        return self.end is not None and self.first >= self.end

    def close(self) -> None:
        """The attempt gets each token that comes from now on: it is late, or mirrored."""
        if not self.is_over:
            self.flow.closed.append(self)
