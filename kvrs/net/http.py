"""Common HTTP of all ports except the clients' port: authentication, error bodies, responses in
pieces, and watch streams.
"""

import asyncio
import errno
import hmac
import logging
import math
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec

from kvrs.errors import ConfigError, RequestError
from kvrs.net import server
from kvrs.net.connections import UNSENT_BYTES, ConnectionLimits
from kvrs.net.http_request import no_note
from kvrs.net.origins import refusal
from kvrs.net.routes import JSON, WRITTEN, Handler, Request, Response, Routes, Step, head_of
from kvrs.net.server import HttpServer
from kvrs.net.tls import Certificates
from kvrs.protocol.openai.chunks import error_body
from kvrs.protocol.secrets import Scope, ScopedKey

log = logging.getLogger(__name__)

T = TypeVar("T")

SHORTEST_WATCH_S = 0.02
HEALTHZ = "/healthz"  # Path that needs no proof; its answer only shows that the process answers.

# Paths for experiments and tests, which need the key of the admin scope.
_OF_ADMIN = frozenset(("/kvrs/v1/faults", "/reset_prefix_cache"))


def inner_server(
    routes: Routes,
    limits: ConnectionLimits,
    *,
    shutdown_timeout_s: float,
    names: Collection[str] | None,
    keys: Sequence[ScopedKey] = (),
    tls: Certificates | None = None,
) -> HttpServer:
    """Make the server of a port within the cluster, or for operators. `names`: names of this
    machine, by which requests of web pages are recognised and refused; None: such requests are not
    refused.
    """
    steps = routes.steps
    if names is not None:
        steps = (_refuse_pages({name.lower() for name in names}), *steps)
    return HttpServer(
        routes,
        partial(_serve, steps),
        no_note,
        limits,
        idle_s=server.HEAD_S,
        shutdown_timeout_s=shutdown_timeout_s,
        keys=keys,
        tls=tls,
    )


async def _serve(steps: Sequence[Step], request: Request, handler: Handler) -> Response:
    for step in reversed(steps):
        handler = _around(step, handler)
    try:
        response = await handler(request)
        if response.body is not None and len(response.body) > UNSENT_BYTES:
            request.connection.check_room(len(response.body))
        return response
    except RequestError as fault:
        response = error(fault.status, str(fault), param=fault.param, code=fault.code)
        response.headers |= fault.headers
        return response
    except Exception:
        if request.is_begun:
            raise
        log.exception("request ended by a bug")
        return error(500, "the server failed; its log says more", kind="server_error")


def _around(step: Step, handler: Handler) -> Handler:
    return lambda request: step(request, handler)


def _refuse_pages(names: Collection[str]) -> Step:
    async def step(request: Request, handler: Handler) -> Response:
        transport = request.connection.transport
        if request.path != HEALTHZ and transport is not None:
            local = str((transport.get_extra_info("sockname") or ("",))[0])
            refused = refusal(request.method, request.headers, local, names)
            if refused is not None:
                return error(*refused)
        return await handler(request)

    return step


def authenticated(scope: Scope, *steps: Step) -> Routes:
    """Make routes that serve only clients that have proved the key of this scope, except at
    `/healthz`.
    """

    async def authenticate(request: Request, handler: Handler) -> Response:
        due = Scope.ADMIN if request.path in _OF_ADMIN else scope
        if request.connection.scope is not due and request.path != HEALTHZ:
            return error(
                401,
                f"this endpoint requires a connection that has proved the key {due.value!r}",
                kind="authentication_error",
            )
        return await handler(request)

    return Routes(authenticate, *steps)


def require_token(
    tokens: Sequence[bytes], what: str, open_paths: Container[str] = (HEALTHZ,)
) -> Step:
    """Make a step that answers 401 to requests without one of the tokens, except for `open_paths`.
    The caller may change the sequence of tokens later.
    """

    async def step(request: Request, handler: Handler) -> Response:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path not in open_paths and not any(
            hmac.compare_digest(given, b"Bearer " + token) for token in tokens
        ):
            return error(401, f"this endpoint requires {what}", kind="authentication_error")
        return await handler(request)

    return step


