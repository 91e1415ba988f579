"""Journal of one stream: enough to continue the stream at any instance, and to end it without one.

The journal is the reference for what the client has. Ids are appended in the same iteration of the
event loop in which their bytes are written to the client's socket, so the two never differ.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrs.core.fleet.known import Replays
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import Prefix
from kvrs.core.model.streams import mean_interval_s
from kvrs.ids import StreamId
from kvrs.protocol.openai.chunks import (
    NO_FACTS,
    EngineFacts,
    ReceivedChoice,
    Usage,
    usage_of,
    with_facts,
)
from kvrs.protocol.openai.requests import packed
from kvrs.proxy.wire.message_parts import REASONING, TEXT, MessageParts, parsed_parts
from kvrs.proxy.wire.requests import ParsedRequest, RequestContext, prefix_of

# Bytes of text per token, to estimate a prompt's length until prefill has counted its tokens.
_BYTES_PER_TOKEN = 4


@dataclass(slots=True, eq=False)
class Exactness:
    """Features of a request and its output that no recovery continues exactly, and promises."""

    inexact: tuple[str, ...] = ()  # Features that would be inexact after a cut.
    # Features that only a replay continues exactly; `replays` says where a replay is possible.
    replayed: tuple[str, ...] = ()
    replays: Replays = Replays.NOWHERE
    # The stream is not continued from its ids: its output may hold tool calls, whose parser would
    # begin in the middle, or follows a grammar that would begin anew.
    never_as_text: bool = False
    # Each request at the engine has a random generator of its own, which begins with its seed.
    has_generator: bool = True
    is_strict: bool = False  # Inexact continuations are forbidden: `proxy.inexact` is `refuse`.
    # True: the sent head promises exactness; False: it warns of inexactness; None: not sent yet.
    is_promised: bool | None = None

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Return the features that another proxy cannot continue exactly, because it does not know
        how much of a parsed message the client has.
        """
        return (*self.inexact, *(each for each in self.replayed if each not in self.inexact))

    def commit(self) -> None:
        """Note that a head is about to be written: its promise holds from now on."""
        if self.is_promised is None:
            self.is_promised = not self.inexact

    def mark(self, name: str) -> None:
        """Note a feature that would be inexact after a cut."""
        if name not in self.inexact:
            self.inexact = (*self.inexact, name)

    def note(self, name: str, *, may_come_again: bool, lacks_ids: bool) -> None:
        """Note a feature of the output that shows only while the stream runs: a second run
        continues it, with certainty only where every instance has the processor for that.
        """
        if name not in self.replayed and may_come_again:
            self.replayed = (*self.replayed, name)
        if lacks_ids or self.replays is not Replays.ALWAYS or name not in self.replayed:
            self.mark(name)

    def forgo_replay(self) -> None:
        """Note that the stream continues or ends without a replay: the features in `replayed`
        become inexact.
        """
        self.inexact, self.replayed = self.elsewhere, ()


