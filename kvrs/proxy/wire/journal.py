"""The record of one stream: enough to continue it at any instance, and to end it without one.

The journal is the reference for what the client has. Ids are appended in the same iteration of the
event loop in which their bytes are written to the client's socket, so the two never differ.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrs.core.fleet.known import Replays
from kvrs.core.model import events as ev
from kvrs.core.model.live_stream import mean_interval_s
from kvrs.core.model.prefixes import Prefix
from kvrs.ids import StreamId
from kvrs.protocol.openai.chunks import Usage, usage_of
from kvrs.protocol.openai.usage import NO_FACTS, EngineFacts, with_facts
from kvrs.protocol.token_ids import packed
from kvrs.proxy.wire.prefix import prefix_of
from kvrs.proxy.wire.requests import ParsedRequest, RequestContext

# For the estimated length of a text prompt, until prefill has counted its tokens.
_BYTES_PER_TOKEN = 4


@dataclass(slots=True, eq=False)
class Journal:
    """One stream: one choice of one request. (`owner_epoch`, `attempt`) is the only writer; attempt
    0 while there is none.
    """

    stream: StreamId
    parsed: ParsedRequest
    arrived_s: float
    seed: int | None = None  # What every attempt samples with; None: as greedy needs none.
    wants_usage: bool = False  # Of several choices none does: theirs is counted together.
    asks_usage: bool = False  # The client gets a usage, in its own events or with others.
    facts: EngineFacts | None = None  # Of the one engine that has seen the whole stream.
    # The server's own limit for a request that names none; None: the context, or it is not known.
    default_tokens: int | None = None
    prompt_ids: Sequence[int] | None = None  # None until an engine has tokenised the prompt.
    # Tokens of the prompt found in a prefix cache by the first attempt that says so; None: none
    # has.
    cached_tokens: int | None = None
    output_ids: "array[int]" = field(default_factory=partial(array, "I"))
    owner_epoch: int = (
        0  # How often the stream has gone from one proxy, or one request of its client, to another.
    )
    attempt: int = 0
    # The last attempt whose logits were no numbers; 0: none. Pages of the stream from before may
    # be the cause, so none of them is looked up any more.
    spoilt_attempt: int = 0
    head: bytes | None = (
        None  # `{"id":..,"created":..,"model":..` of the first event; every later one begins alike.
    )
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage_sent: bool = False
    # Characters that the client has, counted once a plain engine has written some, since it is not
    # known what such an engine holds back. None: exactly the text of `kvrs.text` for the output
    # ids.
    text_sent: int | None = None
    deadlines: ev.Deadlines = ev.NO_DEADLINES
    request: RequestContext | None = None
    tenant: str = ""  # Its mark; without API keys empty.
    name: str = ""  # As of `StreamJournal`.
    # For a stream that can be resumed elsewhere: where the client stands after each event that it
    # has not been given yet.
    marks: list[int] | None = None
    kept: tuple[ev.Kept, ...] = ()  # Its holders, as the former owner knew them.
    inexact: tuple[str, ...] = ()  # What cannot be continued exactly, should the stream be cut.
    # What can be only by an engine that generates the output again, and how sure that is.
    replayed: tuple[str, ...] = ()
    replays: Replays = Replays.NOWHERE
    is_predictable: bool = True  # As of `StreamJournal`.
    is_strict: bool = False  # Nothing is continued inexactly: `proxy.inexact` is `refuse`.
    # The head of the response went out without the mark that a continuation might be inexact; None:
    # it is not out.
    is_promised: bool | None = None
    # Engines get the ids of a chat's messages, and not these; its events are made here.
    is_rendered: bool = False
    # Its engine has sent text without ids (vLLM with `include_reasoning: false`): the client gets
    # that, and no other attempt can follow it.
    lacks_ids: bool = False
    counted: Usage | None = None  # By the engine, of such a stream.
    textual: int = 0  # Events of such a stream, which have no ids to count.
    # Characters that the client has of a message that the engine has parsed, by part of it, beside
    # its text.
    parsed_sent: Counter[str] | None = None
    first_write_s: float | None = None
    last_write_s: float | None = None
    longest_gap_s: float = 0.0

    @property
    def seed_is_needed(self) -> bool:
        """An engine that does not continue sampling by itself gets the seed: the client's own
        always, one of this proxy only where it makes the continuation exact. Others draw at random,
        since with the seed they would draw the same numbers again after a cut.
        """
        return self.parsed.request.seed is not None or "temperature" not in self.inexact

    @property
    def inexact_elsewhere(self) -> tuple[str, ...]:
        """Features that cannot be continued exactly at another proxy, which does not know how much
        of a parsed message the client has.
        """
        return (*self.inexact, *(each for each in self.replayed if each not in self.inexact))

    def commit_head(self) -> None:
        """The head of the response is about to be written, if it is not: what it says of the stream
        holds from now on. A whole answer has its head at its end.
        """
        if self.is_promised is None and self.parsed.request.stream:
            self.is_promised = not self.inexact

    @property
    def promise(self) -> ev.Promise:
        if not (self.is_promised or self.is_strict):
            return ev.Promise.NONE
        is_drawn = self.parsed.request.temperature > 0 and not self.replayed
        return ev.Promise.SAMPLED if is_drawn else ev.Promise.GREEDY

    @property
    def is_recoverable(self) -> bool:
        return not self.lacks_ids

    def note_missing_ids(self) -> None:
        if not self.lacks_ids:
            self.lacks_ids = True
            if "token_ids" not in self.inexact:
                self.inexact = (*self.inexact, "token_ids")

    def cannot_replay(self) -> None:
        """It goes on in another way, for good: what comes then is no output of its request."""
        self.inexact, self.replayed = self.inexact_elsewhere, ()

    @property
    def prefix(self) -> Prefix:
        """The blocks of the prompt, which all choices of a request share."""
        if self.parsed.prefix is None:
            media = not self.is_predictable
            self.parsed.prefix = prefix_of(self.parsed, has_media=media)
        return self.parsed.prefix

    @property
    def prompt_tokens_guess(self) -> int:
        return self.parsed.size_bytes // _BYTES_PER_TOKEN + 1

    @property
    def resumable(self) -> bool:
        """The client may go on with the stream at another proxy."""
        return self.marks is not None and not self.finished

    @property
    def holds_text_back(self) -> bool:
        """The engine holds back the last characters, in which a stop string may begin. One that
        makes tokens again after others divides the text among its events in another way.
        """
        stops = self.parsed.request.stop_strings
        return self.text_sent is not None and any(len(stop) > 1 for stop in stops)

    @property
    def wants_ids(self) -> bool:
        return self.parsed.request.return_token_ids

    @property
    def max_tokens(self) -> int | None:
        """None: as many as the engine has room for."""
        return self.parsed.request.max_tokens

    @property
    def prompt(self) -> "array[int] | None":
        """To be read only; None while it is not tokenised."""
        ids = self.prompt_ids
        return ids if ids is None or isinstance(ids, array) else packed(ids)

    @property
    def history(self) -> "array[int] | None":
        """Prompt and all output so far, to be read only; None while the prompt is not tokenised."""
        prompt = self.prompt_ids
        if prompt is None:
            return None
        if not isinstance(prompt, array):
            prompt = packed(prompt)
        return prompt + self.output_ids if self.output_ids else prompt

    @property
    def prompt_tokens(self) -> int:
        return 0 if self.prompt_ids is None else len(self.prompt_ids)

    @property
    def remaining_tokens(self) -> int | None:
        """How many more the client wants; None: as many as the engine has room for."""
        return None if self.max_tokens is None else self.max_tokens - len(self.output_ids)

    @property
    def default_left(self) -> int | None:
        """How many more tokens the server's own limit allows, which counts from the beginning of
        the output; None: there is none. A stream that has reached it and goes on is of a server
        that does not have it.
        """
        left = 0 if self.default_tokens is None else self.default_tokens - len(self.output_ids)
        return left if left > 0 and self.max_tokens is None else None

    @property
    def token_interval_s(self) -> float | None:
        """Mean time between two tokens of the stream; None: it has fewer than two."""
        return mean_interval_s(self.first_write_s, self.last_write_s, len(self.output_ids))

    @property
    def seq(self) -> int:
        """The position of the stream: its output tokens, then its finish and its usage as one step
        each. Where tokens have no ids, events count.
        """
        return len(self.output_ids) + self.textual + self.finished + self.usage_sent

    @property
    def finished(self) -> bool:
        """The client has all text, so that only the formal end can be missing.

        max_tokens ids are not enough: an engine may hold text back after its last id.
        """
        return self.finish_reason is not None

    @property
    def usage(self) -> Usage:
        if self.counted is not None:
            return self.counted
        return usage_of(self.prompt_tokens, len(self.output_ids), self.cached_tokens)

    @property
    def usage_so_far(self) -> Usage:
        """Usage in events within the stream: cached tokens are counted at its end."""
        return usage_of(self.prompt_tokens, len(self.output_ids), None)

    def wrote(self, now_s: float) -> None:
        """Record that token ids were written to the client now."""
        if self.last_write_s is None:
            self.first_write_s = now_s
        elif (gap_s := now_s - self.last_write_s) > self.longest_gap_s:
            self.longest_gap_s = gap_s
        self.last_write_s = now_s

    def missing_end(self) -> list[bytes]:
        """The events that a complete stream still lacks; they count as sent afterwards."""
        assert self.finished
        assert self.head is not None
        if not self.wants_usage or self.usage_sent:
            return []
        self.usage_sent = True
        facts = self.facts or NO_FACTS
        usage = with_facts(self.usage, facts)
        return [self.parsed.endpoint.event(self.head, [], usage, facts.beside)]
