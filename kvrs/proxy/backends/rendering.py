"""Token ids of a chat's messages, rendered by the engine's own template."""

from array import array

import msgspec

from kvrs.protocol.instance import TokenId
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.openai.requests import packed
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.wire.errors import UnusableError
from kvrs.proxy.wire.journal import Journal

TOKENIZE = "/tokenize"
# Fields of a chat that its rendered prompt depends on.
_FIELDS = (
    *("model", "messages", "tools", "tool_choice", "reasoning_effort", "continue_final_message"),
    "chat_template_kwargs",
)


class _Tokenized(msgspec.Struct):
    tokens: list[TokenId]


_TOKENIZED = msgspec.json.Decoder(_Tokenized)


def tokenize_call(journal: Journal) -> Call:
    fields = {name: value for name, value in journal.parsed.fields.items() if name in _FIELDS}
    return Call(TOKENIZE, fields, size_bytes=journal.parsed.fields_bytes)


def tokenized_ids(answer: bytes) -> "array[int]":
    """Read the token ids in the answer to a `tokenize_call`. Raises UnusableError: the answer has
    no ids.
    """
    try:
        found = packed(_TOKENIZED.decode(answer).tokens)
    except UNREADABLE as error:
        raise UnusableError(f"unexpected answer to {TOKENIZE}: {error}") from None
    if not found:
        raise UnusableError(f"its answer to {TOKENIZE} has no tokens")
    return found
