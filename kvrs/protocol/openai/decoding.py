"""Steps that decode a body from outside: a scan for limits, the decoder whose errors name the
field, and whole numbers written as floats.

Limits on a body's structure, checked by a scan before anything is decoded.

Decoding holds the interpreter, and millions of small values take seconds. The size of a body is
limited elsewhere; text may fill it.

Conversion of whole numbers written as 4.0 or 4e0 in bodies. Languages with only floating point
write them so, and vLLM and OpenAI accept them. Pure.

Strings, true, false and 4.5 stay as they are.

A decoder of bodies, whose errors name the field, and its value where that is not private.

A value is private if it may hold a part of a prompt, a tool's arguments or token, or a user's name
or salt: clients write errors to their logs. An error names only the kind of a private value.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from kvrs.errors import RequestError

# Most objects and lists in a body; strings, including keys, may be twice as many.
MAX_ELEMENTS = 1 << 16
MAX_VALUES = 1 << 20  # Most values of any kind in a body: a prompt may be a long list of ids.
# Most values in the fields that a chat template reads, which may write them as JSON again.
MAX_TEMPLATE_VALUES = 1 << 17
MAX_DEPTH = 128

_SPARE_ELEMENTS = 1 << 10  # Objects and lists that a body may have besides those of the prompt.
_SPARE_BYTES = 1 << 16
_ESCAPED_BYTES = len(b"\\u00e9")  # Most bytes that one character takes in JSON, as an escape.

# Some writers of UTF-8 begin with it; Python servers ignore it.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Bytes scanned in one step, which holds the interpreter for a few milliseconds at most.
_STEP_BYTES = 128 << 10
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DEPTH = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


@lru_cache(maxsize=16)
def elements_within(max_model_len: int) -> int:
    """Return the most objects and lists that a body for a model may have: each takes at least one
    token of the prompt.
    """
    return min(MAX_ELEMENTS, max_model_len + _SPARE_ELEMENTS)


def bytes_within(max_model_len: int, longest_token: int) -> int:
    """Return the most bytes that a body with a text prompt may have: the longest prompt that fits
    the model, with every character escaped.
    """
    return max_model_len * longest_token * _ESCAPED_BYTES + _SPARE_BYTES


def check_structure(
    text: bytes,
    param: str | None = None,
    *,
    max_values: int = MAX_VALUES,
    max_elements: int = MAX_ELEMENTS,
) -> None:
    """Refuse JSON with too many values or elements, or with too deep nesting. Invalid JSON may
    pass; the decoder then stops at the fault that has misled the scan.

    Raises:
        RequestError: `param` names the field.
    """
    opened = text.count(b"[") + text.count(b"{")
    if opened <= MAX_DEPTH and len(text) < 2 * min(max_values, max_elements):
        return
    what = param or "the body"
    containers = quotes = values = depth = 0
    for marks, outside in _outside_strings(text):
        brackets = outside.translate(None, _NOT_BRACKETS)
        here = brackets.count(b"[") + brackets.count(b"{")
        containers += here
        quotes += marks
        values += here + outside.count(b",")
        for limit, got, kind in (
            (max_elements, containers, "objects and lists"),
            (2 * max_elements, quotes // 2, "keys and strings"),
            (max_values, values, "values"),
        ):
            if got > limit:
                raise RequestError(
                    f"{what} has more than {limit} {kind}; allowed: at most {limit}", param=param
                )
        depths = list(accumulate(map(_DEPTH.__getitem__, brackets), initial=depth))
        depth = depths[-1]
        if max(depths) > MAX_DEPTH:
            raise RequestError(
                f"{what} is nested more than {MAX_DEPTH} levels deep; allowed: at most {MAX_DEPTH}",
                param=param,
            )


def _outside_strings(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield, for each step of the text, the number of quotes that begin or end strings, and the
    bytes outside strings.
    """
    at, inside = 0, False
    while at < len(text):
        step = text[at : at + _STEP_BYTES]
        # The step ends behind an odd number of backslashes: move its end, so that no escape is
        # split.
        if (len(step) - len(step.rstrip(b"\\"))) % 2:
            step = text[at : at + _STEP_BYTES + 1]
        at += len(step)
        parts = _ESCAPE.sub(b"", step).split(b'"')
        yield len(parts) - 1, b"".join(parts[inside::2])
        inside ^= len(parts) % 2 == 0


