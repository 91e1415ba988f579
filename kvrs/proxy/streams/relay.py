"""Relay of one attempt's events to the client.

The healthy path of a token: one search, one small list decoded, one append, one write. A read of
whole chunks, each with one event of one id that fits a known template, goes from the engine's
connection to the client's in one write (`TokenPath`); all other events are taken by `Relay`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any, Protocol

import msgspec

from kvrs.core.fleet.silence import Delivered, SilenceTimer
from kvrs.errors import UndecodableError, UpstreamError
from kvrs.protocol.instance import TokenId
from kvrs.protocol.openai.chunks import (
    BROKEN_REASONS,
    CHUNK,
    NOT_A_NUMBER,
    ChatChunkChoice,
    Choice,
    ReceivedChoice,
    ReceivedChunk,
    error_kind,
    facts_of,
    failure_body,
    refusal_body,
)
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.proxy.backends.backend import RefusedError, is_the_clients_fault
from kvrs.proxy.streams.continuation import Continuation, EngineText, Piece, ReplayedOutput
from kvrs.proxy.streams.open_stream import Client
from kvrs.proxy.wire.errors import EngineError, NotANumberError
from kvrs.proxy.wire.events import (
    PROMPT_TOKEN_IDS,
    TOKEN_IDS,
    EventForm,
    EventSplitter,
    EventTemplate,
    cut_list,
    head_of,
    next_token_ids,
    prompt_ids_of,
    shared,
    with_usage,
)
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.message_parts import TEXT, MessageParts
from kvrs.proxy.wire.requests import CHAT
from kvrs.proxy.wire.upstream import Need, Shortcut, Upstream

_MOST_BYTES = 2048  # Largest chunk with its frame; an event of one token has a few hundred bytes.
_MOST_TOKENS = 1 << 32  # Token limit for a request that names none.
_DATA = b"data: "
_END_OF_EVENT = b"\n\n"
_END_OF_CHUNK = b"\r\n"
_END = _END_OF_EVENT + _END_OF_CHUNK
_NO_HEAD = b"\n"  # Stands for a chunk's head where there is none: no chunk begins with these bytes.
_BEGINNING = re.compile(rb"([1-9a-f][0-9a-f]{0,2})\r\n" + _DATA)


def _heads() -> tuple[list[bytes], list[bytes]]:
    """Return heads of chunks by the size of the chunk; and heads with the start of an event, by the
    size of the chunk with its frame.
    """
    by_size, by_whole = [_NO_HEAD] * (_MOST_BYTES + 1), [_NO_HEAD] * (_MOST_BYTES + 1)
    for size in range(1, _MOST_BYTES + 1):
        by_size[size] = head = b"%x\r\n" % size
        whole = len(head) + size + len(_END_OF_CHUNK)
        if whole <= _MOST_BYTES:
            by_whole[whole] = head + _DATA
    return by_size, by_whole


_HEAD_BY_SIZE, _BEGINNING_BY_WHOLE = _heads()


class _Form:
    """The bytes that change when events of one template are written to the client."""

    __slots__ = (
        *("end", "framing_bytes", "ids_bytes", "is_beside_text", "opening", "part", "read"),
        "skipped_bytes",
    )

    def __init__(
        self, template: EventTemplate, journal: Journal, head_bytes: int, *, is_framed: bool
    ) -> None:
        assert journal.head is not None
        self.read = template.read
        self.part = template.part
        self.is_beside_text = template.part not in (None, TEXT)
        # `opening` replaces the event's first `skipped_bytes` if the client's head differs from the
        # engine's; below 0: the event's own frame stays, too.
        data = _DATA if is_framed else b""
        self.opening, self.skipped_bytes = b"", -len(data)
        if template.before[:head_bytes] != journal.head:
            self.opening, self.skipped_bytes = data + journal.head, head_bytes
        self.ids_bytes = template.ids_bytes
        end = b"" if journal.wants_ids else template.after[1:]
        self.end = shared(end + _END) if is_framed else end
        self.framing_bytes = len(self.opening) + len(self.end) - len(_END_OF_CHUNK)


class TokenPath:
    """Writes the usual tokens of one attempt to its client."""

    __slots__ = (
        "_client",
        "_counts_text",
        "_delivered",
        "_direct",
        "_form",
        "_forms",
        "_gathered",
        "_is_only_form",
        "_journal",
        "_most_tokens",
        "_now_s",
        "_number",
        "_parts",
        "_silence",
        "_take_token",
        "_transport",
        "_wait_for_room",
        "_wants_ids",
    )

    def __init__(
        self,
        journal: Journal,
        client: Client,
        templates: Sequence[EventTemplate],
        head_bytes: int,
        *,
        delivered: Delivered,
        silence: SilenceTimer,
        now_s: Callable[[], float],
        wait_for_room: Callable[[], None],
    ) -> None:
        """`head_bytes`: size of the events' head, which the stream's head replaces. Tokens are
        written to the connection of `client.direct`; None: `client.take_token` gets them.
        `wait_for_room` pauses reading from the engine; it is called after each write that leaves
        the client blocked.
        """
        self._journal = journal
        self._number = journal.attempt
        most = journal.parsed.request.max_tokens
        self._most_tokens = _MOST_TOKENS if most is None else most
        self._client = client
        self._take_token = client.take_token
        self._direct = direct = client.direct
        self._transport = None if direct is None else direct.transport
        self._delivered = delivered
        self._silence = silence
        self._now_s = now_s
        self._wait_for_room = wait_for_room
        self._wants_ids = journal.wants_ids
        self._counts_text = journal.text_sent is not None
        self._parts = journal.parts
        self._forms = [
            _Form(each, journal, head_bytes, is_framed=direct is not None) for each in templates
        ]
        self._form = self._forms[0]  # Form of the last event, tried first.
        self._is_only_form = len(self._forms) == 1
        # Bytes for the client while the chunks of one read are taken; None: each chunk is written.
        self._gathered: list[bytes] | None = None

    def close(self) -> None:
        """Relay nothing more; the relay itself handles further reads."""
        self._most_tokens = 0

    def take(self, data: bytes) -> bytes:
        """Relay the usual tokens at the start of a read; return the rest."""
        size, form = len(data), self._form
        if size > _MOST_BYTES or not data.startswith(beginning := _BEGINNING_BY_WHOLE[size]):
            return self._take_others(data)
        at, event_end = len(beginning), size - len(_END)
        found = form.read(data, at, event_end)
        if found is None or not data.endswith(_END):
            return data if self._is_only_form else self._take_others(data)
        token_id, text_end, text = found
        journal, transport, direct = self._journal, self._transport, self._direct
        ids, now_s = journal.output_ids, self._now_s()
        begin = at + form.skipped_bytes
        end = event_end if self._wants_ids else text_end + form.ids_bytes
        framed = form.framing_bytes + end - begin
        if (
            journal.attempt != self._number
            or journal.finish_reason is not None
            or len(ids) >= self._most_tokens
            or (transport is not None and transport.is_closing())
            or framed > _MOST_BYTES
            # A thought or a call behind an answer changes how the stream can be continued.
            or (form.is_beside_text and journal.answer_from is not None)
        ):
            return data
        ids.append(token_id)
        if self._counts_text and (part := form.part) is not None:
            if part == TEXT:
                assert journal.text_sent is not None
                journal.text_sent += len(text)
            if self._parts is not None:
                self._parts.add(part, text)
        if transport is not None and direct is not None:
            parts = (_HEAD_BY_SIZE[framed], form.opening, data[begin:end], form.end)
            if self._gathered is None:
                transport.write(b"".join(parts))
            else:
                self._gathered += parts
            direct.was_silent = False
        else:
            assert self._take_token is not None
            self._take_token(token_id, form.opening + data[begin:end] + form.end, now_s)
        if self._client.blocked:
            self._wait_for_room()
        self._silence.heard_s = self._delivered.last_s = now_s
        self._delivered.tokens += 1
        # Like `Journal.wrote`, without its first case: an event before those of the template has
        # been written.
        last_s, journal.last_write_s = journal.last_write_s, now_s
        assert last_s is not None
        if now_s - last_s > journal.longest_gap_s:
            journal.longest_gap_s = now_s - last_s
        return b""

    def _take_others(self, data: bytes) -> bytes:
        """Take a read of several chunks, or one event of another form."""
        if self._gathered is not None:
            return data
        done, size = 0, len(data)
        gathered: list[bytes] = []
        self._gathered = gathered
        try:
            while (match := _BEGINNING.match(data, done)) is not None:
                end = match.end() - len(_DATA) + int(match[1], 16) + len(_END_OF_CHUNK)
                if end > size or not self._take_any(data[done:end]):
                    break
                done = end
        finally:
            self._gathered = None
            if gathered:
                assert self._transport is not None
                self._transport.write(b"".join(gathered))
        if self._client.blocked:
            self._wait_for_room()
        return data[done:]

    def _take_any(self, chunk: bytes) -> bool:
        """Take a chunk that fits any known form; return whether it does."""
        if not self.take(chunk):
            return True
        before = self._form
        for form in self._forms:
            self._form = form
            if form is not before and not self.take(chunk):
                return True
        self._form = before
        return False


class Reported(Protocol):
    """The attempt whose answer is read, as its reader reports to it."""

    number: int
    delivered: Delivered  # Tokens of the decode instance.
    silence: SilenceTimer

    def now_s(self) -> float: ...

    def resumed(self) -> None:
        """Note that the client has the first part of the answer, or is about to get it."""

    def completed(self) -> None:
        """Note that the client has all of the answer."""


class AnswerReader:
    """Reads the answer of one attempt, and notes every read in the attempt's `silence`."""

    __slots__ = ("_attempt", "_journal", "flow", "is_complete", "shortcut")

    def __init__(self, journal: Journal, attempt: Reported) -> None:
        self._journal = journal
        self._attempt = attempt
        self.flow: Upstream | None = None
        self.shortcut: Shortcut | None = None
        self.is_complete = False

    @property
    def silence(self) -> SilenceTimer:
        return self._attempt.silence

    @property
    def is_over(self) -> bool:
        """Return whether a later attempt has taken over the stream."""
        return self._attempt.number != self._journal.attempt


