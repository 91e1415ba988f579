"""The usual form of an engine's events, which the relay searches as bytes, and conversion to it.

In the usual form an event begins with its head (id, object, time of creation, model), followed by
its choices; a comma precedes every list of ids, and there are no blanks. vLLM and kvrs's engines
write only this form, so an event costs one comparison and one search here. Events in another form
are decoded and encoded again.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvrs.errors import UpstreamError
from kvrs.protocol.openai.chunks import CHUNK
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.proxy.wire.sse import (
    CHOICES,
    PROMPT_TOKEN_IDS,
    TOKEN_IDS,
    cut_list,
    head_of,
    next_token_ids,
    prompt_ids_of,
)

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
