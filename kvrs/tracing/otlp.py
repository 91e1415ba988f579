"""Spans as OTLP, the protocol of OpenTelemetry, in protobuf. Pure.

Written by hand for its cost: spans of a request and their encoding by OpenTelemetry's libraries
take several times as long, and were most of what a proxy with traces costs more.

Source of the field numbers: opentelemetry-proto 1.x (`trace`, `common`, `resource`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import Protocol

Value = str | bool | int | float | tuple[str, ...]

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_INT64 = 1 << 63
_ERROR = 2
_HAS_REMOTE, _IS_REMOTE = 0x100, 0x200  # Bits of a span's flags: whether its parent is elsewhere.


class SpanKind(IntEnum):
    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class SpanSource(Protocol):
    """Something that has ended, of which a span is made when it is sent."""

    def span(self) -> "Span": ...


@dataclass(slots=True, eq=False)
class Span:
    """Times in ns since 1970; ids in hexadecimal digits."""

    trace_id: str
    id: str
    parent_id: str  # Empty: the trace begins here.
    name: str
    kind: SpanKind
    begun_ns: int
    ended_ns: int
    attributes: Mapping[str, Value]
    first_token_ns: int = 0  # 0: there was none.
    error: str | None = None  # Its message; empty: an error without one.
    is_remote: bool = False  # The parent is a span of another process.

    def span(self) -> "Span":
        return self


def encode_span(span: Span) -> bytes:
    """As a field of `ScopeSpans`."""
    parts = [
        _IDS.pack(_TRACE_ID, bytes.fromhex(span.trace_id), _SPAN_ID, bytes.fromhex(span.id)),
        _text(_NAME, span.name),
        _TIMES.pack(_KIND, span.kind, _BEGUN, span.begun_ns, _ENDED, span.ended_ns),
    ]
    if span.parent_id:
        parts.append(_PARENT_ID + bytes.fromhex(span.parent_id))
    parts += [_attribute(key, value) for key, value in span.attributes.items()]
    if span.first_token_ns:
        parts.append(_FIRST_TOKEN.pack(_FIRST_TOKEN_HEAD, span.first_token_ns))
    if span.error is not None:
        message = _text(_STATUS_MESSAGE, span.error) if span.error else b""
        parts.append(_field(_STATUS, message + _STATUS_ERROR))
    parts.append(_REMOTE if span.is_remote else _LOCAL)
    return _field(_SPAN, b"".join(parts))


def encode_request(
    resource: Mapping[str, Value], scope: str, version: str, spans: Iterable[bytes]
) -> bytes:
    """Body of `POST /v1/traces` with spans that are encoded."""
    named = _text(_FIRST, scope) + _text(_SECOND, version)
    of_scope = _field(_FIRST, named) + b"".join(spans)
    facts = b"".join(_field(_FIRST, _key_value(key, value)) for key, value in resource.items())
    of_resource = _field(_FIRST, facts) + _field(_SECOND, of_scope)
    return _field(_FIRST, of_resource)


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SHORT[number]
    digits = bytearray()
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def _tag(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _field(tag: bytes, content: bytes) -> bytes:
    return b"".join((tag, _varint(len(content)), content))


@lru_cache(1024)
def _text(tag: bytes, text: str) -> bytes:
    return _field(tag, text.encode(errors="replace"))


# Typed: 1, 1.0 and True are equal, and differ here.
@lru_cache(256, typed=True)
def _attribute(key: str, value: Value) -> bytes:
    return _field(_ATTRIBUTE, _key_value(key, value))


def _key_value(key: str, value: Value) -> bytes:
    return _text(_FIRST, key) + _field(_SECOND, _any(value))


def _any(value: Value) -> bytes:
    match value:
        case bool():
            return _BOOL + _varint(value)
        case int() if -_INT64 <= value < _INT64:
            return _INT + _varint(value % (2 * _INT64))
        case float():
            return _DOUBLE_FIELD.pack(_DOUBLE, value)
        case tuple():
            values = b"".join(_field(_FIRST, _any(each)) for each in value)
            return _field(_ARRAY, values)
        case _:
            return _field(_FIRST, str(value).encode(errors="replace"))


_SHORT = [bytes([number]) for number in range(0x80)]
_FIRST, _SECOND = _tag(1, _BYTES), _tag(2, _BYTES)
_BOOL, _INT = _tag(2, _VARINT), _tag(3, _VARINT)
_DOUBLE, _ARRAY = _tag(4, _FIXED64), _tag(5, _BYTES)
_DOUBLE_FIELD = Struct("<cd")

_SPAN = _tag(2, _BYTES)
_TRACE_ID = _tag(1, _BYTES) + _varint(16)
_SPAN_ID = _tag(2, _BYTES) + _varint(8)
_IDS = Struct("2s16s2s8s")
_PARENT_ID = _tag(4, _BYTES) + _varint(8)
_NAME = _tag(5, _BYTES)
_KIND, _BEGUN, _ENDED = _tag(6, _VARINT), _tag(7, _FIXED64), _tag(8, _FIXED64)
_TIMES = Struct("<cBcQcQ")
_ATTRIBUTE = _tag(9, _BYTES)
_EVENT = _tag(11, _BYTES)
_EVENT_NAME = _text(_tag(2, _BYTES), "first_token")
_STATUS, _STATUS_MESSAGE = _tag(15, _BYTES), _tag(2, _BYTES)
_STATUS_ERROR = _tag(3, _VARINT) + _varint(_ERROR)
_FLAGS = Struct("<2sI")
_LOCAL = _FLAGS.pack(_tag(16, _FIXED32), _HAS_REMOTE)
_REMOTE = _FLAGS.pack(_tag(16, _FIXED32), _HAS_REMOTE | _IS_REMOTE)
_EVENT_BYTES = len(_EVENT_NAME) + 1 + 8
_FIRST_TOKEN_HEAD = _EVENT + _varint(_EVENT_BYTES) + _EVENT_NAME + _tag(1, _FIXED64)
_FIRST_TOKEN = Struct(f"<{len(_FIRST_TOKEN_HEAD)}sQ")