@dataclass(slots=True, eq=False)
class Journal:
    """State of one stream, which is one choice of one request. Only attempt `attempt` of the owner
    with `owner_epoch` writes to the journal; attempt 0: no attempt has begun.
    """

    stream: StreamId
    parsed: ParsedRequest
    arrived_s: float
    seed: int | None = None  # Seed of the sampling in every attempt; None: greedy decoding.
    # The stream ends with a usage event. False for several choices, whose usage is counted
    # together.
    wants_usage: bool = False
    # The client gets a usage event, of this stream or of all choices together.
    asks_usage: bool = False
    # Further facts that the engine gave with its usage; None: none, or more than one engine ran the
    # stream.
    facts: EngineFacts | None = None
    # Output limit of the server for a request without `max_tokens`; None: the context's, or
    # unknown.
    default_tokens: int | None = None
    # Token ids of the prompt; None until an engine has tokenised it.
    prompt_ids: Sequence[int] | None = None
    # Number of prompt tokens from a prefix cache, by the first attempt that reports it; None: not
    # reported.
    cached_tokens: int | None = None
    output_ids: "array[int]" = field(default_factory=partial(array, "I"))
    # Number of moves of the stream between proxies, or between requests of its client.
    owner_epoch: int = 0
    attempt: int = 0
    # Last attempt whose logits were not numbers, that could not load KV from a store, or whose
    # instance has a store that is not trusted; 0: none. Calls from then on look up no KV computed
    # before.
    spoilt_attempt: int = 0
    # `{"id":..,"created":..,"model":..` of the first event, with which every later one begins.
    head: bytes | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage_sent: bool = False
    # Number of characters that the client has, counted from a plain engine's first output, because
    # such an engine may hold text back. None: not counted; the client has the whole text of the
    # output ids.
    text_sent: int | None = None
    deadlines: ev.Deadlines = ev.NO_DEADLINES
    request: RequestContext | None = None
    tenant: str = ""  # Mark of the tenant's secret; empty without API keys.
    # Key of the alias or adapter, as in `StreamJournal`; "": every instance serves it.
    name: str = ""
    # For a resumable stream: its position (`seq`) after each event that the client's record lacks
    # yet; None: not resumable.
    marks: list[int] | None = None
    kept: tuple[ev.Kept, ...] = ()  # Holders of the stream's KV that the former owner knew.
    exactness: Exactness = field(default_factory=Exactness)
    is_predictable: bool = True  # The number of the prompt's tokens determines the time of prefill.
    # The proxy sends engines a chat's rendered messages as ids, and makes the chat's events itself.
    is_rendered: bool = False
    # The engine has sent text without ids (vLLM with `include_reasoning: false`): the client gets
    # the text, and no other attempt can follow.
    lacks_ids: bool = False
    # Usage that the engine counted for a stream without ids; None: counted from the ids.
    counted: Usage | None = None
    textual: int = 0  # Number of events passed on in a stream without ids.
    # Nothing outside this journal has any of the output before its end, so that it can be dropped.
    can_begin_again: bool = False
    # Texts of a chat's message that the client has; None: not a chat of an engine with parsers.
    parts: MessageParts | None = None
    # Numbers of ids before and behind the event that began the text behind a thought; None: no
    # thought came, or it has not ended.
    answer_from: tuple[int, int] | None = None
    has_plain_answers: bool = False  # An answer behind a thought is the text of its ids.
    first_write_s: float | None = None
    last_write_s: float | None = None
    longest_gap_s: float = 0.0

    @property
    def seed_is_needed(self) -> bool:
        """Return whether an engine that does not continue sampling itself gets the seed: the
        client's seed always, the proxy's only if it makes the continuation exact. Otherwise engines
        draw at random, because a seed would repeat the same numbers after a cut.
        """
        is_given = self.parsed.request.seed is not None
        kept = self.exactness
        return is_given or "temperature" not in kept.inexact or "temperature" in kept.replayed

    def commit_head(self) -> None:
        """Note that the response's head is about to be written: its promise of exactness holds from
        now on. The head of a whole answer is written at the end, and promises nothing.
        """
        if self.parsed.request.stream:
            self.exactness.commit()

    @property
    def promise(self) -> ev.Promise:
        kept = self.exactness
        if not (kept.is_promised or kept.is_strict):
            return ev.Promise.NONE
        is_drawn = self.parsed.request.temperature > 0 and not kept.replayed
        return ev.Promise.SAMPLED if is_drawn else ev.Promise.GREEDY

    @property
    def inexact(self) -> tuple[str, ...]:
        return self.exactness.inexact

    @property
    def unkept(self) -> Sequence[str]:
        kept = self.exactness
        return [each for each in kept.inexact if each not in kept.replayed]

    @property
    def is_sampled(self) -> bool:
        return self.parsed.request.temperature > 0

    @property
    def is_repeatable(self) -> bool:
        """Return whether equal engines generate the same output for the same request, so that a
        second run can be compared with what the client has.
        """
        is_known = not self.lacks_ids if self.parts is None else self.parts.is_whole
        return is_known and (
            not self.is_sampled or (self.exactness.has_generator and self.seed_is_needed)
        )

    @property
    def may_come_again(self) -> bool:
        """Return whether some instance generates the known output again: an equal one, or one with
        the processor, which is told the ids.
        """
        is_told = self.exactness.replays is not Replays.NOWHERE and not self.lacks_ids
        return is_told or self.is_repeatable

    @property
    def is_recoverable(self) -> bool:
        return not self.lacks_ids or self.begins_again or self.is_repeatable

    @property
    def only_replay(self) -> bool:
        """Return whether nothing but a second run of the request may continue the stream: its ids
        do not determine what the client has to get next.
        """
        if self.is_rendered or (self.can_begin_again and self.begins_again):
            return False
        if self.exactness.never_as_text or self.lacks_ids:
            return True
        is_in_answer = self.answer_from is not None and self.has_plain_answers
        return self.parts is not None and self.parts.is_parsed and not is_in_answer

    @property
    def needs_replay(self) -> bool:
        """Return whether only a second run continues the stream exactly. Behind a thought, the rest
        of an answer is plain text.
        """
        if self.is_rendered or (self.can_begin_again and self.begins_again):
            return False
        return self.only_replay or self.exactness.replayed not in ((), (REASONING,))

    @property
    def begins_again(self) -> bool:
        """Return whether a recovery makes the request again as it was, because the client has
        nothing of the answer, and a continuation might differ. (Without a seed of the client, drawn
        tokens differ anyway.)
        """
        if not self.can_begin_again or self.finished:
            return False
        kept = self.exactness
        is_bound = kept.never_as_text or self.lacks_ids or kept.replayed
        return bool(is_bound) or any(each != "temperature" for each in kept.inexact)

    @property
    def produced_tokens(self) -> int:
        """Number of tokens behind which a recovery continues; without ids, of events with text."""
        if self.can_begin_again and self.begins_again:
            return 0
        return self.textual if self.lacks_ids else len(self.output_ids)

    def begin_again(self) -> None:
        """Forget the output, which the client has nothing of."""
        del self.output_ids[:]
        self.textual, self.lacks_ids, self.counted = 0, False, None
        self.stop_reason = self.facts = self.answer_from = self.parts = None

    def note_missing_ids(self) -> None:
        if not self.lacks_ids:
            self.lacks_ids = True
            self._note("token_ids")

    def _note(self, name: str) -> None:
        again = self.may_come_again
        self.exactness.note(name, may_come_again=again, lacks_ids=self.lacks_ids)

    def note_text(self, choice: ReceivedChoice, ids: int) -> bool:
        """Note the text and the parsed parts of an event with so many ids, which the client gets;
        return whether this changes how the stream can be continued.

        Raises:
            msgspec.DecodeError: a tool call has another form.
        """
        text, was_only_replay = choice.plain_text, self.only_replay
        assert self.text_sent is not None
        self.text_sent += len(text)
        if self.parts is None:
            return False
        if choice.is_parsed:
            self._note_parsed(choice)
        if text:
            self.parts.add(TEXT, text)
            if (
                self.answer_from is None
                and self.parts.is_parsed
                and not self.exactness.never_as_text
            ):
                self.answer_from = len(self.output_ids) - ids, len(self.output_ids)
        return self.only_replay is not was_only_replay

    def _note_parsed(self, choice: ReceivedChoice) -> None:
        assert self.parts is not None
        for part, text in parsed_parts(choice):
            self.parts.add(part, text)
            self._note(REASONING if part == REASONING else "tools")
            # The rest of a call follows; or the thought follows text, and only a parser tells which
            # of the ids belong to it.
            if part != REASONING or self.parts.text(TEXT):
                self.exactness.never_as_text = True
        self.answer_from = None

    def restore(self, events: Iterable[tuple[ReceivedChoice, int]]) -> None:
        """Note the choices that the client has, each with its number of ids, of a chat that ran at
        another proxy.
        """
        ids, self.output_ids = self.output_ids, array("I")
        self.text_sent, self.parts = 0, MessageParts()
        for choice, count in events:
            at = len(self.output_ids)
            self.output_ids.extend(ids[at : at + count])
            self.note_text(choice, count)
        self.output_ids = ids

    @property
    def prefix(self) -> Prefix:
        """Return the block hashes of the prompt, computed once for all choices of a request."""
        if self.parsed.prefix is None:
            media = not self.is_predictable
            self.parsed.prefix = prefix_of(self.parsed, has_media=media)
        return self.parsed.prefix

    @property
    def prompt_tokens_guess(self) -> int:
        return self.parsed.size_bytes // _BYTES_PER_TOKEN + 1

    @property
    def resumable(self) -> bool:
        """Return whether the client may continue the stream at another proxy."""
        return self.marks is not None and not self.finished

    @property
    def holds_text_back(self) -> bool:
        """Return whether the engine may hold back the last characters, because they may begin a
        stop string. An engine that replays output divides the text differently among its events.
        """
        stops = self.parsed.request.stop_strings
        return self.text_sent is not None and any(len(stop) > 1 for stop in stops)

    @property
    def wants_ids(self) -> bool:
        return self.parsed.request.return_token_ids

    @property
    def max_tokens(self) -> int | None:
        """Output limit; None: as many as the engine has room for."""
        return self.parsed.request.max_tokens

    @property
    def prompt(self) -> "array[int] | None":
        """Ids of the prompt, read-only; None: not tokenised yet."""
        ids = self.prompt_ids
        return ids if ids is None or isinstance(ids, array) else packed(ids)

    @property
    def history(self) -> "array[int] | None":
        """Ids of the prompt and all output, read-only; None: prompt not tokenised yet."""
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
        """Tokens that the client still wants; None: as many as the engine has room for."""
        return None if self.max_tokens is None else self.max_tokens - len(self.output_ids)

    @property
    def default_left(self) -> int | None:
        """Return the tokens left within the server's own limit, which counts from the start of the
        output; None: no limit applies. A stream that is already longer than the limit is at a
        server without one.
        """
        left = 0 if self.default_tokens is None else self.default_tokens - len(self.output_ids)
        return left if left > 0 and self.max_tokens is None else None

    @property
    def token_interval_s(self) -> float | None:
        """Mean time in seconds between two tokens of the output; None: fewer than two tokens."""
        return mean_interval_s(self.first_write_s, self.last_write_s, len(self.output_ids))

    @property
    def seq(self) -> int:
        """Position of the stream: the number of its output tokens, plus 1 for its finish and 1 for
        its usage once sent. Without ids, each event of text counts as a token.
        """
        return len(self.output_ids) + self.textual + self.finished + self.usage_sent

    @property
    def finished(self) -> bool:
        """Return whether the client has all text, so that only the formal end can be missing.

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
        """Usage for events within the stream, without cached tokens, which only the event at the
        end counts.
        """
        return usage_of(self.prompt_tokens, len(self.output_ids), None)

    def wrote(self, now_s: float) -> None:
        """Record that token ids were written to the client now."""
        if self.last_write_s is None:
            self.first_write_s = now_s
        elif (gap_s := now_s - self.last_write_s) > self.longest_gap_s:
            self.longest_gap_s = gap_s
        self.last_write_s = now_s

    def missing_end(self) -> list[bytes]:
        """Events that a complete stream still lacks; they count as sent afterwards."""
        assert self.finished
        assert self.head is not None
        if not self.wants_usage or self.usage_sent:
            return []
        self.usage_sent = True
        facts = self.facts or NO_FACTS
        usage = with_facts(self.usage, facts)
        return [self.parsed.endpoint.event(self.head, [], usage, facts.beside)]