# Most events from which a template is derived at the start, and one more for each
# _TOKENS_PER_LESSON tokens: a chat moves from its reasoning to its text and to its tool calls.
_MOST_LESSONS = 4
_TOKENS_PER_LESSON = 16
_MOST_TEMPLATES = 4  # Most templates of a stream; the oldest is dropped.


class ErrorEventError(EngineError):
    """The engine reported within the stream that it cannot continue."""

    def __init__(self, details: Any) -> None:
        said = details if isinstance(details, dict) else {"message": details}
        match said.get("code"):
            case int(code) if 500 <= code <= 599:
                status = code
            case _:
                status = 500
        cause = f"sent an error event{error_kind({'error': details})}"
        super().__init__(cause, status, failure_body(said))
        self.details = details


class Relay(AnswerReader):
    """Writes the events of one attempt to the journal and to the client.

    The attempt has `resumed` at its first new token or end, and again after each `expect_token`.
    With a `continuation` the relay makes the client's events from the engine's ids or text;
    otherwise it passes on the engine's own events, and drops with `replays` what the client already
    has.
    """

    __slots__ = (
        *("_client", "_continuation", "_counts_each", "_counts_text", "_first_event"),
        *("_foreign_head", "_form", "_head_bytes", "_is_first", "_lessons", "_most_tokens"),
        *("_noted", "_path", "_reads_all", "_replayed", "_sees_all", "_splitter", "_templates"),
        "_wants_ids",
    )

    def __init__(
        self,
        journal: Journal,
        client: Client,
        attempt: Reported,
        *,
        exact: bool = True,
        continuation: Continuation | EngineText | None = None,
        replays: bool = False,
    ) -> None:
        super().__init__(journal, attempt)
        self._client = client
        self._continuation = continuation
        self._replayed = ReplayedOutput(journal) if replays else None
        self._counts_text = not exact and continuation is None
        self._reads_all = self._counts_text or continuation is not None
        request = journal.parsed.request
        self._wants_ids = request.return_token_ids
        self._most_tokens = inf if request.max_tokens is None else request.max_tokens
        self._splitter, self._form = EventSplitter(), EventForm()
        self._templates: list[EventTemplate] = []  # Templates, newest first.
        # Fast path of events that fit the templates, reached by `shortcut`; None: not made yet.
        self._path: TokenPath | None = None
        self._counts_each = request.stream_options is not None and request.wants_each_usage
        self._lessons = 0  # Number of events from which a template was derived, or tried to be.
        self._is_first = not journal.output_ids
        self._sees_all = continuation is None and (self._is_first or replays)
        self._first_event = True
        # The events have another head (another time of creation) than the stream, which replaces
        # it.
        self._foreign_head = False
        self._head_bytes = 0
        self._noted = False
        if continuation is not None:
            journal.text_sent = continuation.sent
            journal.can_begin_again = False  # The output is one of two runs now.
        elif not replays:
            assert exact or not (journal.output_ids or journal.textual), (
                "a plain engine cannot go on with another's text"
            )
            journal.text_sent = None if exact else 0
            journal.parts = None
            if not exact and journal.parsed.endpoint is CHAT:
                journal.parts = MessageParts()

    def feed(self, data: bytes) -> Need:
        """Relay the events of one read in one write.

        Raises:
            UpstreamError: the attempt failed; what it delivered before stays delivered.
            RefusedError: the engine rejected the request within the stream.
            UndecodableError: a parsed piece of the message cannot be read.
            ClientGoneError: the client is gone.
        """
        self._attempt.silence.heard_s = self._attempt.now_s()
        # Drop late tokens of a superseded attempt.
        if self._attempt.number != self._journal.attempt:
            return Need.NOTHING
        if not self._pass_on(self._splitter.feed(data)):
            if self._templates:
                self.shortcut = self._find_shortcut()
            return Need.MORE
        self.is_complete = True
        self.shortcut = None
        # The client does not wait for the rest of the response, whose failure does not concern the
        # stream.
        self._attempt.completed()
        return Need.END if self._continuation is None else Need.NOTHING

    def _find_shortcut(self) -> Shortcut | None:
        """Return the fast path of tokens by the templates known now."""
        if self._splitter.rest or self._journal.last_write_s is None:
            return None
        if self._path is None:
            attempt = self._attempt
            self._path = TokenPath(
                self._journal,
                self._client,
                self._templates,
                self._head_bytes,
                delivered=attempt.delivered,
                silence=attempt.silence,
                now_s=attempt.now_s,
                wait_for_room=self.wait_for_room,
            )
        return self._path.take

    def check_end(self) -> None:
        """Check that the stream has ended, when its response has ended or is no longer needed.

        Raises:
            UpstreamError: the response ended before the stream.
        """
        if not self.is_complete and not self.is_over:
            raise UpstreamError("ended without a finish reason and [DONE]")

    def wait_for_room(self) -> None:
        """Pause reading from the engine until the client has read."""
        if self.flow is not None:
            self.flow.pause()
            self._client.when_free(self._resume)

    def _resume(self) -> None:
        # Do not resume the connection of a finished attempt: it may serve another attempt.
        if self.flow is not None and not self.is_complete:
            self._attempt.silence.heard_s = (
                self._attempt.now_s()
            )  # The silence until now was this proxy's fault.
            self.flow.resume()

    def expect_token(self) -> None:
        """Report the next token by `resumed` again, like a first token."""
        self._noted = False
        if self._path is not None:
            self._path.close()
            self._path = self.shortcut = None

    def leave(self) -> None:
        """Note that the decode call has ended."""
        self.flow = self._path = self.shortcut = None

    def end_alone(self) -> None:
        """Send the end of a stream that has all its ids, without an engine."""
        assert self._continuation is not None
        event = self._own_event(self._continuation.end())
        self._attempt.resumed()
        if self._journal.marks is not None:
            self._journal.marks.append(self._journal.seq)
        self._client.send([self._counted(event) if self._counts_each else event])

    def _counted(self, event: bytes) -> bytes:
        """Return the event with the stream's usage so far, over all attempts; the usage event at
        the end stays as it is.
        """
        journal = self._journal
        return event if journal.usage_sent else with_usage(event, journal.usage_so_far)

    def _pass_on(self, payloads: list[bytes]) -> bool:
        """Relay the events of one chunk in one write; return whether the stream is complete."""
        journal = self._journal
        had_tokens = len(journal.output_ids)
        events: list[bytes] = []
        fault: UpstreamError | RefusedError | UndecodableError | None = None
        done = False
        try:
            for payload in payloads:
                if payload == b"[DONE]":
                    if journal.finish_reason is None:
                        raise UpstreamError("sent [DONE] without a finish reason")
                    done = True
                    break
                for event in self._taken(payload):
                    events.append(self._counted(event) if self._counts_each else event)
                    journal.textual += journal.lacks_ids
                    if journal.marks is not None:
                        journal.marks.append(journal.seq)
                # The proxy itself found the end, so the engine's other events are not needed.
                if self._continuation is not None and journal.finish_reason is not None:
                    done = True
                    break
        except (UpstreamError, RefusedError, UndecodableError) as error:
            # Events before the fault in the same chunk are in the journal, so the client must get
            # them.
            fault = error
        new_tokens = len(journal.output_ids) - had_tokens
        is_new = new_tokens or (journal.lacks_ids and events)
        if events:
            self._client.send(events)
            if self._client.blocked:
                self.wait_for_room()
        if not self._noted and (is_new or journal.finish_reason is not None):
            # The client gets its token before the core is informed, which measures the gap since
            # the write before.
            self._noted = True
            self._attempt.resumed()
        if is_new:
            now_s = self._attempt.now_s()
            journal.wrote(now_s)
            self._attempt.delivered.last_s = now_s
            self._attempt.delivered.tokens += new_tokens
        if fault is not None:
            raise fault
        return done

    def _taken(self, data: bytes) -> Iterator[bytes]:
        """Take one event; yield the events that the client gets for it, of which a second run may
        have held back several. The journal is that of each event when it is yielded.
        """
        if self._replayed is None:
            if (event := self._take(data)) is not None:
                yield event
            return
        data = self._form.usual(data)
        chunk = self._decoded(data)
        if not chunk.choices:
            if (event := self._take_usage(data, chunk)) is not None:
                yield event
            return
        if chunk.choices[0].token_ids and TOKEN_IDS not in data:
            data = self._form.rewritten(data)
        new = self._replayed.take(data, chunk.choices[0])
        if self._replayed.is_over:
            self._replayed = None
        for each in new:
            if (event := self._pass_choice(*each)) is not None:
                yield event

    def _take(self, data: bytes) -> bytes | None:
        """Append the ids of one event to the journal; return the event as the client gets it (None:
        the client gets nothing).
        """
        usual = self._form.usual(data)
        found = None if self._reads_all else next_token_ids(usual)
        if found is None:
            event = self._take_rare(usual)
        else:
            ids, without_ids = found
            event = self._trim(usual if self._wants_ids else without_ids)
            self._append(ids)
        is_last = self._journal.finish_reason is not None
        if event is not None and usual is data and not is_last and self._may_learn():
            self._learn(usual)
        return event

    def _may_learn(self) -> bool:
        """Return whether an event may become a template of the token path: this stream passes usual
        events on as the engine sends them.
        """
        journal = self._journal
        most = _MOST_LESSONS + len(journal.output_ids) // _TOKENS_PER_LESSON
        return (
            self._lessons < most
            and not (self._counts_each or journal.lacks_ids)
            and self._continuation is None
            and self._replayed is None
            and bool(self._client.direct or self._client.take_token)
        )

    def _learn(self, data: bytes) -> None:
        for known in self._templates:
            if known.read(data, 0, len(data)) is not None:
                # The template is known; the event came here because it arrived in several reads.
                return
        self._lessons += 1
        # The event's own head may differ in length from the head of the first event.
        template = EventTemplate.of(data, self._head_bytes)
        if template is not None and self._is_begun(template.part):
            self._templates = [template, *self._templates[: _MOST_TEMPLATES - 1]]
            self._path = None

    def _is_begun(self, part: str | None) -> bool:
        """Return whether the journal has noted the begin of the part, which changes how the stream
        can be continued.
        """
        parts = self._journal.parts if self._counts_text else None
        return parts is None or part is None or part in parts.names()

    def _take_rare(self, data: bytes) -> bytes | None:
        """Take first, last and unusual events like `_take`, with full decoding."""
        event = self._decoded(data)
        if not event.choices:
            return self._take_usage(data, event)
        # The key `token_ids` is written with escapes, so the byte search has not found it.
        if event.choices[0].token_ids and TOKEN_IDS not in data:
            data = self._form.rewritten(data)
        return self._pass_choice(data, event.choices[0])

    def _decoded(self, data: bytes) -> ReceivedChunk:
        """Decode an event, and check that its choice can belong to the stream."""
        try:
            event = CHUNK.decode(data)
        except UNREADABLE:
            if _is_of_parser(data):  # Other servers' parsers would make the same of the output.
                raise UndecodableError("the engine sent a malformed piece of an answer") from None
            raise UpstreamError("sent an event that is not a completion chunk") from None
        if event.error is not None:
            _raise_error_event(event.error)
        if not event.choices:
            return event
        choice = event.choices[0]
        if choice.token_ids is None and (choice.plain_text or choice.is_parsed):
            if self._journal.output_ids:
                raise UpstreamError("sent text without token ids behind tokens with ids")
            self._journal.note_missing_ids()
        if choice.finish_reason in BROKEN_REASONS:
            raise UpstreamError(f"finished with {choice.finish_reason[:40]!r}")
        return event

    def _pass_choice(self, data: bytes, choice: ReceivedChoice) -> bytes | None:
        """Append the ids of a decoded event to the journal; return the event as the client gets
        it.
        """
        ids = choice.token_ids or []
        # A later attempt may open with an empty event, whose contents the client already has.
        says = ids or choice.plain_text or choice.is_parsed or choice.finish_reason is not None
        if not says and self._journal.head is not None:
            return None
        if self._continuation is not None:
            return self._own_event(
                self._continuation.take(
                    ids, choice.finish_reason, choice.stop_reason, choice.plain_text
                ),
                choice,
            )
        trimmed = self._trim(data if self._wants_ids else cut_list(data, TOKEN_IDS))
        self._append(ids)
        self._journal.finish_reason = choice.finish_reason
        self._journal.stop_reason = choice.stop_reason
        if self._counts_text:
            try:
                # The next token is reported again, if the policy has to learn of another need.
                if self._journal.note_text(choice, len(ids)):
                    self._noted = False
            except UNREADABLE:
                raise UndecodableError("the engine sent a malformed tool call") from None
        return trimmed

    def _own_event(self, piece: Piece, received: ReceivedChoice | None = None) -> bytes:
        journal = self._journal
        assert journal.head is not None
        choice = journal.parsed.endpoint.choice(piece.delta)
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        if isinstance(choice, ChatChunkChoice) and not journal.output_ids:
            choice.delta.role = "assistant"
        if (
            isinstance(choice, Choice)
            and received is not None
            and piece.token_ids
            and journal.parsed.request.wanted_logprobs is not None
        ):
            choice.logprobs = _continued(received, piece)
        if self._wants_ids:
            choice.token_ids = piece.token_ids
        event = journal.parsed.endpoint.event(journal.head, [choice])
        # The journal contains only what the client gets.
        self._append(piece.token_ids)
        journal.finish_reason, journal.stop_reason = piece.finish_reason, piece.stop_reason
        assert journal.text_sent is not None
        journal.text_sent += len(piece.delta.text)
        if journal.parts is not None:
            journal.parts.add(TEXT, piece.delta.text)
        return event

    def _take_usage(self, data: bytes, event: ReceivedChunk) -> bytes | None:
        """Return the usage event with the proxy's own counts: a decode instance does not know
        prefill's cached tokens. Other facts of an engine are kept if that engine has seen the whole
        stream.
        """
        journal = self._journal
        if event.usage is None or not journal.finished:
            return None
        if journal.lacks_ids:  # Without ids only the engine has counted the stream's tokens.
            journal.counted = event.usage
        if self._is_first and journal.cached_tokens is None:
            journal.cached_tokens = event.usage.cached_tokens
        if self._sees_all:
            journal.facts = facts_of(msgspec.json.decode(data))
        return next(iter(journal.missing_end()), None)

    def _append(self, ids: list[int]) -> None:
        journal = self._journal
        if journal.finish_reason is not None:
            raise UpstreamError("went on after its finish reason")
        if len(journal.output_ids) + len(ids) > self._most_tokens:
            raise UpstreamError("sent more than max_tokens tokens")
        journal.output_ids.extend(ids)

    def _trim(self, data: bytes) -> bytes:
        """Return the event as the client gets it: with the stream's head, and with ids only if
        wanted.
        """
        journal = self._journal
        if self._first_event:
            self._first_event = False
            head = head_of(data)
            if journal.prompt_ids is None and PROMPT_TOKEN_IDS not in data:
                journal.note_missing_ids()
            elif journal.prompt_ids is None:
                journal.prompt_ids = journal.parsed.tokenised(prompt_ids_of(data))
                journal.parsed.pack()
            # Prompt ids belong to the stream's first event; a later attempt's prompt ids include
            # output.
            if journal.head is not None or not self._wants_ids:
                data = cut_list(data, PROMPT_TOKEN_IDS)
            journal.head = journal.head or head
            self._head_bytes = len(head)
            self._foreign_head = head != journal.head
        if self._foreign_head:
            assert journal.head is not None
            data = journal.head + data[len(head_of(data)) :]
        return data


