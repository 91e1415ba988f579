"""Conversion of whole numbers written as 4.0 or 4e0 in bodies. Languages with only floating point
write them so, and vLLM and OpenAI accept them. Pure.

Strings, true, false and 4.5 stay as they are.
"""

from typing import Any

import msgspec

# Fields of both endpoints whose values are whole numbers, or lists of whole numbers.
INTEGERS = frozenset(
    (
        *("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "n"),
        *("logprobs", "top_logprobs"),
    )
)
LISTS = frozenset(("prompt", "stop_token_ids", "allowed_token_ids"))
_LONGEST_BYTES = 64  # Most bytes in the text of a number; a longer text is left as it is.
_SIGNS = (b".", b"e", b"E")
_ANY = msgspec.json.Decoder()


def with_whole_numbers(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Return the fields, in which whole numbers such as 4.0 are replaced by JSON integers."""
    return {name: _whole(name, value) for name, value in fields.items()}


def _whole(name: str, value: msgspec.Raw) -> msgspec.Raw:
    is_one = name in INTEGERS and len(value) <= _LONGEST_BYTES
    if not (is_one or name in LISTS):
        return value
    text = bytes(value)
    if b'"' in text or not any(sign in text for sign in _SIGNS):
        return value
    try:
        given = _ANY.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return value
    return msgspec.Raw(msgspec.json.encode(_converted(given)))


def _converted(value: Any) -> Any:
    if isinstance(value, list):
        return [_converted(each) for each in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
