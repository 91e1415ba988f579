"""Pool of connections to one instance for the calls of streams.

Each call has a connection of its own. A multiplexer for the embedded engine was removed: in five
rounds of 2026-11-25 the CPU without it was 0.90, 1.03 and 1.08 times that with it (one stream, 200
at 20/s, 256 at 200/s; ranges 0.80 to 1.31).
"""

import asyncio
import logging
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from kvrs.config.settings import is_numeric
from kvrs.core.fleet.silence import LOST_TOGETHER_S
from kvrs.errors import UpstreamError
from kvrs.net.proving import PROOF_TIMEOUT_S, HandshakeProtocol, Keys, address_of
from kvrs.net.server import ReadingTurns
from kvrs.net.tls import Certificates
from kvrs.process.descriptors import is_exhausted
from kvrs.process.eager_task import Signal
from kvrs.process.large_work import LargeWork
from kvrs.protocol.proof import ProofError
from kvrs.protocol.secrets import ScopedKey
from kvrs.proxy.wire.errors import BusyError, ConnectionLostError, unproven, unreached
from kvrs.proxy.wire.lines import Lines
from kvrs.proxy.wire.steady_reads import SteadyReads
from kvrs.proxy.wire.upstream import Lost, Need, Upstream, WholeReader, one_by_one
from kvrs.proxy.wire.watchdog import SilentError, Watchdog, reset_timeout

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
KEPT_S = 10.0  # Time for which an idle connection is kept.
MAX_ANSWER_BYTES = 8 << 20
_DESCRIPTOR_PAUSE_S = 0.1
_LONGEST_DESCRIPTOR_WAIT_S = 30.0
# Options by which a socket detects a vanished peer, where the system has them; in seconds,
# TCP_USER_TIMEOUT in milliseconds.
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
# Most idle connections to one instance; beyond it the connection that is idle for longest is
# closed.
MOST_KEPT = 256
# Most waits, of LOST_TOGETHER_S each, for further calls that the same death ends; then all fail.
_MOST_LOOKS = 10


class Access(msgspec.Struct, frozen=True):
    """Credentials of a connection within the cluster: keys by which both ends prove themselves, and
    certificates, or a token for a server that cannot prove itself.
    """

    # Keys by which servers prove themselves; None: the servers prove nothing.
    keys: Keys | None = None
    tls: Certificates | None = None
    token: str | None = None


