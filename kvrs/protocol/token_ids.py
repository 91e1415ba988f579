"""Token ids that are kept: four bytes each, where a list takes forty."""

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

# So many are objects at a time while they are encoded.
_STEP = 1 << 14


def packed(ids: Iterable[int]) -> "array[int]":
    """Raises ValueError: one is negative, or takes more than four bytes."""
    try:
        return array("I", ids)
    except OverflowError:
        raise ValueError("a token id is out of range") from None


def encode(value: Any) -> bytes:
    """JSON of a value in which packed ids are lists of integers."""
    return msgspec.json.encode(value, enc_hook=_encodable)


def _encodable(value: Any) -> Any:
    if not isinstance(value, array):
        raise NotImplementedError(type(value))
    if len(value) <= _STEP:
        return value.tolist()
    steps = (value[at : at + _STEP].tolist() for at in range(0, len(value), _STEP))
    return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(step)[1:-1] for step in steps) + b"]")
