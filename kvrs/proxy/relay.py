"""Copies one attempt's events to the client.

The healthy path of a token: one search, one small list decoded, one append, one write.
"""

from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from kvrs.errors import UpstreamError
from kvrs.protocol.openai import Choice, Usage, error_body, error_kind
from kvrs.proxy.backends.backend import RefusedError, is_the_clients_fault
from kvrs.proxy.backends.peer import UNREADABLE
from kvrs.proxy.clients import Client
from kvrs.proxy.continuation import Continuation, Piece
from kvrs.proxy.journal import Journal
from kvrs.proxy.sse import PROMPT_TOKEN_IDS, TOKEN_IDS, EventSplitter, cut_list, head_of, next_token_ids, prompt_ids_of

# Ends that mean "broken" rather than "complete" are all others (vLLM: the request was aborted, or its engine failed).
_COMPLETE_REASONS = frozenset({"stop", "length", "tool_calls"})


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # Its newer name in other engines.
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: msgspec.Raw = msgspec.Raw()

    @property
    def plain_text(self) -> str:
        return self.text or self.delta.content or ""

    @property
    def parsed(self) -> bool:
        """Whether the engine made more of the output than text."""
        return bool(self.delta.reasoning_content or self.delta.reasoning or self.delta.tool_calls)


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)
_NONE = msgspec.Raw(b"null")
_LOGPROBS = msgspec.json.Decoder(dict[str, list[Any] | None])


class ErrorEventError(UpstreamError):
    """The engine said itself, within the stream, that it cannot go on. `said` is what it said."""

    def __init__(self, said: Any) -> None:
        super().__init__(f"sent an error event{error_kind({'error': said})}")
        self.said = said


