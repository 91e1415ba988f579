"""Server-sent events of engines as bytes, split and trimmed by offset without re-encoding.

A plain byte search is enough: inside a JSON string every quote is escaped, so the bytes `,"name":[`
with unescaped quotes can only be a key of an object. This holds for compact JSON, as engines write
it; other events are converted first (`EventForm`).

In the usual form of an engine's events, which the relay searches as bytes, an event begins with its
head (id, object, time of creation, model), followed by its choices; a comma precedes every list of
ids, and there are no blanks. vLLM and kvrs's engines write only this form, so an event costs one
comparison and one search here. Events in another form are decoded and encoded again.

A stream's token events differ only in their text and their one id, and fit a template. Such an
event needs no full decoding: two comparisons, one search, and decoding of its text, which the
journal notes. Any other event goes to the exact reader.
"""

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from kvrs.errors import UpstreamError
from kvrs.protocol.instance import TokenId
from kvrs.protocol.openai.chunks import CHUNK, Usage
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.openai.requests import packed
from kvrs.proxy.wire.message_parts import all_parts

# The first event of a plain engine holds the ids of the whole prompt, with up to 7 bytes each: room
# for two million ids.
MAX_EVENT_BYTES = 16 << 20
_MOST_LINES = 10_000  # Most line ends within an event; engines write a few.

TOKEN_IDS = b',"token_ids":['
PROMPT_TOKEN_IDS = b',"prompt_token_ids":['
# Matches the index of a choice; in an event whose tool call's index comes first, it matches that.
# Quotes in texts are escaped.
_INDEX = re.compile(rb'(?<=[{,]"index":)0')
_INDEX_FIRST = b'{"index":'
_TOOL_CALLS = b'"tool_calls"'
UNFINISHED = b',"finish_reason":null'
CHOICES = b',"choices":['
_IDS = msgspec.json.Decoder(list[TokenId])
# Two line ends, which end an event. A line may end with CR alone; CRLF is one line end.
_BOUNDARY = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True, eq=False)
class EventSplitter:
    """Splits a byte stream, in chunks of any size, into the payloads of its `data:` events. Each
    chunk is searched once, and an incomplete event is not searched again.
    """

    max_event_bytes: int = MAX_EVENT_BYTES
    # Received bytes of an event that is not complete yet.
    rest: bytearray = field(default_factory=bytearray)
    # Bytes that are dropped if the next ones are these: a byte order mark at the beginning, and the
    # LF of a CRLF whose CR has ended an event.
    _dropped: bytes = _BOM

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the payloads of the events that `chunk` completes.

        Raises:
            UpstreamError: an event exceeds a limit. The events that `chunk` completes before it are
                lost.
        """
        rest = self.rest
        if self._dropped:
            chunk = self._without_dropped(chunk)
        elif (
            not rest
            and chunk.startswith(b"data: {")
            and chunk.find(b"\n") == len(chunk) - 2
            and chunk.endswith(b"}\n\n")
        ):
            return [chunk[6:-2]]  # Fast path: the read is one whole event.
        if rest and rest[-1] in b"\r\n":
            # A line end may be the first half of an event's end.
            size_bytes = 2 if rest.endswith(b"\r\n") else 1
            chunk = bytes(rest[-size_bytes:]) + chunk
            del rest[-size_bytes:]
        parts = chunk.split(b"\n\n") if b"\r" not in chunk else _BOUNDARY.split(chunk)
        last = parts.pop()
        payloads: list[bytes] = []
        for part in parts:
            if rest:
                rest += part
                part = bytes(rest)
                rest.clear()
            self._check(len(part))
            if (payload := _payload(part)) is not None:
                payloads.append(payload)
        rest += last
        # The rest may end with all but the last byte of an event's end, which is none of its bytes.
        self._check(len(rest) - 3)
        if parts and not last and chunk.endswith(b"\r"):
            self._dropped = b"\n"
        return payloads

    def _without_dropped(self, chunk: bytes) -> bytes:
        # Until the first three bytes are here, the rest may be a part of a byte order mark.
        chunk, dropped = bytes(self.rest) + chunk, self._dropped
        self.rest.clear()
        if len(chunk) < len(dropped) and dropped.startswith(chunk):
            self.rest += chunk
            return b""
        self._dropped = b""
        return chunk.removeprefix(dropped)

    def _check(self, size_bytes: int) -> None:
        if size_bytes > self.max_event_bytes:
            raise UpstreamError(f"sent an event of more than {self.max_event_bytes} bytes")


def _payload(part: bytes) -> bytes | None:
    """Return the data of an event; None: a comment, or empty."""
    if b"\n" not in part and b"\r" not in part:
        return part[5:].strip() if part.startswith(b"data:") else None
    # The event also has other lines: a name, an id, a comment, or blank lines before it.
    if part.count(b"\n") + part.count(b"\r") > _MOST_LINES:
        raise UpstreamError(f"sent an event of more than {_MOST_LINES} lines")
    lines = [line[5:].strip() for line in _LINE_END.split(part) if line.startswith(b"data:")]
    # Lines may be joined by a space, because line ends within JSON are white space.
    return b" ".join(lines) if lines else None


def next_token_ids(data: bytes) -> tuple[list[int], bytes] | None:
    """Return the ids of a plain token event, and the event without them; None for rarer kinds (no
    ids, a finish, usage, an error).
    """
    at = data.find(TOKEN_IDS)
    if at < 0 or data.rfind(UNFINISHED, 0, at) < 0:
        return None
    start = at + len(TOKEN_IDS) - 1
    try:
        end = data.index(b"]", start) + 1
        ids = _IDS.decode(data[start:end])
    except ValueError:  # Errors of msgspec are ValueErrors too.
        raise UpstreamError("sent token ids that are not a list of integers") from None
    return (ids, data[:at] + data[end:]) if ids else None


def cut_list(data: bytes, key: bytes) -> bytes:
    """Return `data` without the list of integers under `key` (one of the constants above)."""
    at = data.find(key)
    if at < 0:
        return data
    end = data.find(b"]", at)
    if end < 0:
        raise UpstreamError("sent an event that is not a completion chunk")
    return data[:at] + data[end + 1 :]


def prompt_ids_of(data: bytes) -> "array[int]":
    """Return the prompt's ids in a stream's first event."""
    at = data.find(PROMPT_TOKEN_IDS)
    if at < 0:
        raise UpstreamError(
            "began without prompt_token_ids, without which nothing can be continued"
        )
    start = at + len(PROMPT_TOKEN_IDS) - 1
    try:
        return packed(_IDS.decode(data[start : data.index(b"]", start) + 1]))
    except ValueError:
        raise UpstreamError("sent prompt_token_ids that are not a list of integers") from None


def head_of(data: bytes) -> bytes:
    """Return the part of an event before its choices: id, time of creation, model."""
    at = data.find(CHOICES)
    if at < 0:
        raise UpstreamError("sent an event without choices")
    return data[:at]


def with_usage(data: bytes, usage: Usage) -> bytes:
    """Return the event with these token counts at its end, in place of the engine's."""
    if b',"usage":' in data:
        event = msgspec.json.decode(data)
        event.pop("usage", None)
        data = msgspec.json.encode(event)
    return b"".join((data[:-1], b',"usage":', msgspec.json.encode(usage), b"}"))


