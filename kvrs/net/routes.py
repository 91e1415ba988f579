"""Requests and responses of the HTTP server, and the table of handlers."""

import asyncio
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from http.client import responses
from typing import Any, NamedTuple

import msgspec
from aiohttp.helpers import rfc822_formatted_time
from multidict import CIMultiDictProxy

from kvrs.errors import RequestError, nearest
from kvrs.net.connections import PortConnection
from kvrs.net.http_request import BROKEN_BODY, Body, HttpRefusal
from kvrs.process.eager_task import Signal
from kvrs.protocol.openai.chunks import error_body
from kvrs.protocol.openai.decoding import BYTE_ORDER_MARK

SERVER = "kvrs"  # Value of the Server header, without a version.
JSON = "application/json"
UNKNOWN_ROUTE = "other"  # `Request.route` of requests to unknown paths.
MAX_BODY_BYTES = 64 << 20
_LONGEST_SLIP = 100  # Most characters of an unknown path that are compared with those of handlers.
NO_PARAMETERS: Mapping[str, str] = {}
_BODILESS = (204, 304)  # Statuses without a body, beside 1xx.


class Request(msgspec.Struct, eq=False):
    """A request. Its body is in `body` if it was short and had arrived with the head, else it comes
    in `coming`.
    """

    method: str
    path: str
    # Headers; empty after admission, which frees them since nothing reads them later.
    headers: CIMultiDictProxy[str]
    keep_alive: bool
    minor_version: int  # Minor version of HTTP/1: 0 or 1.
    query: Mapping[str, str]
    content_length: int | None  # Length of the body in bytes; None: it comes in chunks.
    body: bytes
    coming: Body | None
    remote: str
    connection: PortConnection
    # Path pattern of the route, for metrics and logs: a client cannot make up new values.
    route: str
    parameters: Mapping[str, str]  # Values of the pattern's parameters in the path.
    expects: bool  # The client waits for 100 Continue before it sends its body.
    is_begun: bool = False  # The head of the response has been written.
    id: str = ""
    tenant: Any = None
    # Function that makes more headers when the head of the response is made; None: none.
    head: Callable[[], Mapping[str, str]] | None = None

    async def read(self, check: Callable[[], None] | None = None) -> bytes:
        """Read the whole body. `check` is called when a part has arrived; by default it limits the
        body to `MAX_BODY_BYTES`.

        Raises:
            RequestError: a compressed or malformed body, or an error of `check`.
        """
        body, over = self.coming, Signal[RequestError | None]()
        if body is None:
            return self.body
        if self.headers.get("Content-Encoding", "identity") != "identity":
            message = "this Content-Encoding is not supported; allowed: 'identity'"
            raise RequestError(message, status=415)
        body.changed = came = partial(_came, body, over, check or partial(_check_size, self))
        self.connection.want_body()
        try:
            came()
            fault = await over
        finally:
            body.changed = None
            if not body.is_whole:
                body.drop()
        if fault is not None:
            raise fault
        return body.take().removeprefix(BYTE_ORDER_MARK)


def _came(body: Body, over: Signal[RequestError | None], check: Callable[[], None]) -> None:
    """Check a new part of the body; end the wait for the body at its end, or with an error."""
    fault = None
    try:
        if body.is_broken:
            raise RequestError(BROKEN_BODY.message, status=BROKEN_BODY.status)
        if not body.is_over and not over.done():
            check()
    except RequestError as error:
        fault = error
    # The check may have cut the body, and so have ended the wait already.
    if (fault is not None or body.is_whole) and not over.done():
        over.set_result(fault)


def _check_size(request: Request) -> None:
    assert request.coming is not None
    if max(request.coming.received_bytes, request.content_length or 0) > MAX_BODY_BYTES:
        raise RequestError(f"the body must be at most {MAX_BODY_BYTES} bytes", status=413)


class Response(msgspec.Struct, eq=False):
    """A response; `body` None: the handler has written the whole response itself."""

    status: int = 200
    body: bytes | None = b""
    headers: dict[str, str] = {}


WRITTEN = Response(body=None)

Handler = Callable[[Request], Awaitable[Response]]
# Function that serves a request by calling the handler, or answers it without.
Step = Callable[[Request, Handler], Awaitable[Response]]


class ServedRoute(NamedTuple):
    path: str
    handler: Handler


