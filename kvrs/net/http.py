"""HTTP common to proxies, instances and agents: the server of a port with its limits,
authentication, error bodies, and watch streams.
"""

import asyncio
import errno
import hmac
import math
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler, Middleware

from kvrs.errors import ConfigError, RequestError
from kvrs.net import server
from kvrs.net.broken_http import (
    MOST_HEAD_BYTES,
    MOST_HEADERS,
    MOST_URL_BYTES,
    OLD_CHUNKS,
    TOO_LARGE,
    HttpRefusal,
    are_too_large,
)
from kvrs.net.connections import ConnectionLimits, Connections
from kvrs.net.http_connection import AiohttpConnection, log
from kvrs.net.origins import refusal
from kvrs.net.routes import SERVER
from kvrs.net.server import LINGERING_S, ReadingTurns
from kvrs.net.tls import Certificates, TlsServer
from kvrs.protocol.openai.chunks import error_body
from kvrs.protocol.secrets import Scope, ScopedKey

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
SHORTEST_WATCH_S = 0.02
HEALTHZ = "/healthz"  # Answers to everyone, and says nothing but that.

# Reading of a body that is not asked for yet stops at twice as much.
_UNREAD_BYTES = 64 << 10

# What only experiments and tests may do to a process.
_OF_ADMIN = frozenset(("/kvrs/v1/faults", "/reset_prefix_cache"))

_WATCHES = web.AppKey("watches", set[asyncio.Task[None]])


class HttpPort:
    """An application on one port. Every port for HTTP is one of these, so that all have the same
    limits.
    """

    def __init__(
        self,
        app: web.Application,
        limits: ConnectionLimits,
        *,
        shutdown_timeout_s: float,
        names: Collection[str] | None,
        keys: Sequence[ScopedKey] = (),
        tls: Certificates | None = None,
    ) -> None:
        """`names`: of this machine, for a port where requests of web pages are refused; None: a
        port for clients. `keys`: of the scopes that clients may prove at the start of a connection.
        `tls`: nothing but TLS is spoken.
        """
        self._tls = tls
        if names is not None:
            app.middlewares.insert(0, _refuse_pages({name.lower() for name in names}))
        app.middlewares.insert(0, _begin)
        app.on_response_prepare.append(_name_server)
        self._keys = keys
        # A client that leaves cancels its handler.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=shutdown_timeout_s
        )
        self._connections = Connections(limits)
        self._listening: asyncio.Server | TlsServer | None = None
        self.port = 0  # The one that is bound.

    async def open(self, host: str, port: int, *, shared: bool = False) -> int:
        """Serve; return the port that was bound. `shared`: other processes of this user may listen
        on it too, and connections are spread over them.

        Raises:
            OSError: it cannot be bound.
        """
        await self._runner.setup()
        assert self._runner.server is not None
        # Bodies are not inflated: that would happen before the request is authenticated.
        make = partial(
            AiohttpConnection,
            self._runner.server,
            self._connections,
            ReadingTurns(),
            self._keys,
            server.HEAD_S,
            loop=asyncio.get_running_loop(),
            access_log=None,
            logger=log,
            auto_decompress=False,
            lingering_time=LINGERING_S,
            read_bufsize=_UNREAD_BYTES,
            max_line_size=MOST_URL_BYTES,
            max_field_size=MOST_HEAD_BYTES,
            max_headers=MOST_HEADERS,
        )
        self._listening = await server.listen(host, port, make, self._tls, shared=shared)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self.port

    async def stop_listening(self) -> None:
        """Take no further connections; those that are open go on."""
        if self._listening is not None:
            self._listening.close()

    def abort(self) -> None:
        """Close all connections at once."""
        self._connections.abort()

    async def close(self) -> None:
        """End all requests, after the time for the last words of each."""
        await self.stop_listening()
        await self._runner.cleanup()