def number_choice(data: bytes, index: int) -> bytes:
    """Return the part of an event behind its head, `data`, with `index` in place of the index 0 of
    its only choice.
    """
    if index == 0:
        return data
    if data.startswith(_INDEX_FIRST, data.find(b"{")) or _TOOL_CALLS not in data:
        numbered, count = _INDEX.subn(b"%d" % index, data, count=1)
        if count:
            return numbered
    # The byte search does not fit: a tool call's index may come first, or the JSON has blanks.
    if (at := data.find(CHOICES)) < 0:
        raise UpstreamError("sent an event without choices")
    match event := msgspec.json.decode(b"{" + data[at + 1 :]):
        case {"choices": [{"index": _}, *_]}:
            event["choices"][0]["index"] = index
            return data[:at] + b"," + msgspec.json.encode(event)[1:]
        case _:
            raise UpstreamError("sent a choice without an index")


_HEAD = ("id", "object", "created", "model")
_NEEDED = frozenset(("id", "created", "model"))
# Fields that are equal in all events of a stream, and may stand in the head.
_OF_THE_STREAM = frozenset((*_HEAD, "system_fingerprint", "service_tier"))
_LISTS = ("prompt_token_ids", "token_ids")
_IDS_END = b'token_ids"'  # Bytes at the end of both keys, `token_ids` and `prompt_token_ids`.
_KEYS = (b',"token_ids"', b',"prompt_token_ids"')
_BLANKS = tuple(before + blank for before in (b"", b":") for blank in (b" ", b"\t", b"\n", b"\r"))