class Routes:
    """The handlers of a port by method and path. A path may contain `{name}` for one segment, or
    `{name:.+}` for several. `steps` wrap each handler, the first one outermost; the contexts in
    `beside` are entered while the port is open.
    """

    def __init__(self, *steps: Step) -> None:
        self.steps = steps
        self.beside: list[AbstractAsyncContextManager[None]] = []
        # Tasks of watch streams, which never end by themselves.
        self.watches: set[asyncio.Task[Any]] = set()
        self.exact: dict[tuple[str, str], ServedRoute] = {}
        self._patterns: list[tuple[str, re.Pattern[str], ServedRoute]] = []

    @property
    def served(self) -> set[tuple[str, str]]:
        """Return the methods and paths of all handlers."""
        return {*self.exact, *((method, route.path) for method, _, route in self._patterns)}

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Add a handler. A GET handler also serves HEAD, whose response has no body."""
        parts = re.split(r"\{(\w+)(?::([^}]+))?\}", path)
        pattern, shown = re.escape(parts[0]), parts[0]
        for name, part, behind in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            pattern += f"(?P<{name}>{part or '[^/]+'}){re.escape(behind)}"
            shown += f"{{{name}}}{behind}"
        route = ServedRoute(shown, handler)
        for each in ("GET", "HEAD") if method == "GET" else (method,):
            if len(parts) == 1:
                self.exact[each, path] = route
            else:
                self._patterns.append((each, re.compile(pattern), route))

    def cut_watches(self) -> None:
        """Cancel all watch streams, so that their watchers see the end of this process."""
        for watch in self.watches:
            watch.cancel()

    def find(self, method: str, path: str) -> tuple[ServedRoute, Mapping[str, str]]:
        if (found := self.exact.get((method, path))) is not None:
            return found, NO_PARAMETERS
        allowed = {each for each, served in self.exact if served == path}
        for each, pattern, route in self._patterns:
            if (match := pattern.fullmatch(path)) is not None:
                if each == method:
                    return route, match.groupdict()
                allowed.add(each)
        return ServedRoute(UNKNOWN_ROUTE, partial(self._refuse, allowed)), NO_PARAMETERS

    async def _refuse(self, allowed: Collection[str], request: Request) -> Response:
        """Refuse a request without a handler. `allowed`: the methods that the path has."""
        status, headers = 404, {}
        if allowed:
            status, headers = 405, {"Allow": ",".join(sorted(allowed))}
            hint = f"; allowed: {', '.join(sorted(allowed))}"
        else:
            paths = sorted({path for _, path in self.served})
            hint = nearest(request.path[:_LONGEST_SLIP], paths) or f"; allowed: {', '.join(paths)}"
        message = f"{request.method} {request.path:.200}: {responses[status]}{hint}"
        raise RequestError(message, status=status, headers=headers)


def head_of(
    status: int, fields: Mapping[str, str], request: Request | None, *, keeps_open: bool
) -> bytes:
    """Return the bytes of a response's head; `request`: None if it could not be read."""
    is_old = request is not None and not request.minor_version
    lines = [f"HTTP/1.{0 if is_old else 1} {status} {responses.get(status, '')}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    lines += [f"Date: {rfc822_formatted_time()}", f"Server: {SERVER}"]
    if not keeps_open:
        lines.append("Connection: close")
    elif is_old:
        lines.append("Connection: keep-alive")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def written(response: Response, request: Request | None = None, *, keeps_open: bool) -> bytes:
    """Return the bytes of a response, head and body; `request` as in `head_of`. A response to HEAD,
    and one of a status without a body, ends with its head: its client would take a body for the
    next response.
    """
    body, fields, status = response.body or b"", response.headers, response.status
    if has_body := status >= 200 and status not in _BODILESS:
        fields = {**fields, "Content-Length": str(len(body))}
    head = head_of(status, fields, request, keeps_open=keeps_open)
    has_body = has_body and (request is None or request.method != "HEAD")
    return head + body if has_body else head


def refused(refusal: HttpRefusal, headers: Mapping[str, str]) -> Response:
    """Return the response to a request that is refused before it reaches a handler."""
    kind = "server_error" if refusal.status >= 500 else "invalid_request_error"
    body = error_body(refusal.message, kind=kind)
    return Response(refusal.status, body, {"Content-Type": JSON, **headers})


def retry_after(seconds: float) -> str:
    """Return the value of `Retry-After` for these seconds, with up to 2 s of jitter, so that
    refused clients do not all return at the same time.
    """
    return str(max(1, math.ceil(seconds)) + secrets.randbelow(3))