async def _name_server(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.setdefault("Server", SERVER)


@web.middleware
async def _begin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keep the connection from being closed for another, and refuse what aiohttp accepts and is
    beyond the limits, or is read in another way by other servers: behind a proxy in front, a
    request could be smuggled in it.
    """
    if isinstance(request.protocol, AiohttpConnection):
        request.protocol.idle_since_s = None
    if (refused := _refusal(request)) is not None:
        response = error(*refused)
        response.force_close()
        if isinstance(request.protocol, AiohttpConnection):
            request.protocol.drop_rest()
        return response
    try:
        return await handler(request)
    except web.HTTPClientError as fault:  # No such path or method, or a body that is too large.
        response = error(fault.status, f"{request.method} {request.path:.200}: {fault.reason}")
        for name in ("Allow", "X-Request-Id", "Access-Control-Allow-Origin", "Vary"):
            if name in fault.headers:
                response.headers[name] = fault.headers[name]
        return response


def _refusal(request: web.Request) -> HttpRefusal | None:
    if are_too_large(request.raw_headers):
        return TOO_LARGE
    if request.version < HttpVersion11 and "Transfer-Encoding" in request.headers:
        return OLD_CHUNKS
    return None


def _refuse_pages(names: Collection[str]) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != HEALTHZ and request.transport is not None:
            local = str((request.transport.get_extra_info("sockname") or ("",))[0])
            refused = refusal(request.method, request.headers, local, names)
            if refused is not None:
                status, message = refused
                return error(status, message)
        return await handler(request)

    return middleware


def new_app(scope: Scope, *middlewares: Middleware) -> web.Application:
    """An application that takes requests, all but `/healthz`, from clients that have proved the
    key of this scope, and turns `RequestError` into answers.
    """
    app = web.Application(
        client_max_size=MAX_BODY_BYTES, middlewares=[_authenticate(scope), _explain, *middlewares]
    )
    app[_WATCHES] = set()
    app.on_shutdown.append(_end)
    return app


async def _end(app: web.Application) -> None:
    # Watch streams never end by themselves: a shutdown would wait for them until its timeout.
    cut_watches(app)


def cut_watches(app: web.Application) -> None:
    """End all watch streams: to the watchers, what served here is gone."""
    for watch in app[_WATCHES]:
        watch.cancel()


def watches(app: web.Application) -> int:
    """How many watch streams are open."""
    return len(app[_WATCHES])


def require_token(
    tokens: Sequence[bytes], what: str, open_paths: Container[str] = (HEALTHZ,)
) -> Middleware:
    """One of the tokens is required for all but `open_paths`; they may change."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path not in open_paths and not any(
            hmac.compare_digest(given, b"Bearer " + token) for token in tokens
        ):
            return error(401, f"this endpoint requires {what}", kind="authentication_error")
        return await handler(request)

    return middleware


def _authenticate(scope: Scope) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        due = Scope.ADMIN if request.path in _OF_ADMIN else scope
        proved = request.protocol.scope if isinstance(request.protocol, AiohttpConnection) else None
        if proved is not due and request.path != HEALTHZ:
            return error(
                401,
                f"this endpoint requires a connection that has proved the key {due.value!r}",
                kind="authentication_error",
            )
        return await handler(request)

    return middleware


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise RequestError(
                "this Content-Encoding is not supported; allowed: 'identity'",
                status=415,
            )
        return await handler(request)
    except RequestError as fault:
        return error(fault.status, str(fault), param=fault.param, code=fault.code)


def error(
    status: int,
    message: str,
    *,
    kind: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> web.Response:
    """An error in the form of the OpenAI API."""
    body = error_body(message, kind=kind, param=param, code=code)
    return web.Response(status=status, body=body, content_type="application/json")


def answer(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def decode(body: bytes, what: type[T]) -> T:
    """Raises RequestError."""
    try:
        return msgspec.json.decode(body, type=what)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise RequestError(str(fault)) from None


@contextmanager
def naming_port(owner: str, key: str, host: str, port: int) -> Iterator[None]:
    """Name the port in the error when it cannot be bound.

    Raises:
        ConfigError: the block raised OSError.
    """
    try:
        yield
    except OSError as fault:
        why = "in use" if fault.errno == errno.EADDRINUSE else fault.strerror or str(fault)
        raise ConfigError(f"{owner}: {key}: {host}:{port} is {why}; allowed: a free port") from None


class News:
    """A signal that lets watch streams send a report before its time."""

    def __init__(self) -> None:
        self._told: asyncio.Future[None] | None = None

    def tell(self) -> None:
        if self._told is not None:
            self._told.set_result(None)
            self._told = None

    async def wait(self, timeout_s: float) -> None:
        """Until something is told, but not longer than that."""
        if self._told is None:
            self._told = asyncio.get_running_loop().create_future()
        # All watch streams wait for one future, so none may cancel it.
        await asyncio.wait({self._told}, timeout=timeout_s)


async def watch(
    request: web.Request, report: Callable[[], msgspec.Struct], news: News | None = None
) -> web.StreamResponse:
    """Send a report as a line of JSON every `?watch=SECONDS`, and whenever there are news,
    endlessly: the end of the stream means that this process is gone.
    """
    interval_s = watch_interval_s(request)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    with watching(request):
        await response.prepare(request)
        while True:
            await response.write(msgspec.json.encode(report()) + b"\n")
            await (asyncio.sleep(interval_s) if news is None else news.wait(interval_s))


def watch_interval_s(request: web.Request) -> float:
    """Raises RequestError: `?watch=` is no time."""
    given = request.query.get("watch", "")
    try:
        interval_s = max(float(given), SHORTEST_WATCH_S)
    except ValueError:
        interval_s = math.nan
    if not math.isfinite(interval_s):
        raise RequestError(f"watch must be seconds, got {given!r:.80}", param="watch")
    return interval_s


@contextmanager
def watching(request: web.Request) -> Iterator[None]:
    """A watch stream, which `cut_watches` ends."""
    task, watches = asyncio.current_task(), request.app[_WATCHES]
    assert task is not None
    watches.add(task)
    try:
        yield
    finally:
        watches.discard(task)
