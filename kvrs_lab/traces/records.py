"""Requests of a replay, and the record of each, whatever happened to it."""

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
    TIMEOUT = "timeout"  # The stream did not end in the time that the client gives it.
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

    `token_times_s[i]` is when token i was received; tokens that came in one event share their time.
    Where the server does not return token ids, `token_ids` is empty and an event with text counts
    as one token.
    """

    index: (
        int  # Position in the list of requests, by which the same request is found in another run.
    )
    due_s: float  # When the request was to be sent.
    prompt_tokens: int
    max_tokens: int
    # When it was sent; `lag_s` is caused by the client, never by the server.
    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int | None = None
    stream: str = ""  # The server's own id of the stream, from the chunk id "cmpl-<stream>".
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    # Completion tokens of the server's usage, where it returns one.
    usage_tokens: int | None = None
    error: StreamError | None = None

    @property
    def lag_s(self) -> float:
        return self.sent_s - self.due_s

    @property
    def tokens(self) -> int:
        """How many were received: by id, else as the server counted them, else as they were
        seen.
        """
        return len(self.token_ids) or self.usage_tokens or len(self.token_times_s)

    @property
    def completed(self) -> bool:
        return self.error is None and self.finish_reason is not None

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Record an error; the first one stands, because later ones are its consequence."""
        if self.error is None:
            self.error = StreamError(kind, message)
