"""Steps around every request's handler at the clients' port: its id, tenant, errors, and access
line.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from kvrs.errors import RequestError
from kvrs.net.connections import UNSENT_BYTES
from kvrs.net.routes import UNKNOWN_ROUTE, Handler, Request, Response
from kvrs.process.row_log import RowLog
from kvrs.protocol.anthropic import OVERLOADED
from kvrs.proxy.api.client_port import bug_response, error_response, in_the_form_of
from kvrs.proxy.api.picked import EndpointPicker
from kvrs.proxy.api.tenants import OPEN_PATHS, Tenant, Tenants
from kvrs.proxy.streams.stream_metrics import Tally, TallySeries
from kvrs.proxy.wire.requests import CURRENT, REQUEST_ID, TRACEPARENT, RequestContext
from kvrs.tracing.settings import trace_settings

if TYPE_CHECKING:
    from kvrs.proxy.streams.spans import RequestTracer

log = logging.getLogger("kvrs.access")

CLIENT_GONE = 499
_CODES = {*map(int, HTTPStatus), CLIENT_GONE, OVERLOADED}
# Matches an id of a request that needs no quotes in a header and in a log.
_ID = re.compile(r"[A-Za-z0-9._~:/@+=-]{1,128}", re.ASCII)
# Matches a `traceparent` of W3C Trace Context, level 1: version, trace and span, both other than 0,
# and flags.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


def open_tracer(proxy: str, engine: str, environ: Mapping[str, str]) -> "RequestTracer | None":
    """Open the tracer of requests; None: the environment configures no traces.

    Raises:
        ConfigError: the configured traces are impossible.
    """
    if (settings := trace_settings(environ)) is None:
        return None
    from kvrs.proxy.streams.spans import RequestTracer
    from kvrs.tracing.sending import SpanSender

    return RequestTracer(SpanSender(settings, "kvrs-proxy", proxy), engine)


class RequestObserver:
    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Callable[[], float],
        tenants: Tenants,
        *,
        logs_access: bool,
        tracer: "RequestTracer | None" = None,
        picker: EndpointPicker | None = None,
    ) -> None:
        self._responses = TallySeries(
            "kvrs_http_responses",
            "Responses to requests of clients, by path and status; 499: the client was gone.",
            registry=registry,
            labels=["path", "code"],
        )
        self._series: dict[tuple[str, int], Tally] = {}
        self._clock = clock
        self._tenants = tenants
        self._access = RowLog(log, "request", time.time) if logs_access else None
        self._tracer = tracer
        self._picker = picker

    async def answer(self, request: Request, handler: Handler) -> Response:
        """Answer a request, whose tenant is known before its body is read. Every error has a body
        in the form of its API, and every response, even a refusal, has the id. An id that is
        unsafe in logs or headers is replaced; an invalid trace is dropped.
        """
        given, trace = request.headers.get(REQUEST_ID, ""), request.headers.get(TRACEPARENT, "")
        context = RequestContext(
            given if _ID.fullmatch(given) else os.urandom(16).hex(),
            trace if _TRACEPARENT.fullmatch(trace) else None,
        )
        if self._tracer is not None:
            self._tracer.begin(context, request.method)
        CURRENT.set(context)
        # Responses that write their head themselves take the id from the request.
        request.id = context.id
        if self._picker is not None:
            self._picker.begin(request, context)
        began_s, status, tenant = self._clock(), CLIENT_GONE, self._tenants.only
        try:
            try:
                if tenant is None and request.path not in OPEN_PATHS:
                    tenant = self._tenants.of(request)
                if tenant is not None:
                    request.tenant = tenant
                response = await handler(request)
                if response.body is not None and len(response.body) > UNSENT_BYTES:
                    request.connection.check_room(len(response.body))
            except RequestError as error:
                response = error_response(error)
            except Exception:
                # After the headers, only the end of the connection can tell the client of an
                # internal error.
                if request.is_begun:
                    raise
                response = bug_response()
            response = in_the_form_of(request, response)
            status = response.status
            if response.body is not None:
                response.headers[REQUEST_ID] = context.id
                if request.head is not None:
                    response.headers.update(request.head())
            return response
        finally:
            self._end(request, context, tenant, status, began_s)

    def note_refusal(self, status: int, headers: Mapping[str, str]) -> Mapping[str, str]:
        """Note a request that the HTTP server has refused before any handler; return headers for
        the answer.
        """
        given = headers.get(REQUEST_ID, "")
        request_id = given if _ID.fullmatch(given) else os.urandom(16).hex()
        (
            self._series.get((UNKNOWN_ROUTE, status)) or self._new_series(UNKNOWN_ROUTE, status)
        ).value += 1
        if self._access is not None:
            self._access.add(
                {"request_id": request_id, "method": "", "path": UNKNOWN_ROUTE, "status": status}
            )
        return {REQUEST_ID: request_id}

    async def close(self) -> None:
        """Write waiting log lines, and send the spans that have ended."""
        if self._access is not None:
            self._access.write()
        if self._tracer is not None:
            await self._tracer.close()

    def _new_series(self, path: str, status: int) -> Tally:
        series = self._series[path, status] = self._responses.of(path, _code(status))
        return series

    def _end(
        self,
        request: Request,
        context: RequestContext,
        tenant: Tenant | None,
        status: int,
        began_s: float,
    ) -> None:
        path = request.route
        (self._series.get((path, status)) or self._new_series(path, status)).value += 1
        if context.trace is not None:
            context.trace.end(path, status)
        if self._access is None:
            return
        facts: dict[str, Any] = {
            "request_id": context.id,
            "method": request.method,
            "path": path,
            "status": status,
            "seconds": round(self._clock() - began_s, 6),
        }
        if tenant is not None and tenant.name:
            facts["tenant"] = tenant.name
        self._access.add(facts)


def _code(status: int) -> str:
    """Return the status as a label. Unknown numbers, with which an engine may refuse, become 4xx or
    5xx.
    """
    return str(status) if status in _CODES else f"{status // 100}xx"
