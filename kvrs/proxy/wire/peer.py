"""HTTP to a process of the cluster: short calls, and watches that last.

Every failure of the other side is an `UpstreamError`.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from io import BytesIO
from typing import Any, TypeVar

import aiohttp
import msgspec

from kvrs.errors import UpstreamError
from kvrs.net.proving import Keys, ProvingConnector, UnprovenError
from kvrs.net.tls import Certificates
from kvrs.process.descriptors import is_exhausted
from kvrs.protocol.instance import Heartbeat, LeaseAnswer, LeaseUpdate
from kvrs.proxy.wire.watchdog import SilentError, Watchdog, loop_lag_s, reset_timeout

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
T = TypeVar("T")

# Everything that msgspec raises at bytes of another form.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

CONNECT_TIMEOUT_S = 1.0
_LAG_SHARE = 0.1  # Of that time: a proxy that was late by more tries again.
KEPT_S = 10.0  # A connection that no call uses.
_CONTROL_TIMEOUT_S = 2.0  # Of the small calls; never of a completion.
MAX_LINE_BYTES = 8 << 20
# Not every system names these.
_OPTIONS = [
    (getattr(socket, name), value)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 5000),
    )
    if hasattr(socket, name)
]
MAX_ANSWER_BYTES = 8 << 20
LARGE_BODY_BYTES = 256 << 10
_DESCRIPTOR_PAUSE_S = 0.1
_LONGEST_DESCRIPTOR_WAIT_S = 30.0


class ConnectionLostError(UpstreamError):
    """The connection was lost or refused; the process may be dead."""

    has_waited = False  # For the news that the whole process is gone.


class NotConnectedError(ConnectionLostError):
    """The process took no connection: it is dead or has no room, and has seen no request."""


class BusyError(UpstreamError):
    """The process answers that it has no room for the request now."""

    def __init__(self, message: str, status: int, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class EngineError(UpstreamError):
    """The engine answers the request with an error: with a status, or in the stream. `body`: its
    message in OpenAI's form, for the client if the request is the cause.
    """

    def __init__(self, cause: str, status: int, body: bytes) -> None:
        super().__init__(cause)
        self.status = status
        self.body = body


class NotANumberError(UpstreamError):
    """The engine finds that the logits of this stream are no numbers."""


class UnusableError(UpstreamError):
    """The process answers and must not be used: another server, version or secret."""


class DeniedError(UnusableError):
    """A request of a stream got 401 or 403: the process, or a gateway in front of it, does not take
    this proxy's key, or has something against this one request.
    """

    def __init__(self, status: int, cause: str, body: bytes) -> None:
        super().__init__(
            f"HTTP {status} to a completion, by itself or a gateway in front of it: {cause}"
        )
        self.status = status
        self.body = body  # In OpenAI's form.


def new_session(keys: Keys, tls: Certificates | None = None) -> aiohttp.ClientSession:
    """A connection pool for processes that prove that they are the ones at these addresses."""
    return _session(ProvingConnector(keys, tls, **_pool_options()), {})


def new_unproven_session(token: str | None) -> aiohttp.ClientSession:
    """A connection pool for servers of others, with this bearer token or without one."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return _session(aiohttp.TCPConnector(**_pool_options()), headers)


def _pool_options() -> dict[str, Any]:
    return {"limit": 0, "keepalive_timeout": KEPT_S, "socket_factory": make_socket}


def _session(connector: aiohttp.TCPConnector, headers: dict[str, str]) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


def make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    set_options(made)
    return made


