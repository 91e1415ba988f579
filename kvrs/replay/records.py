"""What is sent in a replay and what came back: one request in, one record out, whatever happens in between."""

from dataclasses import dataclass, field
from enum import StrEnum


class Api(StrEnum):
    """Which of a server's endpoints is driven."""

    COMPLETIONS = "completions"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request of an open-loop replay; `arrival_s` counts from the start of the run."""

    arrival_s: float
    prompt_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None


class ErrorKind(StrEnum):
    CONNECT = "connect"  # Nobody answered the connection.
    HTTP = "http"  # An answer other than 200.
    RESET = "reset"  # The connection broke.
    TIMEOUT = "timeout"  # The stream did not end in the time that the client gives it.
    EVENT = "event"  # The server ended the stream with an explicit error event.
    TRUNCATED = "truncated"  # The bytes ended without a finish reason and the terminal event: the worst kind.
    PROTOCOL = "protocol"  # Something came that is no part of the protocol.


@dataclass(frozen=True, slots=True)
class StreamError:
    kind: ErrorKind
    message: str


@dataclass(slots=True)
class StreamRecord:
    """Everything that the client saw of one stream. All times are seconds since the start of the run.

    `token_times_s[i]` is when token i was received; tokens that came in one event share their time. Where the server does not
    say its token ids, `token_ids` is empty and an event with text counts as one token.
    """

    index: int  # Position in the list of requests: what the same request is found by in another run.
    due_s: float  # When the request was to be sent.
    prompt_tokens: int
    max_tokens: int
    sent_s: float = 0.0  # When it was sent; `lag_s` is the fault of the client, never of the server.
    ended_s: float = 0.0
    status: int | None = None
    stream: str = ""  # The server's own id of the stream, from the chunk id "cmpl-<stream>".
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage_tokens: int | None = None  # What the server says it produced, where it says so.
    error: StreamError | None = None

    @property
    def lag_s(self) -> float:
        return self.sent_s - self.due_s

    @property
    def tokens(self) -> int:
        """How many were received: by id, else as the server counted them, else as they were seen."""
        return len(self.token_ids) or self.usage_tokens or len(self.token_times_s)

    @property
    def completed(self) -> bool:
        return self.error is None and self.finish_reason is not None

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Note an error; the first one stands, because what follows is its consequence."""
        if self.error is None:
            self.error = StreamError(kind, message)
