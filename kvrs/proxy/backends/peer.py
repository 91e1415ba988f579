"""What a proxy has to do with any process of the cluster, over HTTP: small calls, and watches that last.

Whatever goes wrong at the other side is an `UpstreamError`.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from io import BytesIO
from typing import TypeVar

import aiohttp
import msgspec

from kvrs.errors import UpstreamError
from kvrs.protocol.instance import LeaseAnswer, LeaseUpdate

Answer = TypeVar("Answer")

# What msgspec raises at bytes that are not what they should be, whatever they are.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_CONNECT_TIMEOUT_S = 1.0
_CONTROL_TIMEOUT_S = 2.0  # Of the small calls; never of a completion.
_MAX_LINE_BYTES = 8 << 20
_LARGE_BODY_BYTES = 256 << 10


class ConnectionLostError(UpstreamError):
    """The connection is gone, or was never to be had: so may be the process."""


class UnusableError(UpstreamError):
    """It answers, and what it says shows that it must not be used: another server, another version, another secret."""


def new_session(token: str | None) -> aiohttp.ClientSession:
    """One connection pool for everything that goes to processes that want this bearer token, or none."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=10, socket_factory=_make_socket),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        headers={} if token is None else {"Authorization": f"Bearer {token}"},
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


def _make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices a peer which vanished without a word."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Not every system names these.
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000)):
        if (option := getattr(socket, name, None)) is not None:
            made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


class Peer:
    """The process at one URL."""

    UNAUTHORISED = "it was started with another secret than this proxy"

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.url = url

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        return await self.control("POST", "/kvrs/v1/leases", update, LeaseAnswer)

    @asynccontextmanager
    async def watch(self, path: str, interval_s: float, kind: type[Answer]) -> AsyncIterator[AsyncIterator[Answer]]:
        """Reports, one a line, until the connection ends; it ends with the process."""
        async with self.call("GET", f"{path}?watch={interval_s}", None) as response:
            if response.status != 200:
                raise UpstreamError(f"HTTP {response.status} for {path}")
            async with aclosing(_reports(response, kind)) as reports:
                yield reports

    async def control(self, method: str, path: str, message: msgspec.Struct | None, kind: type[Answer]) -> Answer:
        body = None if message is None else msgspec.json.encode(message)
        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_S), self.call(method, path, body) as response:
                raw = await body_of(response)
        except TimeoutError:
            raise UpstreamError(f"no answer to {path} within {_CONTROL_TIMEOUT_S} s") from None
        if response.status == 401:
            raise UnusableError(f"HTTP 401: {self.UNAUTHORISED}")
        if response.status != 200:
            raise _unexpected(response.status, path, raw)
        try:
            return msgspec.json.decode(raw, type=kind)
        except UNREADABLE as error:
            raise UnusableError(f"unexpected answer to {path}: {error}") from None

    @asynccontextmanager
    async def call(self, method: str, path: str, body: bytes | None) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = None if body is None else {"Content-Type": "application/json"}
        # A large one in pieces, between which others have their turn.
        data = BytesIO(body) if body is not None and len(body) > _LARGE_BODY_BYTES else body
        try:
            response = await self._session.request(method, self.url + path, data=data, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:  # Timeouts of sock_connect are OSErrors too.
            raise _lost(error) from None
        try:
            yield response
        finally:
            # A response read to its end has given its connection back already; any other closes it here.
            response.close()


def _unexpected(status: int, path: str, body: bytes) -> UpstreamError:
    """A server of ours may be unwell, but knows its own paths."""
    said = f"HTTP {status} for {path}: {body[:300].decode(errors='replace')}"
    return UpstreamError(said) if status >= 500 else UnusableError(f"it is something else that speaks there: {said}")


async def body_of(response: aiohttp.ClientResponse) -> bytes:
    try:
        return await response.read()
    except (aiohttp.ClientError, OSError) as error:
        raise _lost(error) from None


def _lost(error: aiohttp.ClientError | OSError) -> UpstreamError:
    if isinstance(error, aiohttp.ClientResponseError):
        return UnusableError(f"what it speaks is no HTTP: {error.message[:80]!r}")
    if isinstance(error, aiohttp.ClientPayloadError):
        return ConnectionLostError("connection lost: closed in the middle of a response")
    return ConnectionLostError(f"connection lost: {error or type(error).__name__}")


class Chunks(AsyncIterator[bytes]):
    """Whatever has arrived, each time something has. (No generator: an attempt may stop reading anywhere.)"""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _lost(error) from None
        if not chunk:
            raise StopAsyncIteration
        return chunk


async def _reports(response: aiohttp.ClientResponse, kind: type[Answer]) -> AsyncGenerator[Answer]:
    rest = b""
    async for chunk in Chunks(response):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:
            raise UpstreamError("sent an endless line of a report")
        for line in lines:
            try:
                yield msgspec.json.decode(line, type=kind)
            except UNREADABLE as error:
                raise UpstreamError(f"unexpected report: {error}") from None
    raise UpstreamError("connection closed")
