"""Server-sent events as bytes, split and trimmed by offset without re-encoding.

A plain byte search is enough: inside a JSON string every quote is escaped, so the bytes `,"name":[`
with unescaped quotes can only be a key of an object. This holds for compact JSON, as engines write
it; other events are converted first (`event_form.py`).
"""

import re
from array import array
from dataclasses import dataclass, field

import msgspec

from kvrs.errors import UpstreamError
from kvrs.protocol.instance import TokenId
from kvrs.protocol.openai.chunks import Usage
from kvrs.protocol.token_ids import packed

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
