"""Parts of a message (text, reasoning, tool calls) that an event adds to, and the number of
characters added to each.
"""

from collections.abc import Iterator

import msgspec

from kvrs.protocol.openai.chunks import ReceivedChoice

TEXT = "text"
REASONING = "reasoning"


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


def parsed_parts(choice: ReceivedChoice) -> Iterator[tuple[str, int]]:
    """Yield each part of the choice beside its text, with the number of characters added to it.

    Raises:
        msgspec.DecodeError: a tool call has another form.
    """
    delta = choice.delta
    if reasoning := delta.reasoning or delta.reasoning_content:
        yield REASONING, len(reasoning)
    for raw in delta.tool_calls or ():
        call = _CALL.decode(raw)
        index, function = call.index or 0, call.function or _NO_FUNCTION
        yield name_of(index), len(function.name or "")
        yield arguments_of(index), len(function.arguments or "")


def all_parts(choice: ReceivedChoice) -> Iterator[tuple[str, int]]:
    """Yield the choice's text and the parts beside it, like `parsed_parts`; raises like it."""
    yield TEXT, len(choice.plain_text)
    yield from parsed_parts(choice)


def name_of(index: int) -> str:
    return f"name {index}"


def arguments_of(index: int) -> str:
    return f"arguments {index}"