# Fields of both endpoints whose values are whole numbers, or lists of whole numbers.
INTEGERS = frozenset(
    (
        *("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "n"),
        *("logprobs", "top_logprobs"),
    )
)
LISTS = frozenset(("prompt", "stop_token_ids", "allowed_token_ids"))
_LONGEST_NUMBER_BYTES = 64  # Most bytes in the text of a number; a longer text is left as it is.
_SIGNS = (b".", b"e", b"E")
_ANY = msgspec.json.Decoder()


def with_whole_numbers(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Return the fields, in which whole numbers such as 4.0 are replaced by JSON integers."""
    return {name: _whole(name, value) for name, value in fields.items()}


def _whole(name: str, value: msgspec.Raw) -> msgspec.Raw:
    is_one = name in INTEGERS and len(value) <= _LONGEST_NUMBER_BYTES
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


Decoded = TypeVar("Decoded")

# Errors of msgspec for malformed bytes.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Fields with private values, of all APIs, by the name at the beginning of their path.
_PRIVATE = frozenset(
    (
        *("prompt", "messages", "input", "instructions", "system", "suffix", "documents", "tokens"),
        *("chat_template", "chat_template_kwargs", "prediction", "audio", "prompt_embeds"),
        *("input_ids", "kvrs", "kv_transfer_params", "tools", "functions", "mcp_servers"),
        *("user", "cache_salt"),
    )
)
# Ends of paths below private fields whose values are words of the API.
_WORDS = (".role", ".type")
_WORD = re.compile(r'"\w{1,40}"')
_KINDS = {'"': "a string", "[": "a list", "{": "an object", "t": "true", "f": "false", "n": "null"}
_LONGEST_BYTES = 80  # Most bytes of a value in an error.

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_MISSING = re.compile("Object missing required field `(.*)`")
# End of msgspec's messages: the path of the value, or of the object that has the wrong key.
_PLACE = re.compile(r" - at `(key` in `)?\$(.*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


def given_as(path: str, value: bytes | msgspec.Raw) -> str:
    """Return the beginning of an error about a field: its path, and the JSON of its value,
    shortened, or the kind of a private value.
    """
    text = _short(value)
    if not _is_private(path) or (path.endswith(_WORDS) and _WORD.fullmatch(text)):
        return f"{path}={text}"
    if text == "[]":
        return f"{path}: an empty list"
    return f"{path}: {_KINDS.get(text[:1], 'a number')}"


def _short(value: bytes | msgspec.Raw) -> str:
    return bytes(memoryview(value)[:_LONGEST_BYTES]).decode(errors="replace")


def _is_private(path: str) -> bool:
    return re.split(r"[.\[]", path)[0] in _PRIVATE


def decode_as(decoder: msgspec.json.Decoder[Decoded], body: bytes, field: str = "") -> Decoded:
    """Decode JSON as the decoder's type; `field` is the path of this JSON in the body, empty: it is
    the body.

    Raises:
        RequestError: the message says what is wrong, and where.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong(str(error), body, field) from None
    except UNREADABLE as error:
        if not body.strip():
            raise RequestError("the body is empty; allowed: a JSON object") from None
        raise RequestError(f"the body is not valid JSON: {error}") from None


def _wrong(message: str, body: bytes, field: str) -> RequestError:
    """Make the error of JSON of another type from msgspec's message."""
    place = _PLACE.search(message)
    of_key, steps = ("", "") if place is None else place.groups("")
    message = _PLACE.sub("", message)
    path = (field + steps).lstrip(".")
    if (missing := _MISSING.match(message)) is not None:
        path = f"{path}.{missing[1]}".lstrip(".")
        return RequestError(f"{path} is missing", param=path)
    where = f"field {path}"
    if of_key:
        where = f"a key of {where}"
    elif not path:
        where = "the body"
    elif not _is_private(path):
        message += _scalar_at(steps, body)
    return RequestError(f"{message} ({where})", param=path or None)


def _scalar_at(steps: str, body: bytes) -> str:
    """Return the value at these steps into a body, behind a space; empty: it is an object, a list
    or within an object with keys of the client.
    """
    value = body
    try:
        for key, index in _STEP.findall(steps):
            value = bytes(_OBJECT.decode(value)[key] if key else _LIST.decode(value)[int(index)])
    except (msgspec.DecodeError, LookupError):  # JSON ends behind the wrong value.
        return ""
    return "" if value.startswith((b"{", b"[")) else f" {_short(value)}"