class EventForm:
    """Converts the events of one response to the usual form, with the first event's head."""

    __slots__ = ("_head",)

    def __init__(self) -> None:
        self._head = b""  # Head of the first event, shared by all events; empty: no event yet.

    def usual(self, data: bytes) -> bytes:
        """Return the event in the usual form; data without choices stays unchanged."""
        if not self._head:
            self._head = _usual_head(data)
        at = len(self._head)
        has_head = at and data.startswith(self._head) and data.startswith(CHOICES, at)
        return data if has_head and _has_usual_ids(data) else self.rewritten(data)

    def rewritten(self, data: bytes) -> bytes:
        """Decode the event and encode it again in the usual form; data without choices stays
        unchanged.
        """
        try:
            event = msgspec.json.decode(data)
        except UNREADABLE:
            return data
        match event:
            case {"choices": list(choices)}:
                pass
            case _:
                return data
        del event["choices"]
        if not self._head:
            head = {name: event[name] for name in _HEAD if name in event}
            if "id" not in head:
                return data
            self._head = msgspec.json.encode(head)[:-1]
        for name in msgspec.json.decode(self._head + b"}"):
            event.pop(name, None)
        rest = msgspec.json.encode(event)[1:-1]
        made = msgspec.json.encode([_ordered(choice) for choice in choices])
        return b"".join((self._head, CHOICES, made[1:], b"," if rest else b"", rest, b"}"))


class LacksIdsError(UpstreamError):
    """The engine's stream lacks a list of token ids; `name` is the list's key."""

    def __init__(self, name: str) -> None:
        super().__init__(f"sent a stream without {name}")
        self.name = name


def check_events(payloads: Sequence[bytes]) -> None:
    """Check that a relay can read the events of a stream.

    Raises:
        UpstreamError: a relay could not pass the stream on, or could not continue it.
    """
    form, has_begun, has_ids, is_finished = EventForm(), False, False, False
    for payload in payloads:
        if payload == b"[DONE]":
            break
        data = form.usual(payload)
        try:
            event = CHUNK.decode(data)
        except UNREADABLE as error:
            raise UpstreamError(f"sent an event that is not a completion: {error}") from None
        if event.error is not None:
            raise UpstreamError("sent an error event")
        for choice in event.choices or ():
            if not has_begun:
                has_begun = True
                head_of(data)
                if PROMPT_TOKEN_IDS not in data:
                    raise LacksIdsError("prompt_token_ids")
                prompt_ids_of(data)
            found = next_token_ids(data)
            ids, rest = (choice.token_ids, cut_list(data, TOKEN_IDS)) if found is None else found
            if (ids or ()) != (choice.token_ids or ()) or (ids and TOKEN_IDS in rest):
                raise UpstreamError("sent token_ids in a form that is not read")
            has_ids = has_ids or bool(ids)
            is_finished = is_finished or choice.finish_reason is not None
    else:
        raise UpstreamError("ended its stream without [DONE]")
    if not has_ids:
        raise LacksIdsError("token_ids")
    if not is_finished:
        raise UpstreamError("ended its stream without a finish reason")


def _usual_head(data: bytes) -> bytes:
    """Return the head of an event in the usual form; empty: the event has another form."""
    at = data.find(CHOICES) if data.startswith(b'{"id":') else -1
    try:
        head = msgspec.json.decode(data[:at] + b"}") if at > 0 else None
    except UNREADABLE:
        return b""
    is_whole = isinstance(head, dict) and _NEEDED.issubset(head) and _OF_THE_STREAM.issuperset(head)
    return data[:at] if is_whole else b""


def _has_usual_ids(data: bytes) -> bool:
    """Return whether every key of a list of ids has the form that the relay searches for (True:
    also without such a key). A text may contain the same letters, and so may a token in log
    probabilities, whose value is a number.
    """
    end = 0
    while (at := data.find(_IDS_END, end)) >= 0:
        end = at + len(_IDS_END)
        is_list = data.startswith(b":[", end)
        if data.startswith(_BLANKS, end) or (is_list and not data.endswith(_KEYS, 0, end)):
            return False
    return True


def _ordered(choice: Any) -> Any:
    """Return the choice with its index first and its lists of ids last."""
    if not isinstance(choice, dict):
        return choice
    first = {"index": choice.pop("index")} if "index" in choice else {}
    last = {name: choice.pop(name) for name in _LISTS if name in choice}
    return first | choice | last


# Matches the first string field that may be a text. An event may have two texts; `_tried` shows
# whether this is the only one.
_STRING = re.compile(
    rb'[{,]"(?:text|content|reasoning|reasoning_content|arguments)":"((?:[^"\\]|\\.)*)"'
)
_TEXT = msgspec.json.Decoder(str)
_ZERO = ord("0")
# Text that is put into a template to find the part of the message that it adds to.
_TRIED_TEXT = b"of 17 characters."
_TRIED_ID = b"12345"


