"""Base class of the readers of an engine's answer, streamed or whole."""

from collections.abc import Callable
from typing import TypedDict

from kvrs.core.fleet.silence import Delivered, SilenceTimer
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.upstream import Shortcut, Upstream


class Told(TypedDict):
    """Arguments of every `AnswerReader`: a clock, and what it informs of received data."""

    clock: Callable[[], float]
    resumed: Callable[[], None]
    delivered: Delivered
    completed: Callable[[], None]
    silence: SilenceTimer


class AnswerReader:
    """Reads the answer of one attempt. `resumed` is called before the client gets the first part of
    the answer, `completed` when the client has all of it; `silence` notes every read.
    """

    __slots__ = (
        *("_attempt", "_clock", "_completed", "_delivered", "_journal", "_resumed"),
        *("flow", "is_complete", "shortcut", "silence"),
    )

    def __init__(
        self,
        journal: Journal,
        attempt: int,
        *,
        clock: Callable[[], float],
        resumed: Callable[[], None],
        delivered: Delivered,
        completed: Callable[[], None],
        silence: SilenceTimer,
    ) -> None:
        self._journal = journal
        self._attempt = attempt
        self._clock = clock
        self._resumed = resumed
        self._delivered = delivered
        self._completed = completed
        self.silence = silence
        self.flow: Upstream | None = None
        self.shortcut: Shortcut | None = None
        self.is_complete = False

    @property
    def is_over(self) -> bool:
        """Return whether a later attempt has taken over the stream."""
        return self._attempt != self._journal.attempt