def set_options(sock: socket.socket) -> None:
    """Have the socket detect a peer that vanished without closing its connections. (That small
    writes go out at once, each event loop has set.)
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class Peer:
    """The process at one URL."""

    UNAUTHORISED = "it was started with another secret than this proxy"

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url
        self.engine_version: str | None = None

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        return await self.control("POST", "/kvrs/v1/leases", update, LeaseAnswer)

    def watch_heartbeats(
        self, interval_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[Heartbeat]]:
        return self.watch("/kvrs/v1/heartbeat", interval_s, Heartbeat)

    @asynccontextmanager
    async def watch(
        self, path: str, interval_s: float, kind: type[Answer]
    ) -> AsyncIterator[AsyncIterator[Answer]]:
        """Reports, one per line, until the connection ends, as it does with the process."""
        async with self.call("GET", f"{path}?watch={interval_s}", None) as response:
            if response.status != 200:
                raise UpstreamError(f"HTTP {response.status} for {path}")
            lines = _lines_of(response)
            async with aclosing(lines), aclosing(reports_of(lines, kind)) as reports:
                yield reports

    async def control(
        self, method: str, path: str, message: msgspec.Struct | None, kind: type[Answer]
    ) -> Answer:
        body = None if message is None else msgspec.json.encode(message)
        try:
            with Watchdog(lambda *_: _CONTROL_TIMEOUT_S):
                status, raw = await self._exchange(method, path, body)
        except SilentError:
            raise UpstreamError(f"no answer to {path} within {_CONTROL_TIMEOUT_S} s") from None
        if status == 401:
            raise UnusableError(f"HTTP 401: {self.UNAUTHORISED}")
        if status != 200:
            raise _unexpected(status, path, raw)
        try:
            return msgspec.json.decode(raw, type=kind)
        except UNREADABLE as error:
            raise UnusableError(f"unexpected answer to {path}: {error}") from None

    async def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Make a small call: its status and its answer."""
        async with self.call(method, path, body) as response:
            return response.status, await body_of(response)

    @asynccontextmanager
    async def call(
        self, method: str, path: str, body: bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        response = await connect_with_descriptor(
            partial(self._request, method, path, body), self.url
        )
        try:
            yield response
        finally:
            # A response read to its end has returned its connection already; this closes any other.
            response.close()

    async def _request(
        self, method: str, path: str, body: bytes | None
    ) -> aiohttp.ClientResponse | None:
        """None: this process had no descriptor for a connection, for which the other side must not
        be blamed.
        """
        headers = None if body is None else {"Content-Type": "application/json"}
        while True:
            # A large body is sent in pieces, so that other tasks run in between.
            data = BytesIO(body) if body is not None and len(body) > LARGE_BODY_BYTES else body
            lag_s = loop_lag_s()
            try:
                return await self._session.request(
                    method, self.url + path, data=data, headers=headers, allow_redirects=False
                )
            except aiohttp.ConnectionTimeoutError as error:
                # This process may have lacked a processor for just as long.
                if loop_lag_s() - lag_s < _LAG_SHARE * CONNECT_TIMEOUT_S:
                    raise lost(error) from None
            except (aiohttp.ClientError, OSError) as error:
                if isinstance(error, OSError) and is_exhausted(error):
                    return None
                raise lost(error) from None


async def connect_with_descriptor(connect: Callable[[], Awaitable[T | None]], url: str) -> T:
    """Call `connect` until there is a descriptor for it: without one it returns None.

    Raises:
        BusyError: there was none for too long.
    """
    made = await connect()
    if made is None:
        log.warning("waits for a descriptor to connect with", extra={"url": url})
    until_s = time.monotonic() + _LONGEST_DESCRIPTOR_WAIT_S
    while made is None:
        if time.monotonic() > until_s:
            # As if the other side were busy: it is not to blame, and the stream may wait on.
            raise BusyError("the proxy has no descriptor to connect with", 503, None)
        await wait_for_descriptor()
        made = await connect()
    return made


async def wait_for_descriptor() -> None:
    """Wait a moment for connections of others to end, which is no silence of the other side."""
    await asyncio.sleep(_DESCRIPTOR_PAUSE_S)
    reset_timeout()


def _unexpected(status: int, path: str, body: bytes) -> UpstreamError:
    """A failing server of the cluster answers 5xx; any other status is another server's."""
    answer = f"HTTP {status} for {path}: {body[:300].decode(errors='replace')}"
    return (
        UpstreamError(answer)
        if status >= 500
        else UnusableError(f"another server answers there: {answer}")
    )


async def body_of(response: aiohttp.ClientResponse, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """The whole body; one that is longer is not read to its end.

    Raises:
        UpstreamError: it is longer, or the connection was lost.
    """
    chunks, size_bytes = [], 0
    async for chunk in Chunks(response):
        chunks.append(chunk)
        size_bytes += len(chunk)
        if size_bytes > max_bytes:
            raise UpstreamError(f"sent an answer of more than {max_bytes} bytes")
    return b"".join(chunks)


def lost(error: aiohttp.ClientError | OSError) -> UpstreamError:
    """Without the address, which aiohttp names: clients read why their streams ended."""
    match error:
        case aiohttp.ClientResponseError():
            return UnusableError(f"its answer is not HTTP: {error.message[:80]!r}")
        case UnprovenError():
            return UnusableError(f"it did not prove its identity: {error.cause}")
        case aiohttp.ClientPayloadError():
            cause = "closed in the middle of a response"
        case aiohttp.ClientConnectorCertificateError():
            cause = f"its certificate is refused: {reason_of(error.certificate_error)}"
        case aiohttp.ClientConnectorSSLError():
            cause = f"no TLS: {reason_of(error.os_error)}"
        case aiohttp.ClientConnectorDNSError():
            cause = "its host name has no address"
        case OSError(errno=int(number)) if number > 0:
            cause = os.strerror(number)
        case TimeoutError():
            cause = "no connection in time"
        case aiohttp.ServerDisconnectedError():
            cause = "closed without an answer"
        case _:
            cause = type(error).__name__
    is_connected = not isinstance(error, aiohttp.ClientConnectorError)
    return (ConnectionLostError if is_connected else NotConnectedError)(f"connection lost: {cause}")


def reason_of(error: Exception) -> str:
    """Without file names and line numbers of OpenSSL."""
    return str(getattr(error, "verify_message", None) or getattr(error, "reason", None) or error)


class Chunks(AsyncIterator[bytes]):
    """The bytes that have arrived, as they arrive. (Not a generator: an attempt may stop reading
    anywhere.)
    """

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise lost(error) from None
        if not chunk:
            raise StopAsyncIteration
        return chunk


async def reports_of(lines: AsyncIterator[bytes], kind: type[Answer]) -> AsyncGenerator[Answer]:
    """Raises UpstreamError: a line is no such report."""
    async for line in lines:
        try:
            yield msgspec.json.decode(line, type=kind)
        except UNREADABLE as error:
            raise UpstreamError(f"unexpected report: {error}") from None


async def _lines_of(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    rest = b""
    async for chunk in Chunks(response):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise UpstreamError("sent a report of more than 8 MiB")
        for line in lines:
            yield line
    raise ConnectionLostError("connection closed")
