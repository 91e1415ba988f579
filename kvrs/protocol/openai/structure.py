"""Limits on a body's structure, checked by a scan before anything is decoded.

Decoding holds the interpreter, and millions of small values take seconds. The size of a body is
limited elsewhere; text may fill it.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

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
