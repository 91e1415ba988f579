"""The span that a request belongs to: ids, and the header `traceparent`.

Source: W3C Trace Context, level 1.
"""

import random
import re
from typing import NamedTuple

TRACEPARENT = "traceparent"
_FORM = re.compile(
    r"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})"
)
_SAMPLED = 1


class Parent(NamedTuple):
    """Ids in hexadecimal digits; `is_taken`: spans of the trace are kept."""

    trace_id: str
    span_id: str
    is_taken: bool


def traceparent_of(trace_id: str, span_id: str, *, is_taken: bool) -> str:
    """The value of the header."""
    return f"00-{trace_id}-{span_id}-01" if is_taken else f"00-{trace_id}-{span_id}-00"


def parent_of(text: str) -> Parent | None:
    """None: the value of the header names no span."""
    if (found := _FORM.fullmatch(text)) is None:
        return None
    trace_id, span_id, flags = found.groups()
    return Parent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))


def new_trace_id() -> str:
    """Not 0, which is no id."""
    return f"{random.getrandbits(128) or 1:032x}"


def new_span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"