@lru_cache(maxsize=128)
def shared(piece: bytes) -> bytes:
    """Return one object for equal pieces of events: most streams have the same pieces."""
    return piece


class _Kind(msgspec.Struct, frozen=True):
    """Bytes behind the head that are equal in all token events of one kind, in every stream."""

    before: bytes  # Bytes up to the text's first character.
    between: bytes  # Bytes from the text's last quote to the id; empty: the event has no text.
    after: bytes  # Bytes from the end of the list of ids to the event's end.


class EventTemplate:
    """A kind of token event of one stream.

    `part` is the part of the message that the text adds to, by its name in `message_parts.py`;
    None: the event has an id and no text, like tokens that a parser holds back.
    """

    __slots__ = ("_between_bytes", "_text_at", "after", "before", "between", "ids_bytes", "part")

    def __init__(self, head: bytes, kind: _Kind, part: str | None) -> None:
        self.before = head + kind.before
        self.between = kind.between
        self.after = kind.after
        self.part = part
        # Number of bytes from the text's end to the key of the ids.
        self.ids_bytes = len(kind.between) - len(TOKEN_IDS)
        self._text_at = len(self.before)
        self._between_bytes = len(kind.between)

    @classmethod
    def of(cls, data: bytes, head_bytes: int) -> "EventTemplate | None":
        """Make the template of an event in the usual form (`EventForm`), whose head has
        `head_bytes` bytes; None: the event is not a plain token event.
        """
        if (ids_at := data.find(TOKEN_IDS)) < 0 or (end := data.find(b"]", ids_at)) < 0:
            return None
        if not data.startswith(CHOICES, head_bytes) or data.rfind(UNFINISHED, 0, ids_at) < 0:
            return None
        # An event with prompt ids is no template: only the first event of a stream has them.
        if PROMPT_TOKEN_IDS in data:
            return None
        id_at = ids_at + len(TOKEN_IDS)
        found = _STRING.search(data, head_bytes, ids_at)
        text_at, text_end = (id_at, id_at) if found is None else found.span(1)
        kind, part = _known(_Kind(data[head_bytes:text_at], data[text_end:id_at], data[end:]))
        return None if part is _NOT_PLAIN else cls(data[:head_bytes], kind, part or None)

    def read(self, data: bytes, at: int, end: int) -> tuple[int, int, str] | None:
        """Read the event `data[at:end]`; return its id, the end of its text, and the text. None:
        the event does not fit the template.
        """
        if not (data.startswith(self.before, at) and data.endswith(self.after, at, end)):
            return None
        # The search finds the text's end: quotes within a JSON string are escaped, so no text
        # contains these bytes.
        text_at = at + self._text_at
        text_end = data.find(self.between, text_at, end)
        digits = data[text_end + self._between_bytes : end - len(self.after)]
        # JSON numbers that need no further check: natural numbers below 2^32.
        if text_end < 0 or not digits.isdigit() or len(digits) > 9 or digits[0] == _ZERO:
            return None
        if self.part is None:
            return int(digits), text_end, ""
        try:
            text = _TEXT.decode(data[text_at - 1 : text_end + 1])
        except UNREADABLE:
            # The text is followed by another field, or has a line end or invalid characters.
            return None
        return int(digits), text_end, text


_NOT_PLAIN = "not plain"  # Stands for the part's name if the event is not a plain token event.


@lru_cache(maxsize=256)
def _known(kind: _Kind) -> tuple[_Kind, str]:
    """Return the shared object of a kind, and the part of the message that its texts add to; "": no
    text; `_NOT_PLAIN`: not a plain token event.
    """
    if _tried(kind, b"") != []:
        return kind, _NOT_PLAIN
    if not kind.between:
        return kind, ""
    match _tried(kind, _TRIED_TEXT):
        case [(part, added)] if added == _TRIED_TEXT.decode():
            return kind, part
    return kind, _NOT_PLAIN


def _tried(kind: _Kind, text: bytes) -> list[tuple[str, str]] | None:
    """Decode an event of this kind with this text; return the parts of the message that it adds to,
    with the added texts. None: not a plain token event.
    """
    data = b"".join((b"{" + kind.before[1:], text, kind.between, _TRIED_ID, kind.after))
    try:
        choices = CHUNK.decode(data).choices or []
        added = [each for choice in choices for each in all_parts(choice) if each[1]]
    except UNREADABLE:
        return None
    is_plain = len(choices) == 1 and choices[0].finish_reason is None
    return added if is_plain and choices[0].token_ids == [int(_TRIED_ID)] else None
