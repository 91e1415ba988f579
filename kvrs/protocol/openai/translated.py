"""Parts that the translations of the Responses and Messages APIs to a chat share: reading of their
fields, and tool calls.

Tool calls of a chat, put together from the pieces that engines stream, and the errors of output
that another API cannot express.

Engines name a call in its first piece. Later pieces lack id, type and name (vLLM), or have null for
them (SGLang, and vLLM where `tool_choice` requires a call).
"""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrs.errors import RequestError, UndecodableError, UnknownFieldError
from kvrs.protocol.openai.chunks import CHUNK, ReceivedChunk
from kvrs.protocol.openai.decoding import UNREADABLE, check_structure, decode_as, given_as
from kvrs.protocol.openai.fields import is_among

Fields = dict[str, Any]

# Sampling fields that the APIs lack; the chat's check reads them under the same names.
AS_IN_CHAT = {
    *("model", "temperature", "top_p", "cache_salt", "seed", "top_k"),
    *("min_p", "min_tokens", "stop_token_ids", "ignore_eos", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words"),
    *("chat_template_kwargs",),
}

_FIELDS = msgspec.json.Decoder(dict[str, Any])


def read_fields(
    body: bytes, allowed: Set[str], neutral: Mapping[str, tuple[Any, ...]], max_elements: int
) -> Fields:
    """Decode a request's body; return its fields without nulls. `neutral`: fields that are refused
    with any other value.

    Raises:
        RequestError: malformed, or an unknown or refused field.
    """
    if body.lstrip().startswith(b"{"):
        check_structure(body, max_elements=max_elements)
    given = decode_as(_FIELDS, body)
    fields = {name: value for name, value in given.items() if value is not None}
    known = {*allowed, *neutral}
    if unknown := [name for name in fields if name not in known]:
        raise UnknownFieldError(unknown[0], sorted(known))
    for name, value in fields.items():
        if name in neutral and not is_among(value, neutral[name]):
            values = (*neutral[name], None)
            listed = " or ".join(msgspec.json.encode(each).decode() for each in values)
            raise not_supported(name, value, listed)
    return fields


def not_supported(name: str, value: Any, allowed: str) -> RequestError:
    given = given_as(name, msgspec.json.encode(value))
    return RequestError(f"{given} is not supported; allowed: {allowed}", param=name)


def list_of(fields: Fields, name: str, allowed: str) -> list[Any]:
    """Return a list of one item or more. Raises RequestError: it is missing, or something else."""
    if name not in fields:
        raise RequestError(f"{name} is missing; allowed: {allowed}", param=name)
    if not isinstance(value := fields[name], list) or not value:
        raise not_supported(name, value, allowed)
    return value


def string_of(item: Fields, name: str, param: str) -> str:
    """Return the string `name` of an object. Raises RequestError: it is missing, or no string."""
    if not isinstance(value := item.get(name), str):
        raise not_supported(f"{param}.{name}", value, "a string")
    return value


Event = dict[str, Any]

_MOST_ARGUMENT_BYTES = 8 << 20  # Most bytes of arguments of all calls of one stream.


class PieceFunction(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


_NO_FUNCTION = PieceFunction()


class CallPiece(msgspec.Struct, gc=False):
    """A piece of a streamed tool call, or a whole call of a message."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: PieceFunction | None = None

    @property
    def said(self) -> PieceFunction:
        return self.function or _NO_FUNCTION

    @property
    def arguments(self) -> str:
        return self.said.arguments or ""


@dataclass(slots=True)
class BegunCall:
    """A tool call, as far as its pieces have come. `pieces` are those of its arguments."""

    index: int
    id: str = ""
    type: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    is_closed: bool = False  # The client was told that the call is complete.

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    def check_named(self) -> None:
        """Raise UndecodableError: the call begins without a name, so no client can run it."""
        if not self.name:
            raise UndecodableError("a tool call of the engine begins without a name")

    def check_complete(self) -> None:
        """Raise UndecodableError: the arguments are not a JSON object, so the call is not complete,
        or no call at all.
        """
        arguments_of(self.arguments)

    @property
    def goes_on(self) -> bool:
        """Return whether more pieces have to follow: the arguments are no JSON object yet. Parsers
        of engines send text between the pieces, which belongs behind the call.
        """
        if not self.pieces or not self.pieces[-1].rstrip().endswith("}"):
            return True
        try:
            self.check_complete()
        except UndecodableError:
            return True
        return False

    def close(self) -> None:
        self.is_closed = True
        self.pieces.clear()


class CallLog:
    """Puts the calls of one stream together, by their indices."""

    def __init__(self) -> None:
        self.calls: dict[int, BegunCall] = {}
        self._left_bytes = _MOST_ARGUMENT_BYTES

    def take(self, raw: msgspec.Raw) -> tuple[BegunCall, str]:
        """Add a piece; return its call, and what it adds to the arguments.

        Raises:
            UndecodableError: the piece is not one of a call, or it adds to a closed call.
        """
        try:
            piece = _PIECE.decode(raw)
        except UNREADABLE:
            raise UndecodableError("the engine sent a malformed tool call") from None
        index, arguments = piece.index or 0, piece.arguments
        if (call := self.calls.get(index)) is None:
            call = self.calls[index] = BegunCall(index)
        if call.is_closed and arguments:
            raise UndecodableError("the engine sent a piece of a tool call that was closed before")
        call.id, call.type = call.id or piece.id or "", call.type or piece.type or ""
        call.name = call.name or piece.said.name or ""
        if arguments:
            self._left_bytes -= len(arguments.encode())
            if self._left_bytes < 0:
                raise UndecodableError(
                    f"the arguments of tool calls have more than {_MOST_ARGUMENT_BYTES} bytes"
                )
            call.pieces.append(arguments)
        return call, arguments


_PIECE = msgspec.json.Decoder(CallPiece)
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's arguments; empty text is an object without fields.

    Raises:
        UndecodableError: they are not a JSON object.
    """
    try:
        return _OBJECT.decode(text or "{}")
    except UNREADABLE:
        raise UndecodableError("the arguments of a tool call are not a JSON object") from None


def chunk_of(data: bytes) -> ReceivedChunk:
    """Decode an event of a stream. Raises UndecodableError: it is no event of a chat."""
    try:
        return CHUNK.decode(data)
    except UNREADABLE:
        raise UndecodableError("the engine sent an event that is not one of a chat") from None


def read_error(error: Any) -> tuple[str, str, str]:
    """Return message, type and code of a decoded error; a part that it lacks is empty."""
    found = error if isinstance(error, dict) else {}
    parts = [found.get(name) for name in ("message", "type", "code")]
    message, kind, code = (part if isinstance(part, str) else "" for part in parts)
    return message or "the stream failed", kind, code


def made_of(events: Iterable[Event]) -> tuple[list[Event], str | None]:
    """Return the events that could be made, and the fault that prevented the next one; None: all
    could be made.
    """
    made = list[Event]()
    try:
        for event in events:
            made.append(event)
    except UndecodableError as error:
        return made, str(error)
    return made, None
