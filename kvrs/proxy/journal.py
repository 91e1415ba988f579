"""What the proxy knows of one stream: enough to continue it anywhere, and to end it properly on its own.

The journal is the truth about what the client has. Ids are appended in the same turn of the event loop in which
their bytes are given to the client's socket, so the two never disagree.
"""

from dataclasses import dataclass, field

import msgspec

from kvrs.ids import StreamId
from kvrs.protocol.openai import Choice, CompletionRequest, Usage

_OBJECT = b',"object":"text_completion"'


@dataclass(slots=True, eq=False)
class Journal:
    """One stream. `attempt` is the only writer; 0 while there is none."""

    stream: StreamId
    request: CompletionRequest  # The client's own, with the seed fixed.
    arrived_s: float
    prompt_ids: list[int] | None = None  # None while the prompt is text that no engine has tokenised yet.
    output_ids: list[int] = field(default_factory=list)
    attempt: int = 0
    head: bytes | None = None  # `{"id":..,"created":..,"model":..` of the first event; every later one begins alike.
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage_sent: bool = False
    first_write_s: float | None = None
    last_write_s: float | None = None
    longest_gap_s: float = 0.0

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for a last event that counts tokens."""
        options = self.request.stream_options
        return self.request.stream and options is not None and options.include_usage

    @property
    def history(self) -> list[int] | str:
        """What an attempt starts from: prompt and all output so far, as ids as soon as they are known."""
        if self.prompt_ids is None:
            assert isinstance(self.request.prompt, str)
            return self.request.prompt
        return self.prompt_ids + self.output_ids

    @property
    def prompt_tokens(self) -> int:
        return 0 if self.prompt_ids is None else len(self.prompt_ids)

    @property
    def history_tokens(self) -> int:
        return self.prompt_tokens + len(self.output_ids)

    @property
    def delivered(self) -> bool:
        """Whether every token is with the client, so that only the formal end can be missing."""
        return self.finish_reason is not None or len(self.output_ids) >= self.request.max_tokens

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
        """Finish and usage events that a complete stream still owes its client; afterwards it owes none."""
        assert self.delivered
        assert self.head is not None
        events = []
        if self.finish_reason is None:
            # All of max_tokens were delivered and the engine died before it said so.
            self.finish_reason = "length"
            choice = Choice(text="", finish_reason="length")
            if self.request.return_token_ids:
                choice.token_ids = []
            events.append(self.head + b',"choices":[' + msgspec.json.encode(choice) + b"]" + _OBJECT + b"}")
        if self.wants_usage and not self.usage_sent:
            self.usage_sent = True
            events.append(self.head + b',"choices":[]' + _OBJECT + b',"usage":' + msgspec.json.encode(self.usage) + b"}")
        return events
