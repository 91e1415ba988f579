"""Spans in protobuf, as OpenTelemetry's own library reads and writes them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from kvrs.tracing.otlp import Span, SpanKind, encode_request, encode_span

KINDS = {kind: trace.SpanKind[kind.name] for kind in SpanKind}
TIMES = st.integers(1, 2**63)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=200)
VALUES = st.one_of(
    TEXTS,
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.lists(TEXTS, max_size=3).map(tuple),
)
SPANS = st.builds(
    Span,
    trace_id=st.integers(1, 2**128 - 1).map(lambda number: f"{number:032x}"),
    id=st.integers(1, 2**64 - 1).map(lambda number: f"{number:016x}"),
    parent_id=st.one_of(
        st.just(""), st.integers(1, 2**64 - 1).map(lambda number: f"{number:016x}")
    ),
    name=TEXTS,
    kind=st.sampled_from(SpanKind),
    begun_ns=TIMES,
    ended_ns=TIMES,
    attributes=st.dictionaries(TEXTS, VALUES, max_size=5),
    first_token_ns=st.one_of(st.just(0), TIMES),
    error=st.one_of(st.none(), TEXTS),
    is_remote=st.booleans(),
)


def theirs(span: Span, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    trace_id = int(span.trace_id, 16)

    def context(span_id: str) -> SpanContext:
        return SpanContext(trace_id, int(span_id, 16), span.is_remote, TraceFlags(1))

    status = Status() if span.error is None else Status(StatusCode.ERROR, span.error or None)
    at_ns = span.first_token_ns
    return ReadableSpan(
        span.name,
        context(span.id),
        context(span.parent_id) if span.parent_id else None,
        resource,
        span.attributes,
        [Event("first_token", timestamp=at_ns)] if at_ns else [],
        kind=KINDS[span.kind],
        status=status,
        start_time=span.begun_ns,
        end_time=span.ended_ns,
        instrumentation_scope=scope,
    )


@given(st.lists(SPANS, min_size=1, max_size=3))
def test_spans_are_encoded_as_the_library_encodes_them(spans: list[Span]) -> None:
    """Every collector reads that."""
    named: dict[str, Any] = {"service.name": "x", "number": 3}
    resource, scope = Resource(named), InstrumentationScope("kvrs", "1.2")
    expected = encode_spans([theirs(span, resource, scope) for span in spans])

    body = encode_request(named, "kvrs", "1.2", [encode_span(span) for span in spans])

    found = ExportTraceServiceRequest.FromString(body)
    for span, mine in zip(spans, found.resource_spans[0].scope_spans[0].spans, strict=True):
        if not span.parent_id:  # Where there is no parent it is not elsewhere.
            mine.flags = 0x100
        mine.status.SetInParent()  # The library sends an empty one too.
    assert found == expected


@pytest.mark.parametrize("value", [2**63, 2**200, -(2**63) - 1])
def test_a_number_beyond_64_bits_is_sent_as_text(value: int) -> None:
    """A seed may be any number; another one would be wrong."""
    span = Span("1" * 32, "1" * 16, "", "x", SpanKind.SERVER, 1, 2, {"seed": value})

    body = encode_request({}, "kvrs", "1", [encode_span(span)])

    (found,) = ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    assert found.attributes[0].value.string_value == str(value)