class Relay:
    """One attempt's way into the journal and to the client.

    `resumed` is called once, at its first new token or at the end that it adds. With a `continuation` the client's events are
    made here, from the engine's ids alone; otherwise they are the engine's own.
    """

    def __init__(
        self,
        journal: Journal,
        client: Client,
        attempt: int,
        *,
        clock: Callable[[], float],
        resumed: Callable[[], None],
        relayed: Callable[[int], None],
        exact: bool = True,
        continuation: Continuation | None = None,
    ) -> None:
        self._journal = journal
        self._client = client
        self._attempt = attempt
        self._clock = clock
        self._resumed = resumed
        self._relayed = relayed
        self._continuation = continuation
        self._counts_text = not exact and continuation is None
        self._reads_all = self._counts_text or continuation is not None
        self._splitter = EventSplitter()
        self._first_event = True
        self._foreign_head = False  # A later attempt's events carry another time of creation: exchange it.
        self._noted = False
        if continuation is not None:
            journal.text_sent = continuation.sent
        else:
            assert exact or not journal.output_ids, "a plain engine cannot go on with another's text"
            journal.text_sent = None if exact else 0

    async def copy(self, chunks: AsyncIterator[bytes], heard: Callable[[], None]) -> bool:
        """Relay until the stream is complete (True), or this attempt is no longer its writer (False).

        `heard` is called for every chunk.

        Raises:
            UpstreamError: the attempt failed; what it delivered before stays delivered.
            RefusedError: the engine finds the request wrong, and says so in the stream.
            ClientGoneError: nobody reads any more.
        """
        async for chunk in chunks:
            heard()
            # A late token of a writer we gave up on.
            if self._attempt != self._journal.attempt:
                return False
            if await self._pass_on(self._splitter.feed(chunk)):
                return True
        raise UpstreamError("ended without a finish reason and [DONE]")

    async def end_alone(self) -> None:
        """Give the client the end of a stream that has all its ids, without an engine."""
        assert self._continuation is not None
        event = self._own_event(self._continuation.end())
        self._note_resumed()
        if self._journal.marks is not None:
            self._journal.marks.append(self._journal.seq)
        await self._client.send([event])

    async def _pass_on(self, payloads: list[bytes]) -> bool:
        """Relay the events of one chunk in one write; whether the stream is complete."""
        had_tokens = len(self._journal.output_ids)
        events: list[bytes] = []
        fault: UpstreamError | RefusedError | None = None
        done = False
        try:
            for payload in payloads:
                done = self._is_done(payload)
                if done:
                    break
                if (event := self._take(payload)) is not None:
                    events.append(event)
                    if self._journal.marks is not None:
                        self._journal.marks.append(self._journal.seq)
                # Where the proxy finds the end itself, the engine need not be listened to any longer.
                if self._continuation is not None and self._journal.finished:
                    done = True
                    break
        except (UpstreamError, RefusedError) as error:
            # What came before the fault in the same chunk is in the journal already, so the client must get it.
            fault = error
        new_tokens = len(self._journal.output_ids) - had_tokens
        if new_tokens or self._journal.finished:
            self._note_resumed()
        if events:
            await self._client.send(events)
        if new_tokens:
            self._journal.wrote(self._clock())
            self._relayed(new_tokens)
        if fault is not None:
            raise fault
        return done

    def _note_resumed(self) -> None:
        # Before the write: a client that does not read makes it wait, and that is no cost of the attempt. And the gap to the
        # last write is read by whoever hears of it.
        if not self._noted:
            self._noted = True
            self._resumed()

    def _is_done(self, payload: bytes) -> bool:
        if payload != b"[DONE]":
            return False
        if not self._journal.finished:
            raise UpstreamError("sent [DONE] without a finish reason")
        return True

    def _take(self, data: bytes) -> bytes | None:
        """Journal one event; what the client gets of it, if anything."""
        ids = None if self._reads_all else next_token_ids(data)
        if not ids:
            return self._take_rare(data)
        event = self._trim(data)
        self._append(ids)
        return event

    def _take_rare(self, data: bytes) -> bytes | None:
        """As `_take`, for the first, the last and the unusual: decoded whole."""
        try:
            event = _EVENT.decode(data)
        except UNREADABLE:
            raise UpstreamError("sent an event that is not a completion chunk") from None
        if event.error is not None:
            _raise_error_event(event.error)
        if not event.choices:
            return self._take_usage(data, event)
        return self._take_choice(data, event.choices[0])

    def _take_choice(self, data: bytes, choice: _Choice) -> bytes | None:
        if choice.token_ids is None and (choice.plain_text or choice.parsed):
            raise UpstreamError("sent text without token ids, which cannot be continued elsewhere")
        if choice.finish_reason is not None and choice.finish_reason not in _COMPLETE_REASONS:
            raise UpstreamError(f"finished with {choice.finish_reason[:40]!r}")
        ids = choice.token_ids or []
        # A later attempt may open with an event that says nothing; the stream was opened long ago.
        says = ids or choice.plain_text or choice.parsed or choice.finish_reason is not None
        if not says and self._journal.head is not None:
            return None
        if self._continuation is not None:
            return self._own_event(self._continuation.take(ids, choice.finish_reason, choice.stop_reason), choice.logprobs)
        trimmed = self._trim(data)
        self._append(ids)
        self._journal.finish_reason = choice.finish_reason
        self._journal.stop_reason = choice.stop_reason
        if self._counts_text:
            self._count_text(choice)
        return trimmed

    def _count_text(self, choice: _Choice) -> None:
        journal = self._journal
        assert journal.text_sent is not None
        journal.text_sent += len(choice.plain_text)
        if choice.parsed and "messages" not in journal.inexact:
            # Only the engine's own parser knows how to go on from here.
            journal.inexact = (*journal.inexact, "messages")

    def _own_event(self, piece: Piece, logprobs: msgspec.Raw = _NONE) -> bytes:
        journal = self._journal
        assert journal.head is not None
        self._append(piece.token_ids)
        journal.finish_reason, journal.stop_reason = piece.finish_reason, piece.stop_reason
        assert journal.text_sent is not None
        journal.text_sent += len(piece.delta.text)
        choice = journal.asked.form.choice(piece.delta)
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        if isinstance(choice, Choice) and piece.token_ids and journal.asked.request.wanted_logprobs is not None:
            choice.logprobs = _continued(logprobs, piece)
        if journal.wants_ids:
            choice.token_ids = piece.token_ids
        return journal.asked.form.event(journal.head, [choice])

    def _take_usage(self, data: bytes, event: _Event) -> bytes | None:
        journal = self._journal
        if event.usage is None or not journal.wants_usage or journal.usage_sent:
            return None
        journal.usage_sent = True
        return self._trim(data)

    def _append(self, ids: list[int]) -> None:
        journal = self._journal
        if journal.finished:
            raise UpstreamError("went on after its finish reason")
        if journal.max_tokens is not None and len(journal.output_ids) + len(ids) > journal.max_tokens:
            raise UpstreamError("sent more than max_tokens tokens")
        journal.output_ids += ids

    def _trim(self, data: bytes) -> bytes:
        """The client's form of an event: without ids it did not ask for, and under the stream's one head."""
        journal = self._journal
        if self._first_event:
            self._first_event = False
            head = head_of(data)
            if journal.prompt_ids is None:
                journal.prompt_ids = prompt_ids_of(data)
            # Prompt ids belong to the stream's first event; a later attempt's would be of the whole history.
            if journal.head is not None or not journal.wants_ids:
                data = cut_list(data, PROMPT_TOKEN_IDS)
            journal.head = journal.head or head
            self._foreign_head = head != journal.head
        if self._foreign_head:
            assert journal.head is not None
            data = journal.head + data[len(head_of(data)) :]
        if not journal.wants_ids:
            data = cut_list(data, TOKEN_IDS)
        return data


def _continued(raw: msgspec.Raw, piece: Piece) -> Any:
    """A completion's log probabilities, of the ids that count, at their places in the whole output."""
    try:
        found = _LOGPROBS.decode(raw)
    except UNREADABLE:
        raise UpstreamError("sent log probabilities that are none") from None
    kept = {name: values and values[: len(piece.token_ids)] for name, values in found.items()}
    return kept | {"text_offset": list(piece.offsets)}


def _raise_error_event(said: Any) -> None:
    match said:
        case {"message": str(message), "code": int(code)} if is_the_clients_fault(code):
            # As vLLM does where it finds out only after the status has gone out.
            raise RefusedError(code, error_body(message))
        case _:
            raise ErrorEventError(said)