def _continued(received: ReceivedChoice, piece: Piece) -> Any:
    """Return the log probabilities of the piece's ids, with their offsets in the whole output."""
    try:
        found = received.logprob_lists()
    except UNREADABLE:
        found = {}
    if not found:
        raise UpstreamError("sent tokens without readable log probabilities")
    kept = {name: values and values[: len(piece.token_ids)] for name, values in found.items()}
    return kept | {"text_offset": list(piece.offsets)}


class _Unparsed(msgspec.Struct):
    """A choice of a chat but for what a parser makes."""

    delta: msgspec.Raw
    finish_reason: str | None = None
    token_ids: list[TokenId] | None = None


class _UnparsedChunk(msgspec.Struct):
    choices: list[_Unparsed]


_UNPARSED = msgspec.json.Decoder(_UnparsedChunk)


def _is_of_parser(data: bytes) -> bool:
    """Return whether only that part of an event cannot be read which a parser makes."""
    try:
        _UNPARSED.decode(data)
    except UNREADABLE:
        return False
    return True


def _raise_error_event(error: Any) -> None:
    match error:
        case {"message": str(), "code": int(code)} if is_the_clients_fault(code):
            # vLLM sends this error if it finds the fault after the status.
            raise RefusedError(code, refusal_body(error))
        case {"code": str(code)} if code == NOT_A_NUMBER:
            raise NotANumberError(f"sent an error event{error_kind({'error': error})}")
        case _:
            raise ErrorEventError(error)
