"""Templates of a stream's token events, which differ only in their text and their one id. Pure
functions over bytes.

An event that fits a template needs no full decoding: two comparisons, one search, and decoding of
its text, which the journal notes. Any other event goes to the exact reader.
"""

import re
from functools import lru_cache

import msgspec

from kvrs.protocol.openai.chunks import CHUNK
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.proxy.wire.message_parts import all_parts
from kvrs.proxy.wire.sse import CHOICES, PROMPT_TOKEN_IDS, TOKEN_IDS, UNFINISHED

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
        """Make the template of an event in the usual form (`event_form.py`), whose head has
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
