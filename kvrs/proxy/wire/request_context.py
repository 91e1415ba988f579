"""The context of a client's request within the cluster: its id, and its trace."""

import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from kvrs.direct import DirectRequest
from kvrs.ids import StreamId

TRACEPARENT = "traceparent"
REQUEST_ID = "X-Request-Id"
REQUEST_ID_KEY = web.RequestKey("request_id", str)
# Further headers of the response, for those that write their head themselves.
HEADERS_KEY: web.RequestKey[Mapping[str, str]] = web.RequestKey("headers", Mapping[str, str])

# Characters that need no quotes in a header and in a log.
_ID = re.compile(r"[A-Za-z0-9._~:/@+=-]{1,128}", re.ASCII)
# W3C Trace Context, level 1: version, trace and span, both other than 0, and flags.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


@dataclass(slots=True, eq=False)
class RequestContext:
    id: str
    traceparent: str | None = None  # Of the client, or of the span that it has here.
    trace: Any = None  # Its RequestTrace (kvrs/proxy/streams/spans.py), if it has one.

    def call_headers(self, stream: StreamId, attempt: int, traceparent: str | None) -> str:
        """For the calls of an attempt. Engines take the id for that of their own request, which
        must differ from those of other choices and attempts. `traceparent`: of the call's own span.
        """
        return self.headers(f"{self.id}-{stream[:8]}-{attempt}", traceparent)

    def headers(self, request_id: str, traceparent: str | None = None) -> str:
        """Lines for a call of that id."""
        lines = f"{REQUEST_ID}: {request_id}\r\n"
        if (traceparent := traceparent or self.traceparent) is not None:
            lines += f"{TRACEPARENT}: {traceparent}\r\n"
        return lines


# The context of the request that the running task works on.
CURRENT: ContextVar[RequestContext | None] = ContextVar("CURRENT", default=None)


def noted_lines(request: web.Request | DirectRequest) -> str:
    """Lines for the head of the response, of what is noted of a request; at other ports that is
    nothing.
    """
    state = request.state if isinstance(request, DirectRequest) else request
    request_id, headers = state.get(REQUEST_ID_KEY), state.get(HEADERS_KEY)
    lines = "" if request_id is None else f"{REQUEST_ID}: {request_id}\r\n"
    return lines if headers is None else lines + header_lines(headers)


def header_lines(headers: Mapping[str, str]) -> str:
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


def context_of(headers: Mapping[str, str]) -> RequestContext:
    """The context of a request with these headers. An id that could not stand in a log or a header
    is replaced, and a trace that is none is dropped.
    """
    given, trace = headers.get(REQUEST_ID, ""), headers.get(TRACEPARENT, "")
    return RequestContext(
        given if _ID.fullmatch(given) else secrets.token_hex(16),
        trace if _TRACEPARENT.fullmatch(trace) else None,
    )
