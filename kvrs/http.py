"""HTTP common to proxies, instances and agents: the server of a port with its limits,
authentication, error bodies, and watch streams.
"""

import asyncio
import errno
import hmac
import logging
import math
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from kvrs.connections import ConnectionLimits, Connections
from kvrs.errors import ConfigError, RequestError
from kvrs.origins import refusal
from kvrs.protocol.openai.chunks import error_body
from kvrs.protocol.proof import NONCE_BYTES, ProofError, ServerProof
from kvrs.protocol.secrets import Door, DoorKey
from kvrs.tls import Certificates, TlsServer, bind

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
SHORTEST_WATCH_S = 0.02
HEALTHZ = "/healthz"  # Answers to everyone, and says nothing but that.

# A connection without a request, or with less than the whole header of one, is closed after it.
IDLE_S = 20.0
_BACKLOG = 1024
_LINGERING_S = 2.0  # For the rest of a body that was refused.
_MAX_HEADERS = 64

_FULL = error_body("too many connections are open", kind="server_error")
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: %s\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
)

# What only experiments and tests may do to a process.
_OF_ADMIN = frozenset(("/kvrs/v1/faults", "/reset_prefix_cache"))

_TLS_ONLY = error_body("this port speaks TLS only: use https://")
_IN_PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_TLS_ONLY), _TLS_ONLY)
)

_WATCHES = web.AppKey("watches", set[asyncio.Task[None]])


class _BrokenHttp(logging.Filter):
    """Logs one line for a request that is not HTTP, without its bytes, which aiohttp quotes: they
    may be of a prompt or a key.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "broken HTTP: %s", (type(error).__name__,)
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


_log = logging.getLogger(__name__)
_log.addFilter(_BrokenHttp())


class HttpConnection(web.RequestHandler):
    """A connection that counts. `door` is the one of which the client has proved the key.
    `room_changed` is called with whether its client reads as fast as is written to it.
    """

    __slots__ = ("_abort", "_among", "_proof", "_taken", "address", "door", "room_changed")

    def __init__(
        self, server: web.Server, among: Connections, keys: Sequence[DoorKey], **settings: Any
    ) -> None:
        super().__init__(server, **settings)
        self._among = among
        self._proof = ServerProof(keys, secrets.token_bytes(NONCE_BYTES)) if keys else None
        self.address = ""
        self.door: Door | None = None
        self.room_changed: Callable[[bool], None] | None = None
        self._taken: asyncio.Transport | None = None
        self._abort: Callable[[], object] | None = None

    def reserve(self, address: str, abort: Callable[[], object]) -> bool:
        """Count it while it has no transport yet, until `connection_lost`; False: it is refused.
        `abort` ends it until then.
        """
        self.address, self._abort = address, abort
        return self._among.admit(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do what asyncio's do, and descend from none of them.
        transport = cast(asyncio.Transport, transport)
        if self._abort is None and not self.reserve(_address_of(transport), transport.abort):
            transport.write(_REFUSAL % (retry_after(1.0).encode(), len(_FULL), _FULL))
            transport.close()
            return
        self._taken = transport
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._proof is not None:
            data = self._prove(self._proof, data)
            if not data:
                return
        super().data_received(data)

    def _prove(self, proof: ServerProof, data: bytes) -> bytes:
        """What is left of the data when the proof is over."""
        if self._taken is None:  # Refused.
            return b""
        try:
            answer, data = proof.receive(data)
        except ProofError as fault:
            _log.warning("a client failed to prove itself: %s", fault)
            self._taken.abort()
            return b""
        if answer:
            self._taken.write(answer)
        if proof.is_over:
            self._proof = None
            self.door = None if proof.door is None else proof.door.door
        return data

    def connection_lost(self, exc: BaseException | None) -> None:
        self._among.forget(self)
        if self._taken is not None:
            super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.room_changed is not None:
            self.room_changed(False)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.room_changed is not None:
            self.room_changed(True)

    def abort(self) -> None:
        if self._taken is not None:
            self._taken.abort()
        elif self._abort is not None:
            self._abort()

    def begin(self) -> None:
        self._among.begin(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._among.end(self)


def _address_of(transport: asyncio.Transport) -> str:
    return str((transport.get_extra_info("peername") or ("",))[0])


class _Site(web.BaseSite):
    """A listening socket whose connections are counted."""

    __slots__ = ("_host", "_make", "_port", "_shared", "_tls")

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        make: Callable[[], HttpConnection],
        tls: Certificates | None,
        *,
        shared: bool,
    ) -> None:
        super().__init__(runner, backlog=_BACKLOG)
        self._shared = shared
        self._host = host
        self._port = port
        self._make = make
        self._tls = tls

    @property
    def name(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        host, port = self._host, self._port
        if self._tls is None:
            server = await loop.create_server(
                self._make, host, port, backlog=_BACKLOG, reuse_port=self._shared
            )
        else:
            sockets = await bind(host, port, _BACKLOG, shared=self._shared)
            made = TlsServer(sockets, self._tls, self._make, IDLE_S, _IN_PLAIN)
            server = cast(asyncio.Server, made)
        self._server = server
        self._port = server.sockets[0].getsockname()[1]

    @property
    def port(self) -> int:
        return self._port


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
        keys: Sequence[DoorKey] = (),
        tls: Certificates | None = None,
    ) -> None:
        """`names`: of this machine, for a port where requests of web pages are refused; None: a
        port for clients. `keys`: of the doors that clients may prove at the start of a connection.
        `tls`: nothing but TLS is spoken.
        """
        self._tls = tls
        if names is not None:
            app.middlewares.insert(0, _refuse_pages({name.lower() for name in names}))
        app.middlewares.insert(0, _begin)
        self._keys = keys
        # A client that leaves cancels its handler.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=shutdown_timeout_s
        )
        self._connections = Connections(limits)
        self._site: _Site | None = None
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
            HttpConnection,
            self._runner.server,
            self._connections,
            self._keys,
            loop=asyncio.get_running_loop(),
            access_log=None,
            logger=_log,
            auto_decompress=False,
            keepalive_timeout=IDLE_S,
            lingering_time=_LINGERING_S,
            max_headers=_MAX_HEADERS,
        )
        self._site = site = _Site(self._runner, host, port, make, self._tls, shared=shared)
        await site.start()
        self.port = site.port
        return self.port

    @property
    def busy(self) -> int:
        """Connections with a request that is not answered yet."""
        return self._connections.busy

    async def stop_listening(self) -> None:
        """Take no further connections; those that are open go on."""
        if self._site is not None and self._site in self._runner.sites:
            await self._site.stop()

    def abort(self) -> None:
        """Close all connections at once."""
        self._connections.abort()

    async def close(self) -> None:
        """End all requests, after the time for the last words of each."""
        await self._runner.cleanup()


@web.middleware
async def _begin(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keep the connection from being closed for another, and refuse what aiohttp accepts and other
    servers read in another way: behind a proxy in front, a request could be smuggled in it.
    """
    if isinstance(request.protocol, HttpConnection):
        request.protocol.begin()
    if request.version < HttpVersion11 and "Transfer-Encoding" in request.headers:
        response = error(400, "HTTP/1.0 has no Transfer-Encoding")
        response.force_close()
        return response
    try:
        return await handler(request)
    except web.HTTPClientError as fault:  # No such path or method, or a body that is too large.
        response = error(fault.status, f"{request.method} {request.path:.200}: {fault.reason}")
        if "Allow" in fault.headers:
            response.headers["Allow"] = fault.headers["Allow"]
        return response


