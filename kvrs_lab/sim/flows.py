"""Tokens on their way to a proxy, for calls that get a token with every step of an instance.

A step is one message for all these calls, and its arrival is one entry in a list. The journal of a
stream takes its tokens and their arrival times when the journal is read.
"""

from array import array
from dataclasses import dataclass
from typing import Protocol

from kvrs.core.fleet.silence import Delivered
from kvrs_lab.sim.process import IN_ORDER_S


class Taker(Protocol):
    """The attempt of a part of a flow."""

    def token_of_flow(self, now_s: float) -> None:
        """Take the next token, if the journal does not take it from the flow."""


class TokenFlow:
    """The steps of one instance for one proxy."""

    def __init__(self, delivered: Delivered) -> None:
        self.calls = 0  # Calls in the flow at present.
        self.sent = 0  # Number of steps.
        self.latest_s = 0.0  # Arrival time of the last message of any call.
        self.times_s = array("d")  # Arrival time of each step.
        # Parts of attempts that are over or mirrored, until their last step.
        self.closed: list[FlowPart] = []
        self._delivered = delivered

    def keeps_order(self, at_s: float) -> bool:
        """Return whether a message that arrives at `at_s` follows all others of each call."""
        return at_s > self.latest_s + IN_ORDER_S

    def send(self, at_s: float) -> None:
        """Count a step that arrives at `at_s`."""
        self.sent += 1
        self.latest_s = at_s

    def came(self, calls: int, now_s: float) -> None:
        """Take the next step, which was sent to `calls` calls."""
        step = len(self.times_s)
        self.times_s.append(now_s)
        if self.closed:
            late = [part for part in self.closed if part.has(step)]
            for part in late:
                part.attempt.token_of_flow(now_s)
            self.closed = [part for part in self.closed if part.has_after(step)]
            calls -= len(late)  # The attempt notes its own tokens.
        if calls:
            self._delivered.last_s = now_s


@dataclass(slots=True, eq=False)
class FlowPart:
    """The steps of one call that its journal has not taken."""

    flow: TokenFlow
    attempt: Taker
    first: int
    end: int | None = None  # None: the part continues.

    def has(self, step: int) -> bool:
        return self.first <= step and (self.end is None or step < self.end)

    def has_after(self, step: int) -> bool:
        return self.end is None or step + 1 < self.end

    def take(self) -> "array[float]":
        """Take the new steps; return their arrival times."""
        end = max(self.first, len(self.flow.times_s))  # The first step may not have arrived yet.
        if self.end is not None and self.end < end:
            end = self.end
        first, self.first = self.first, end
        return self.flow.times_s[first:end]

    @property
    def is_over(self) -> bool:
        """Return whether all steps have been taken and the part has ended."""
        return self.end is not None and self.first >= self.end

    def close(self) -> None:
        """Give each further token to the attempt, since it is late or mirrored."""
        if not self.is_over:
            self.flow.closed.append(self)
