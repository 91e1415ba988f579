"""Packed token ids: four bytes each, where a list takes forty.

Long lists are decoded and encoded in steps, because a call of the decoder or encoder holds the
interpreter, whichever thread calls it.
"""

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from kvrs.protocol.instance import TokenId

_STEP = 1 << 14  # Objects encoded in one step, and bytes decoded in one step.
_STEP_BYTES = 1 << 17
_IDS = msgspec.json.Decoder(list[TokenId])


def packed(ids: Iterable[int]) -> "array[int]":
    """Pack token ids. Raises ValueError: negative, or longer than four bytes."""
    try:
        return array("I", ids)
    except OverflowError:
        raise ValueError("a token id is out of range") from None


def decode(text: bytes) -> "array[int]":
    """Decode a JSON list of token ids. Raises msgspec.ValidationError: the text is not
    such a list.
    """
    text = text.strip()
    end = len(text) - 1
    if end < _STEP_BYTES:
        return packed(_IDS.decode(text))
    ids, at = array("I"), 1
    try:
        while at < end:
            comma = text.find(b",", at + _STEP_BYTES, end)
            after = end if comma < 0 else comma
            ids.extend(packed(_IDS.decode(b"[%b]" % text[at:after])))
            at = after + 1
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:  # The end of a step has cut a value that is not an id.
        raise msgspec.ValidationError("Expected `array` of ids") from None
    return ids


def _encodable(value: Any) -> Any:
    """The hook of msgspec for foreign types. By its contract it raises NotImplementedError for
    types that it cannot encode.
    """
    if not isinstance(value, array):
        raise NotImplementedError(f"{type(value).__name__} has no place in JSON with ids")
    if len(value) <= _STEP:
        return value.tolist()
    steps = (value[at : at + _STEP].tolist() for at in range(0, len(value), _STEP))
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(step)[1:-1] for step in steps) + b"]")


# Encode a value as JSON, with packed ids as lists of integers.
encode = msgspec.json.Encoder(enc_hook=_encodable).encode
