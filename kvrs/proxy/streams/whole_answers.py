"""Answers that an engine gives in one piece, for clients that do not stream.

vLLM has two parsers for tool calls and reasoning, one for streams and one for whole answers, and
they do not always agree (docs/guide/vllm.md). A client that wants a whole answer gets the whole
parser's: the engine is asked without a stream. Nothing of such an answer is known before its end,
so after a death it is computed again.

Chats with tools are requested this way, and chats that may have reasoning, once the engine has been
seen to parse it. Requests with an `Idempotency-Key` are streamed anyway: a proxy that takes over a
stream continues with its record.
"""

from array import array
from typing import Any

import msgspec

from kvrs.errors import UpstreamError
from kvrs.protocol.openai.chunks import BROKEN_REASONS, Usage, error_kind, facts_of
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.openai.requests import ChatRequest
from kvrs.protocol.token_ids import decode
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.streams.relay import AnswerReader, Reported
from kvrs.proxy.streams.responses import WholeClient
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.upstream import Need

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
            ids = decode(bytes(choice.token_ids))
        elif usage is None:
            raise UpstreamError("answered without token ids and without usage")
        else:  # vLLM omits the ids with `include_reasoning: false`.
            journal.counted = usage
        if journal.prompt_ids is None:
            journal.prompt_ids = journal.parsed.tokenised(decode(bytes(answer.prompt_token_ids)))
        if journal.cached_tokens is None and usage is not None:
            journal.cached_tokens = usage.cached_tokens
        head = {"id": answer.id, "created": answer.created, "model": answer.model}
        journal.head = journal.head or msgspec.json.encode(head)[:-1]
        journal.output_ids.extend(ids)
        journal.finish_reason, journal.stop_reason = choice.finish_reason, choice.stop_reason
        if usage is not None:
            journal.facts = facts_of(msgspec.json.decode(b"".join(self._pieces)))
