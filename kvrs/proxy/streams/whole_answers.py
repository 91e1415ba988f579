"""Whole responses made from streams' events, for clients that do not stream.

Answers that an engine gives in one piece, for clients that do not stream.

vLLM has two parsers for tool calls and reasoning, one for streams and one for whole answers, and
they do not always agree (docs/guide/vllm.md). A client that wants a whole answer gets the whole
parser's: the engine is asked without a stream. Nothing of such an answer is known before its end,
so after a death it is computed again.

Chats with tools are requested this way, and chats that may have reasoning, once the engine has been
seen to parse it. Requests with an `Idempotency-Key` are streamed anyway: a proxy that takes over a
stream continues with its record.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvrs.errors import UndecodableError, UpstreamError
from kvrs.protocol.openai.chunks import (
    BROKEN_REASONS,
    EngineFacts,
    ReceivedChoice,
    ReceivedDelta,
    Usage,
    error_kind,
    facts_of,
    facts_together,
    usage_of,
    with_facts,
)
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.openai.requests import ChatRequest, decode_ids, encode_with_ids
from kvrs.protocol.openai.translated import CallLog, chunk_of
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.streams.open_stream import Client
from kvrs.proxy.streams.relay import AnswerReader, Reported
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import ParsedRequest
from kvrs.proxy.wire.upstream import Need


class _Head(msgspec.Struct):
    id: str
    created: int
    model: str


_HEAD = msgspec.json.Decoder(_Head)


class Parsers:
    """Parsers that engines were seen to use, beyond those that requests imply."""

    reasoning = False
    # The text behind a thought is that of its ids, as a complete answer has shown; None: not known.
    plain_answers: bool | None = None


class BeginsAgain(ABC):
    """A client that has nothing before the end of the answer, so that a recovery may make the
    request again.
    """

    @abstractmethod
    def begin_again(self) -> None:
        """Forget the events so far."""


class HeldBack(BeginsAgain):
    """Holds the events of a recorded stream back until its end, for a client that gets a whole
    answer: neither the client nor the record has any of it before.
    """

    blocked = False
    direct = None
    take_token = None

    def __init__(self, inner: Client, journal: Journal) -> None:
        self._inner = inner
        self._journal = journal
        self._events: list[bytes] = []

    def when_free(self, resume: Callable[[], None]) -> None:
        resume()

    def send(self, events: Sequence[bytes]) -> None:
        self._events += events
        if self._journal.finished:
            held, self._events = self._events, []
            self._inner.send(held)

    def begin_again(self) -> None:
        self._events.clear()
        if self._journal.marks is not None:
            self._journal.marks.clear()


class WholeClient(BeginsAgain):
    """Collects one choice of an unstreamed response. The engine streams the choice, so that it can
    recover too, or answers in one piece (`whole_answers.py`).
    """

    blocked = False
    direct = None
    take_token = None

    def when_free(self, resume: Callable[[], None]) -> None:
        resume()

    def __init__(self, parsers: Parsers | None = None) -> None:
        self._parsers = parsers or Parsers()
        self.begin_again()

    def begin_again(self) -> None:
        # The choice as the engine gave it in one piece; None: collected from events.
        self._whole: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._reasoning: dict[str, list[str]] = {"reasoning_content": [], "reasoning": []}
        self._log = CallLog()
        self._logprobs: dict[str, list[msgspec.Raw]] | None = None

    def take_whole(self, choice: dict[str, Any]) -> None:
        """Take the choice in one piece, from an engine that was asked without a stream."""
        self._whole = choice

    def send(self, events: Sequence[bytes]) -> None:
        """Take events. Raises UndecodableError: one of them is no event of an answer."""
        for event in events:
            for choice in chunk_of(event).choices or ():
                self._take(choice)

    def choice(self, journal: Journal, index: int, echo: str | None) -> dict[str, Any]:
        """Return the finished choice, with its keys in the order of the embedded engine."""
        made: dict[str, Any]
        if self._whole is not None:
            return {"index": index, **self._whole}
        if isinstance(journal.parsed.request, ChatRequest):
            made = {"index": index, "message": self._message()}
        else:
            made = {"text": (echo or "") + "".join(self._texts), "index": index}
        made |= {
            "logprobs": self._logprobs,
            "finish_reason": journal.finish_reason,
            "stop_reason": journal.stop_reason,
        }
        if journal.wants_ids:
            if "text" in made:
                made["prompt_token_ids"] = journal.prompt_ids
            made["token_ids"] = journal.output_ids
        return made

    def _take(self, choice: ReceivedChoice) -> None:
        self._texts.append(choice.plain_text)
        if choice.is_parsed:
            self._take_parsed(choice.delta)
        try:
            lists = choice.logprob_lists()
        except UNREADABLE:
            raise UndecodableError("the engine sent malformed log probabilities") from None
        for name, values in lists.items():
            self._logprobs = self._logprobs or {}
            self._logprobs.setdefault(name, []).extend(values or ())

    def _take_parsed(self, delta: ReceivedDelta) -> None:
        for name, texts in self._reasoning.items():
            if text := getattr(delta, name):
                texts.append(text)
                self._parsers.reasoning = True
        for call in delta.tool_calls or ():
            self._log.take(call)

    def _message(self) -> dict[str, Any]:
        content, calls = "".join(self._texts), self._log.calls
        message: dict[str, Any] = {
            "content": content if content or not calls else None,
            "role": "assistant",
        }
        message |= {name: "".join(texts) for name, texts in self._reasoning.items() if texts}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"name": call.name, "arguments": call.arguments},
                    "type": call.type or "function",
                }
                for _, call in sorted(calls.items())
            ]
        return message


def answer(
    parsed: ParsedRequest,
    journals: Sequence[Journal],
    clients: Sequence[WholeClient],
    echoes: Sequence[str | None],
) -> bytes:
    """Make the body of a response whose choices are all complete.

    Raises:
        UndecodableError: the engine's head of the response is no head of an answer.
    """
    first = journals[0]
    assert first.head is not None
    try:
        head = _HEAD.decode(first.head + b"}")
    except UNREADABLE:
        raise UndecodableError("the engine's first event has no id, time and model") from None
    usage, facts = total_usage(journals)
    is_chat = isinstance(parsed.request, ChatRequest)
    made: dict[str, Any] = {
        "id": head.id,
        "created": head.created,
        "model": head.model,
        "choices": [
            client.choice(journal, index, echo)
            for index, (journal, client, echo) in enumerate(
                zip(journals, clients, echoes, strict=True)
            )
        ],
        "object": "chat.completion" if is_chat else "text_completion",
        "usage": usage,
    }
    made |= facts.beside
    if is_chat and first.wants_ids:
        made["prompt_token_ids"] = first.prompt_ids
    return encode_with_ids(made)


def total_usage(journals: Sequence[Journal]) -> tuple[Mapping[str, Any], EngineFacts]:
    """Return the usage of all choices together, with the engines' facts; a prompt shared by several
    choices counts once, by its first choice.
    """
    firsts = list({id(journal.parsed): journal for journal in reversed(journals)}.values())
    prompt = sum(journal.usage.prompt_tokens for journal in firsts)
    produced = sum(journal.usage.completion_tokens for journal in journals)
    cached = [journal.cached_tokens for journal in firsts if journal.cached_tokens is not None]
    usage = usage_of(prompt, produced, sum(cached) if len(cached) == len(firsts) else None)
    facts = facts_together([(each.facts, each in firsts) for each in journals])
    return with_facts(usage, facts), facts


_MOST_BYTES = 64 << 20


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: msgspec.Raw = msgspec.Raw()


class _Answer(msgspec.Struct):
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[msgspec.Raw] = []
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    error: Any = None


_ANSWER = msgspec.json.Decoder(_Answer)
_CHOICE = msgspec.json.Decoder(_Choice)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ABSENT = (b"", b"null")


def is_asked_whole(journal: Journal, *, parses_reasoning: bool) -> bool:
    """Return whether to ask for the answer in one piece: the engine's two parsers may answer this
    request differently, and the client has nothing of the answer yet.
    """
    request = journal.parsed.request
    if not isinstance(request, ChatRequest) or journal.output_ids:
        return False
    return request.may_call_tools or parses_reasoning


def ask_whole(call: Call) -> None:
    """Make a decode call ask for its answer in one piece."""
    call.fields["stream"] = False
    call.fields.pop("stream_options", None)


class WholeAnswer(AnswerReader):
    """Reads the whole answer of one attempt, in place of a `Relay`."""

    __slots__ = ("_client", "_pieces", "_size_bytes")

    def __init__(self, journal: Journal, client: WholeClient, attempt: Reported) -> None:
        super().__init__(journal, attempt)
        self._client = client
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def feed(self, data: bytes) -> Need:
        self._attempt.silence.heard_s = self._attempt.now_s()
        self._pieces.append(data)
        self._size_bytes += len(data)
        if self._size_bytes > _MOST_BYTES:
            raise UpstreamError(f"sent an answer of more than {_MOST_BYTES} bytes")
        return Need.MORE

    def expect_token(self) -> None:
        """Do nothing: a whole answer reports only its end."""

    def leave(self) -> None:
        self.flow = None
        self._pieces.clear()

    def check_end(self) -> None:
        """Check that the response is a whole answer, and pass it to the client.

        Raises:
            UpstreamError: not a whole answer.
        """
        journal = self._journal
        if self.is_over:
            return
        try:
            answer = _ANSWER.decode(b"".join(self._pieces))
            if answer.error is not None:
                raise UpstreamError(f"answered an error{error_kind({'error': answer.error})}")
            if len(answer.choices) != 1:
                raise UpstreamError(f"answered with {len(answer.choices)} choices")
            choice, fields = _CHOICE.decode(answer.choices[0]), _FIELDS.decode(answer.choices[0])
            self._note(answer, choice)
        except UNREADABLE as error:
            raise UpstreamError(f"the answer is not a completion: {error}") from None
        fields.pop("index", None)
        if not journal.wants_ids:
            fields.pop("token_ids", None)
        self._attempt.resumed()
        self._client.take_whole(fields)
        self._attempt.delivered.last_s = self._attempt.now_s()
        self._attempt.delivered.tokens += journal.usage.completion_tokens
        self.is_complete = True
        self._attempt.completed()

    def _note(self, answer: _Answer, choice: _Choice) -> None:
        """Write the answer to the journal. Raises UpstreamError, or the decoder's error for an
        unreadable list.
        """
        journal, usage = self._journal, answer.usage
        if choice.finish_reason is None or choice.finish_reason in BROKEN_REASONS:
            raise UpstreamError(f"finished with {str(choice.finish_reason)[:40]!r}")
        ids = array("I")
        if bytes(choice.token_ids) not in _ABSENT:
            ids = decode_ids(bytes(choice.token_ids))
        elif usage is None:
            raise UpstreamError("answered without token ids and without usage")
        else:  # vLLM omits the ids with `include_reasoning: false`.
            journal.counted = usage
        if journal.prompt_ids is None:
            journal.prompt_ids = journal.parsed.tokenised(
                decode_ids(bytes(answer.prompt_token_ids))
            )
        if journal.cached_tokens is None and usage is not None:
            journal.cached_tokens = usage.cached_tokens
        head = {"id": answer.id, "created": answer.created, "model": answer.model}
        journal.head = journal.head or msgspec.json.encode(head)[:-1]
        journal.output_ids.extend(ids)
        journal.finish_reason, journal.stop_reason = choice.finish_reason, choice.stop_reason
        if usage is not None:
            journal.facts = facts_of(msgspec.json.decode(b"".join(self._pieces)))