class EngineLinks:
    """Makes a pool of connections for each process, all with the same credentials."""

    def __init__(self, access: Access, coalesce_s: float = 0.0) -> None:
        """`coalesce_s`: interval at which steady streams are read together; 0: each stream is read
        when its bytes arrive.
        """
        self._keys = None if access.keys is None else dict(access.keys)
        self._access = access = replace(access, keys=self._keys)
        self._pools: list[Pool] = []
        # Only Linux has epoll.
        is_steady = coalesce_s > 0 and hasattr(select, "epoll")
        self._steady = SteadyReads(coalesce_s) if is_steady else None
        self._turns = one_by_one()
        # Runs work on large request and response bodies beside the event loop.
        self.large = LargeWork()

    def admit(self, keys: Keys) -> None:
        """Allow connections to further processes, which prove themselves by these keys."""
        if self._keys is not None:
            self._keys.update(keys)

    def pool(self, url: str) -> "Pool":
        self._pools.append(made := Pool(self._access, url, self._steady, self._turns))
        return made

    def drop(self, pool: "Pool") -> None:
        """Close a pool to further calls; running calls go on to their end."""
        self._pools.remove(pool)
        pool.close()

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
        if self._steady is not None:
            self._steady.close()

    async def __aenter__(self) -> "EngineLinks":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Pool:
    """The connections to the process at one URL."""

    def __init__(
        self,
        access: Access,
        url: str,
        steady: SteadyReads | None = None,
        turns: ReadingTurns | None = None,
    ) -> None:
        parsed = urlsplit(url)
        self._access = access
        self._turns = turns
        self._steady = steady
        self.url, self._address = url, address_of(url)
        self._host, self._port = parsed.hostname or "", parsed.port or 80
        self._is_numeric = is_numeric(self._host)
        self._is_tls = parsed.scheme == "https"
        token = "" if access.token is None else f"Authorization: Bearer {access.token}\r\n"
        self._head = (
            f"POST {parsed.path}%s HTTP/1.1\r\nHost: {parsed.netloc}\r\n{token}"
            "Content-Type: application/json\r\nContent-Length: %d\r\n%s\r\n"
        )
        self._get = f"GET {parsed.path}%s HTTP/1.1\r\nHost: {parsed.netloc}\r\n{token}\r\n"
        # Idle connections, each with the time at which it became idle, oldest first.
        self._kept: dict[Upstream, float] = {}
        self._forget = self._lost  # One bound method for all connections saves an object for each.
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._lost_calls: list[tuple[Signal[Need], UpstreamError]] = []

    def head(self, path: str, size_bytes: int, headers: str = "") -> bytes:
        """Return the head of a POST request; each line of `headers` ends with CRLF."""
        return (self._head % (path, size_bytes, headers)).encode()

    async def ask(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        """Make one small call (a GET if `body` is None); return the response's status and body.

        Raises:
            UpstreamError: no answer, or one that is too long.
        """
        head = (self._get % path).encode() if body is None else self.head(path, len(body))
        while True:
            reader, upstream = WholeReader(MAX_ANSWER_BYTES), await self.take()
            is_kept = upstream.status != 0
            try:
                await (await upstream.send(head, body or b"", reader))
                status = upstream.status
                if status >= 500:
                    # A server whose engine has died may go on running while a connection is open.
                    upstream.close()
                return status, reader.body if status == 200 else upstream.refusal
            except ConnectionLostError:
                # A server may have closed a kept connection just before the request, so a GET is
                # sent again.
                if body is not None or not is_kept:
                    raise
            finally:
                self.give_back(upstream)

    @asynccontextmanager
    async def lines(self, path: str) -> AsyncIterator[Lines]:
        """Yield the lines of a long answer, on a connection of its own. The lines end as soon as
        the connection is lost.

        Raises:
            UpstreamError: no connection.
        """
        upstream = await self.connect(_fail_now)
        try:
            lines = Lines(upstream, path)
            lines.until(await upstream.send((self._get % path).encode(), b"", lines))
            yield lines
        finally:
            upstream.leave()
            upstream.close()

    async def take(self) -> Upstream:
        """Take a connection for one call: the connection that was idle for the shortest time, or a
        new connection. The caller returns it by `give_back`.

        Raises:
            UpstreamError: no connection; the process may be dead.
        """
        while self._kept:
            upstream, _ = self._kept.popitem()
            if not upstream.transport.is_closing():
                return upstream
        return await self.connect(self._forget)

    async def connect(self, lost: Lost) -> Upstream:
        """Open a connection; `lost` is called when the connection ends.

        Raises:
            UpstreamError: there is none; the process may be dead.
        """
        made = await self._connect(lost)
        if made is None:
            log.warning("waits for a descriptor to connect with", extra={"url": self.url})
        until_s = time.monotonic() + _LONGEST_DESCRIPTOR_WAIT_S
        while made is None:
            if time.monotonic() > until_s:
                # The peer is not to blame, so the error is that of a busy peer, and the stream may
                # wait.
                raise BusyError("the proxy has no descriptor to connect with", 503, None)
            # Other connections of this process may end and free descriptors; the wait is not the
            # peer's silence.
            await asyncio.sleep(_DESCRIPTOR_PAUSE_S)
            reset_timeout()
            made = await self._connect(lost)
        return made

    def give_back(self, upstream: Upstream) -> None:
        if not upstream.leave():
            return
        if self._is_closed:
            upstream.close()
            return
        if len(self._kept) >= MOST_KEPT:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            oldest.close()
        loop = asyncio.get_running_loop()
        self._kept[upstream] = loop.time()
        if self._sweep is None:
            self._sweep = loop.call_later(KEPT_S, self._close_old)

    def close(self) -> None:
        """Close idle connections now, and each connection in use when its call has ended."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for upstream in list(self._kept):
            upstream.close()
        self._kept.clear()

    def _close_old(self) -> None:
        """Close connections that were idle for KEPT_S, and look again when the next connection will
        have been.
        """
        loop = asyncio.get_running_loop()
        now_s, self._sweep = loop.time(), None
        for upstream, since_s in list(self._kept.items()):
            if now_s - since_s < KEPT_S:
                self._sweep = loop.call_at(since_s + KEPT_S, self._close_old)
                return
            del self._kept[upstream]
            upstream.close()

    def _lost(
        self, upstream: Upstream, call: Signal[Need] | None, error: UpstreamError | None
    ) -> None:
        self._kept.pop(upstream, None)
        if call is not None and error is not None:
            if not self._lost_calls:
                asyncio.get_running_loop().call_later(LOST_TOGETHER_S, self._fail_lost, 1, 1)
            self._lost_calls.append((call, error))

    def _fail_lost(self, before: int, looks: int) -> None:
        """Fail lost calls once their number has not changed since the last look (`before`): calls
        of a dead instance have all ended by then, and fail together.
        """
        if (lost := len(self._lost_calls)) > before and looks < _MOST_LOOKS:
            loop = asyncio.get_running_loop()
            loop.call_later(LOST_TOGETHER_S, self._fail_lost, lost, looks + 1)
            return
        failed, self._lost_calls = self._lost_calls, []
        for call, error in failed:
            if not call.done():
                if isinstance(error, ConnectionLostError):
                    error.has_waited = True
                call.set_exception(error)

    async def _connect(self, lost: Lost) -> Upstream | None:
        """Open a connection; None: this process has no free descriptor."""
        loop = asyncio.get_running_loop()
        upstream = Upstream(loop, lost, self._steady, self._turns)
        limit_s = CONNECT_TIMEOUT_S
        try:
            key = self._key()
            hosts = await self._hosts(loop)
            with Watchdog(lambda *_: limit_s) as watchdog:
                transport, greeter = await self._open(loop, hosts, key)
                if isinstance(greeter, HandshakeProtocol):
                    limit_s = PROOF_TIMEOUT_S
                    watchdog.heard()
                    upstream.proof = await _proved(transport, greeter)
        except SilentError:
            raise unreached(TimeoutError()) from None
        except OSError as error:
            if is_exhausted(error):
                return None
            raise unreached(error) from None
        # The event loop does not run before the hand-shake's protocol is replaced, so no bytes are
        # lost.
        transport.set_protocol(upstream)
        upstream.connection_made(transport)
        return upstream

    def _key(self) -> ScopedKey | None:
        if self._access.keys is None:
            return None
        key = self._access.keys.get(self._address)
        if key is None:
            raise unproven("no process of the cluster has this address")
        return key

    async def _open(
        self, loop: asyncio.AbstractEventLoop, hosts: list[str], key: ScopedKey | None
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Open a connection. With a `key`, its protocol makes the server prove that it has the key.

        Raises:
            OSError: no host accepts a connection.
        """
        tls = self._access.tls
        # The certificates are read for every connection, because a reload may have replaced them.
        context = tls.client if self._is_tls and tls is not None else self._is_tls or None
        greeter = asyncio.Protocol if key is None else partial(HandshakeProtocol, key)
        while True:
            try:
                # Let the event loop make the socket: connecting a socket of our own takes more CPU.
                transport, protocol = await loop.create_connection(
                    greeter,
                    hosts.pop(0),
                    self._port,
                    ssl=context,
                    server_hostname=self._host if self._is_tls else None,
                )
            except ssl.SSLError:
                raise
            except OSError:
                if not hosts:
                    raise
            else:
                _set_options(transport.get_extra_info("socket"))
                return transport, protocol

    async def _hosts(self, loop: asyncio.AbstractEventLoop) -> list[str]:
        """Return the addresses to try, in order."""
        if self._is_numeric:  # A numeric address needs no resolver, which would take a thread.
            return [self._host]
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in found]


def _fail_now(_: Upstream, call: Signal[Need] | None, error: UpstreamError | None) -> None:
    if call is not None and error is not None:
        call.set_exception(error)


async def _proved(transport: asyncio.Transport, greeter: HandshakeProtocol) -> bytes:
    """Return the proof of this end, once the other end has proved itself.

    Raises:
        UnusableError: the other end did not prove itself.
        OSError: the connection was lost.
    """
    try:
        return await greeter.proved
    except ProofError as error:
        transport.abort()
        raise unproven(str(error)) from None
    except BaseException:
        transport.abort()
        raise


def _set_options(sock: socket.socket) -> None:
    """Have the socket detect a peer that vanished without closing its connections. (The event loop
    itself sets TCP_NODELAY.)
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
