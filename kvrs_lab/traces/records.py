"""Requests of a replay, and the record of each request with its outcome."""

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request of an open-loop replay; `arrival_s` counts from the start of the run."""

    arrival_s: float
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None


class ErrorKind(StrEnum):
    CONNECT = "connect"  # No connection was made.
    HTTP = "http"  # An answer other than 200.
    RESET = "reset"  # The connection broke.
    TIMEOUT = "timeout"  # The stream did not end within the client's timeout.
    EVENT = "event"  # The server ended the stream with an explicit error event.
    # The bytes ended without a finish reason and the terminal event: the worst kind.
    TRUNCATED = "truncated"
    PROTOCOL = "protocol"  # The server sent something outside the protocol.


@dataclass(frozen=True, slots=True)
class StreamError:
    kind: ErrorKind
    message: str


@dataclass(slots=True)
class StreamRecord:
    """The client's view of one stream. All times are seconds since the start of the run.

    `token_times_s[i]` is the time of token i; tokens of one event share their time. If the server
    returns no token ids, `token_ids` is empty and an event with text counts as one token.
    """

    index: int  # Position in the list of requests, by which another run has the same request.
    due_s: float  # Planned time of sending.
    prompt_tokens: int
    max_tokens: int
    # Actual time of sending; `lag_s` is caused by the client, never by the server.
    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int | None = None
    stream: str = ""  # The server's id of the stream, from the chunk id "cmpl-<stream>".
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    # Completion tokens of the server's usage, if returned.
    usage_tokens: int | None = None
    error: StreamError | None = None

    @property
    def lag_s(self) -> float:
        return self.sent_s - self.due_s

    @property
    def tokens(self) -> int:
        """Number of received tokens: ids, else the server's count, else events."""
        return len(self.token_ids) or self.usage_tokens or len(self.token_times_s)

    @property
    def completed(self) -> bool:
        return self.error is None and self.finish_reason is not None

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Record an error. The first error stands, because later ones are its consequences."""
        if self.error is None:
            self.error = StreamError(kind, message)
