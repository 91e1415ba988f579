"""A decoder of bodies, whose errors name the field, and its value where that is not private.

A value is private if it may hold a part of a prompt, a tool's arguments or token, or a user's name
or salt: clients write errors to their logs. An error names only the kind of a private value.
"""

import re
from typing import TypeVar

import msgspec

from kvrs.errors import RequestError

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
