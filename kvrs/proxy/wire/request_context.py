"""The context of a client's request within the cluster: its id, and its trace."""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from kvrs.direct import DirectRequest

TRACEPARENT = "traceparent"
REQUEST_ID = "X-Request-Id"
REQUEST_ID_KEY = web.RequestKey("request_id", str)
# Further headers of the response, for those that write their head themselves.
HEADERS_KEY: web.RequestKey[Mapping[str, str]] = web.RequestKey("headers", Mapping[str, str])

ClientRequest = DirectRequest | web.Request


@dataclass(slots=True, eq=False)
class RequestContext:
    id: str
    traceparent: str | None = None  # Of the client, or of the span that it has here.
    trace: Any = None  # Its RequestTrace (kvrs/proxy/streams/spans.py), if it has one.


# The context of the request that the running task works on.
CURRENT: ContextVar[RequestContext | None] = ContextVar("CURRENT", default=None)
