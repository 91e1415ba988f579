"""What the proxy knows of one stream: enough to continue it anywhere, and to end it properly on its own.

The journal is the truth about what the client has. Ids are appended in the same turn of the event loop in which
their bytes are given to the client's socket, so the two never disagree.
"""

from dataclasses import dataclass, field

from kvrs.ids import StreamId
from kvrs.policy.events import Deadlines, Kept
from kvrs.protocol.openai import Usage
from kvrs.proxy.forms import Asked


@dataclass(slots=True, eq=False)
class Journal:
    """One stream: one choice of one request. (`owner_epoch`, `attempt`) is the only writer; attempt 0 while there is none."""

    stream: StreamId
    asked: Asked
    arrived_s: float
    seed: int | None = None  # What every attempt samples with; None: as greedy needs none.
    wants_usage: bool = False  # Of several choices none does: theirs is counted together.
    prompt_ids: list[int] | None = None  # None until an engine has tokenised the prompt.
    output_ids: list[int] = field(default_factory=list)
    owner_epoch: int = 0  # How often the stream has gone from one proxy, or one request of its client, to another.
    attempt: int = 0
    head: bytes | None = None  # `{"id":..,"created":..,"model":..` of the first event; every later one begins alike.
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage_sent: bool = False
    # Characters that the client has, counted since a plain engine wrote some: nobody knows what such an engine holds back.
    # None: exactly what `kvrs.text` gives for the output ids.
    text_sent: int | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)
    # Of a stream that can be resumed elsewhere: where the client stands after each event that it has not been given yet.
    marks: list[int] | None = None
    kept: tuple[Kept, ...] = ()  # By whom, as far as the proxy knew that had the stream before.
    inexact: tuple[str, ...] = ()  # What cannot be continued exactly, should the stream be cut.
    first_write_s: float | None = None
    last_write_s: float | None = None
    longest_gap_s: float = 0.0

    @property
    def wants_ids(self) -> bool:
        return self.asked.request.return_token_ids

    @property
    def max_tokens(self) -> int | None:
        """None: as many as the engine has room for."""
        return self.asked.request.max_tokens

    @property
    def history(self) -> list[int] | None:
        """Prompt and all output so far; None while the prompt is not tokenised."""
        return None if self.prompt_ids is None else self.prompt_ids + self.output_ids

    @property
    def prompt_tokens(self) -> int:
        return 0 if self.prompt_ids is None else len(self.prompt_ids)

    @property
    def history_tokens(self) -> int:
        return self.prompt_tokens + len(self.output_ids)

    @property
    def remaining_tokens(self) -> int | None:
        """How many more the client wants; None: as many as the engine has room for."""
        return None if self.max_tokens is None else self.max_tokens - len(self.output_ids)

    @property
    def token_interval_s(self) -> float | None:
        """Mean time between two of the tokens that the client has; None: it has too few to say."""
        if self.first_write_s is None or self.last_write_s is None or len(self.output_ids) < 2:
            return None
        return (self.last_write_s - self.first_write_s) / (len(self.output_ids) - 1)

    @property
    def seq(self) -> int:
        """Where the stream stands: its output tokens, and behind them its finish and its usage, as one step each."""
        return len(self.output_ids) + self.finished + self.usage_sent

    @property
    def finished(self) -> bool:
        """Whether all text is with the client, so that only the formal end can be missing.

        All of max_tokens is not enough: an engine may still hold text back when it has given its last id.
        """
        return self.finish_reason is not None

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, len(self.output_ids), self.history_tokens)

    def wrote(self, now_s: float) -> None:
        """Note that token ids went to the client now."""
        if self.last_write_s is None:
            self.first_write_s = now_s
        elif (gap_s := now_s - self.last_write_s) > self.longest_gap_s:
            self.longest_gap_s = gap_s
        self.last_write_s = now_s

    def missing_end(self) -> list[bytes]:
        """Events that a complete stream still owes its client; afterwards it owes none."""
        assert self.finished
        assert self.head is not None
        if not self.wants_usage or self.usage_sent:
            return []
        self.usage_sent = True
        return [self.asked.form.event(self.head, [], self.usage)]
