"""Parts of a message (text, reasoning, tool calls) that an event adds to, and the texts of the
parts that a client has.
"""

from collections.abc import Iterable, Iterator
from io import StringIO

import msgspec

from kvrs.protocol.openai.chunks import ReceivedChoice

TEXT = "text"
REASONING = "reasoning"
NAME = "name "  # The begin of the part that is a call's name.

# Most characters of a message's parts that are kept. A longer message cannot be compared with a
# second run, so it is not repeated; no model's context holds as many.
_MOST_CHARACTERS = 8 << 20


class _Function(msgspec.Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct, gc=False):
    """Fields of a piece of a streamed tool call that are counted. Chats pass the others on as they
    are, so they may have any form.
    """

    index: int | None = None
    function: _Function | None = None


_NO_FUNCTION = _Function()
_CALL = msgspec.json.Decoder(_Call)


def parsed_parts(choice: ReceivedChoice) -> Iterator[tuple[str, str]]:
    """Yield each part of the choice beside its text, with the text added to it.

    Raises:
        msgspec.DecodeError: a tool call has another form.
    """
    delta = choice.delta
    if reasoning := delta.reasoning or delta.reasoning_content:
        yield REASONING, reasoning
    for raw in delta.tool_calls or ():
        call = _CALL.decode(raw)
        index, function = call.index or 0, call.function or _NO_FUNCTION
        yield name_of(index), function.name or ""
        yield arguments_of(index), function.arguments or ""


def all_parts(choice: ReceivedChoice) -> Iterator[tuple[str, str]]:
    """Yield the choice's text and the parts beside it, like `parsed_parts`; raises like it."""
    yield TEXT, choice.plain_text
    yield from parsed_parts(choice)


def name_of(index: int) -> str:
    return f"{NAME}{index}"


def arguments_of(index: int) -> str:
    return f"arguments {index}"


class MessageParts:
    """The texts that a client has of one message, by part. A second run of the request is compared
    with them, because one sequence of ids can reach the client in different texts: parsers depend
    on how the tokens are packed into events.
    """

    __slots__ = ("_texts", "characters", "last")

    def __init__(self) -> None:
        self._texts: dict[str, StringIO] = {}
        self.characters = 0  # Characters of all parts.
        self.last = ""  # Part of the last piece of text.

    def add(self, part: str, text: str) -> None:
        if (found := self._texts.get(part)) is None:
            found = self._texts[part] = StringIO()
        self.characters += len(text)
        if text:
            self.last = part
        if self.characters <= _MOST_CHARACTERS:
            found.write(text)

    def text(self, part: str) -> str:
        found = self._texts.get(part)
        return "" if found is None else found.getvalue()

    def names(self) -> Iterable[str]:
        return self._texts.keys()

    @property
    def is_parsed(self) -> bool:
        """Return whether the message has parts beside its text: a parser makes them."""
        return len(self._texts) > (TEXT in self._texts)

    @property
    def is_whole(self) -> bool:
        """Return whether the texts are all that the client has."""
        return self.characters <= _MOST_CHARACTERS