def error(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> Response:
    """Make an error response in OpenAI's form."""
    body = error_body(message, kind=kind, param=param, code=code)
    return Response(status, body, {"Content-Type": JSON})


def answer(value: object, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(value), {"Content-Type": JSON})


def decode(body: bytes, what: type[T]) -> T:
    """Decode a JSON body into this type. Raises RequestError: it does not fit the type."""
    try:
        return msgspec.json.decode(body, type=what)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise RequestError(str(fault)) from None


@contextmanager
def naming_port(owner: str, key: str, host: str, port: int) -> Iterator[None]:
    """Turn the block's OSError into an error that names the port and its setting.

    Raises:
        ConfigError: the block raised OSError.
    """
    try:
        yield
    except OSError as fault:
        why = "in use" if fault.errno == errno.EADDRINUSE else fault.strerror or str(fault)
        raise ConfigError(f"{owner}: {key}: {host}:{port} is {why}; allowed: a free port") from None


class News:
    """A signal that makes watch streams send a report early."""

    def __init__(self) -> None:
        self._told: asyncio.Future[None] | None = None

    def tell(self) -> None:
        if self._told is not None:
            self._told.set_result(None)
            self._told = None

    async def wait(self, timeout_s: float) -> None:
        """Wait until `tell` is called, at most `timeout_s`."""
        if self._told is None:
            self._told = asyncio.get_running_loop().create_future()
        # All watch streams wait for the same future, so `asyncio.wait` is used, which does not
        # cancel it.
        await asyncio.wait({self._told}, timeout=timeout_s)


class PieceWriter:
    """Writes a response piece by piece."""

    def __init__(self, request: Request, content_type: str) -> None:
        """Send the head of a 200 response. Raises ConnectionResetError: the client has closed the
        connection.
        """
        if (transport := request.connection.transport) is None:
            raise ConnectionResetError("the client closed its connection")
        self.transport = transport
        self._room = asyncio.Event()
        self._room.set()
        request.connection.writer = self
        request.is_begun, self._is_chunked = True, bool(request.minor_version)
        request.keep_alive = request.keep_alive and self._is_chunked
        fields = {"Content-Type": content_type}
        if self._is_chunked:
            fields["Transfer-Encoding"] = "chunked"
        transport.write(head_of(200, fields, request, keeps_open=request.keep_alive))

    async def write(self, data: bytes) -> None:
        """Write a piece, and wait until the client has room for more.

        Raises:
            ConnectionResetError: the client has closed the connection.
        """
        if self.transport.is_closing():
            raise ConnectionResetError("the client closed its connection")
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        await self._room.wait()

    def end(self) -> Response:
        if self._is_chunked and not self.transport.is_closing():
            self.transport.write(b"0\r\n\r\n")
        return WRITTEN

    def room_changed(self, has_room: bool) -> None:
        (self._room.set if has_room else self._room.clear)()


async def watch(
    request: Request, report: Callable[[], msgspec.Struct], news: News | None = None
) -> Response:
    """Send a report as a line of JSON every `?watch=SECONDS` and at every news, without end: the
    end of the stream means that this process has ended.
    """
    interval_s = watch_interval_s(request)
    with watching(request):
        writer = PieceWriter(request, "application/x-ndjson")
        while True:
            await writer.write(msgspec.json.encode(report()) + b"\n")
            await (asyncio.sleep(interval_s) if news is None else news.wait(interval_s))


def watch_interval_s(request: Request) -> float:
    """Return the seconds in `?watch=`, at least `SHORTEST_WATCH_S`. Raises RequestError: they are
    no finite number.
    """
    given = request.query.get("watch", "")
    try:
        interval_s = max(float(given), SHORTEST_WATCH_S)
    except ValueError:
        interval_s = math.nan
    if not math.isfinite(interval_s):
        raise RequestError(f"watch must be seconds, got {given!r:.80}", param="watch")
    return interval_s


@contextmanager
def watching(request: Request) -> Iterator[None]:
    """Register the calling task as a watch stream for the block, so that `Routes.cut_watches` ends
    it.
    """
    task, watches = asyncio.current_task(), request.connection.watches
    assert task is not None
    watches.add(task)
    try:
        yield
    finally:
        watches.discard(task)