def retry_after(seconds: float) -> str:
    """A value for `Retry-After`: so long, or up to 2 s longer, so that clients that were refused
    together do not come back together.
    """
    return str(max(1, math.ceil(seconds)) + secrets.randbelow(3))


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


def new_app(door: Door, *middlewares: Middleware) -> web.Application:
    """An application that takes requests, all but `/healthz`, from clients that have proved the
    key of this door, and turns `RequestError` into answers.
    """
    app = web.Application(
        client_max_size=MAX_BODY_BYTES, middlewares=[_authenticate(door), _explain, *middlewares]
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


def require_token(tokens: Sequence[bytes], what: str) -> Middleware:
    """One of the tokens is required for all but `/healthz`; they may change."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path != HEALTHZ and not any(
            hmac.compare_digest(given, b"Bearer " + token) for token in tokens
        ):
            return error(401, f"this endpoint requires {what}", kind="authentication_error")
        return await handler(request)

    return middleware


def _authenticate(door: Door) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        due = Door.ADMIN if request.path in _OF_ADMIN else door
        proved = request.protocol.door if isinstance(request.protocol, HttpConnection) else None
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
        if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
            raise RequestError(
                f"Content-Encoding {encoding!r:.80} is not supported; allowed: 'identity'",
                status=415,
            )
        return await handler(request)
    except RequestError as fault:
        return error(fault.status, str(fault), param=fault.param)


def error(
    status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None
) -> web.Response:
    """An error in the form of the OpenAI API."""
    body = error_body(message, kind=kind, param=param)
    return web.Response(status=status, body=body, content_type="application/json")


def answer(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def decode(body: bytes, what: type[T]) -> T:
    """Raises RequestError."""
    try:
        return msgspec.json.decode(body, type=what)
    except msgspec.DecodeError as fault:
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
        raise ConfigError(
            [f"{owner}: {key}: {host}:{port} is {why}; allowed: a free port"]
        ) from None


async def watch(request: web.Request, report: Callable[[], msgspec.Struct]) -> web.StreamResponse:
    """Send a report as a line of JSON every `?watch=SECONDS`, endlessly: the end of the stream
    means that this process is gone.
    """
    interval_s = watch_interval_s(request)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    with watching(request):
        await response.prepare(request)
        while True:
            await response.write(msgspec.json.encode(report()) + b"\n")
            await asyncio.sleep(interval_s)


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
