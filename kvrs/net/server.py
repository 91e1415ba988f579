"""Server of one HTTP port. A complete request is served in the callback with its last byte; an
incomplete body is read by the request's handler.
"""

import asyncio
import fcntl
import logging
import secrets
import struct
import termios
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from itertools import islice
from typing import Any, Protocol, cast

from aiohttp.tcp_helpers import tcp_keepalive

from kvrs.errors import RequestError
from kvrs.net.connections import (
    UNSENT_BYTES,
    ByteBudget,
    ConnectionLimits,
    Connections,
    PortConnection,
)
from kvrs.net.http_request import (
    Body,
    BrokenRequestError,
    Head,
    HeadReader,
    HttpRefusal,
    NoteRefusal,
    parse_usual,
)
from kvrs.net.routes import (
    MAX_BODY_BYTES,
    NO_PARAMETERS,
    Handler,
    Request,
    Response,
    Routes,
    refused,
    retry_after,
    written,
)
from kvrs.net.tls import Certificates, TlsServer, bind
from kvrs.process.eager_task import EagerTask
from kvrs.process.large_work import LARGE_BYTES
from kvrs.protocol.openai.decoding import BYTE_ORDER_MARK
from kvrs.protocol.secrets import NONCE_BYTES, ProofError, ScopedKey, ServerProof

log = logging.getLogger(__name__)

# Time limit of a new connection's TLS hand-shake, of its first request's head, and of each further
# head from its first byte.
HEAD_S = 20.0
# Longest time in which a client reads none of the bytes that wait for it; then its connection is
# ended. Waiting bytes are looked at several times in that time.
WRITE_TIMEOUT_S = 30.0
_LOOKS = 6
_PIECE_BYTES = 128 << 10  # A longer response is written in pieces, each when there is room for it.
# Memory for unread responses of a port without a budget of its own.
_UNREAD_RESPONSES_BYTES = 256 << 20
LINGERING_S = 2.0  # Time limit for reading the rest of a request that was answered early.

_BACKLOG = 1024
_MAX_PIPELINED_BYTES = 64 << 10  # Bytes behind the request being served above which reading pauses.
# Bytes of a body that its handler does not read yet above which reading pauses.
_UNREAD_BYTES = 128 << 10
# After a read of this many bytes of a body a stranger's connection waits for its turn. In each turn
# of the event loop `_READS_AT_ONCE` connections read: a millisecond's work.
_MUCH_BYTES = 16 << 10
_READS_AT_ONCE = 4

_FULL = HttpRefusal(503, "too many connections are open")
_TLS_ONLY = HttpRefusal(400, "this port speaks TLS only: use https://")
_GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClosingLine(dict["HttpConnection", float]):
    """Idle connections by the time at which they will be closed, earliest first: each is added with
    a later time than those before. A connection that gets a request is removed.
    """

    look: asyncio.TimerHandle | None = None

    def append(self, connection: "HttpConnection", until_s: float) -> None:
        self[connection] = until_s
        if self.look is None:
            self.begin()

    def begin(self) -> None:
        """Close the connections that are due, and schedule the next call."""
        loop = asyncio.get_running_loop()
        self.look, now_s = None, loop.time()
        for connection, until_s in list(self.items()):
            if until_s > now_s:
                self.look = loop.call_at(until_s, self.begin)
                return
            del self[connection]
            connection.close_if_idle()

    def end(self) -> None:
        if self.look is not None:
            self.look.cancel()


class TakesTurns(Protocol):
    def has_turn(self) -> None:
        """Read on, because the connection has waited for its turn."""


class ReadingTurns:
    """Queue of connections with much data, whose reads would together hold up all other
    connections. In each turn of the event loop `reads_at_once` of them read.
    """

    def __init__(self, reads_at_once: int = _READS_AT_ONCE) -> None:
        self._reads_at_once = reads_at_once
        self._waiting: dict[TakesTurns, None] = {}
        self._is_next_due = False  # A callback for the next turn of the event loop is scheduled.

    @property
    def is_taken(self) -> bool:
        """Return whether connections wait for their turns."""
        return bool(self._waiting)

    def wait(self, connection: TakesTurns) -> None:
        """Add a connection; it may be the one that has its turn now."""
        self._waiting[connection] = None
        if not self._is_next_due:
            self._is_next_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_next_due = False
        for connection in [*islice(self._waiting, self._reads_at_once)]:
            del self._waiting[connection]
            connection.has_turn()
        if self._waiting and not self._is_next_due:
            self._is_next_due = True
            asyncio.get_running_loop().call_soon(self._next)


class UnsentWatch(dict["HttpConnection", None]):
    """Connections whose clients may not have read all that was written, also if the connection is
    closing. A connection whose waiting bytes make no progress for `WRITE_TIMEOUT_S` is ended.
    """

    look: asyncio.TimerHandle | None = None

    def add(self, connection: "HttpConnection") -> None:
        self[connection] = None
        if self.look is None:
            self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self.look = loop.call_later(WRITE_TIMEOUT_S / _LOOKS, self._look)

    def _look(self) -> None:
        self.look, now_s = None, asyncio.get_running_loop().time()
        for connection in list(self):
            if not connection.look_at_unsent(now_s):
                del self[connection]
        if self:
            self._arm()

    def end(self) -> None:
        if self.look is not None:
            self.look.cancel()


class HttpServer:
    """The server of one port. `serve` runs a handler; `note_refusal` notes requests that reach no
    handler. A connection may idle for `idle_s` after a request. A client may prove one of `keys` at
    the start of a connection. With `tls` the port speaks only TLS. `budget` counts the responses
    that clients do not read; None: the port has one of its own.
    """

    def __init__(
        self,
        routes: Routes,
        serve: Callable[[Request, Handler], Coroutine[Any, Any, Response]],
        note_refusal: NoteRefusal,
        limits: ConnectionLimits,
        *,
        idle_s: float,
        shutdown_timeout_s: float,
        keys: Sequence[ScopedKey] = (),
        tls: Certificates | None = None,
        budget: ByteBudget | None = None,
    ) -> None:
        self.routes, self.serve, self.note_refusal = routes, serve, note_refusal
        self.keys, self.idle_s = keys, idle_s
        self.among = Connections(limits)
        self.turns = ReadingTurns()
        self.budget = budget or ByteBudget(_UNREAD_RESPONSES_BYTES, MAX_BODY_BYTES)
        self.unsent = UnsentWatch()
        self.is_closing = False
        self.connections: set[HttpConnection] = set()
        # Connections that wait for a complete head, and those idle between two requests.
        self.new, self.kept = ClosingLine(), ClosingLine()
        self.port = 0  # Bound port; 0: not open yet.
        self._shutdown_timeout_s = shutdown_timeout_s
        self._tls = tls
        self._listening: asyncio.Server | TlsServer | None = None
        self._beside = AsyncExitStack()
        self._quiet: asyncio.Future[None] | None = None

    async def open(self, host: str, port: int, *, shared: bool = False) -> int:
        """Listen and serve; return the bound port. `shared`: other processes of this user may
        listen on the port, and connections are spread over them.

        Raises:
            OSError: the port cannot be bound.
        """
        for each in self.routes.beside:
            await self._beside.enter_async_context(each)
        self._listening = await listen(
            host, port, lambda: HttpConnection(self), self._tls, shared=shared
        )
        self.port = self._listening.sockets[0].getsockname()[1]
        return self.port

    async def stop_listening(self) -> None:
        """Accept no further connections; open connections stay."""
        if self._listening is not None:
            self._listening.close()

    def abort(self) -> None:
        """Close all connections at once."""
        self.among.abort()

    async def close(self) -> None:
        """Shut down: give each request a grace period to finish its response, then cancel it."""
        await self.stop_listening()
        self.is_closing = True
        self.routes.cut_watches()  # Watch streams never end by themselves.
        for connection in list(self.connections):
            connection.close_if_idle()
        if self.connections:
            self._quiet = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._quiet}, timeout=self._shutdown_timeout_s)
        for connection in list(self.connections):
            connection.abort()
        self.new.end()
        self.kept.end()
        self.unsent.end()
        await self._beside.aclose()

    def forget(self, connection: "HttpConnection") -> None:
        self.among.forget(connection)
        self.connections.discard(connection)
        if not self.connections and self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)


async def listen(
    host: str,
    port: int,
    make: Callable[[], PortConnection],
    tls: Certificates | None,
    *,
    shared: bool,
) -> asyncio.Server | TlsServer:
    """Listen at a port; `make` makes a connection. Raises OSError: it cannot be bound."""
    if tls is not None:
        sockets = await bind(host, port, _BACKLOG, shared=shared)
        in_plain = partial(written, refused(_TLS_ONLY, {}), keeps_open=False)
        return TlsServer(sockets, tls, make, HEAD_S, in_plain)
    loop = asyncio.get_running_loop()
    return await loop.create_server(make, host, port, backlog=_BACKLOG, reuse_port=shared)


class HttpConnection(PortConnection):
    """An HTTP connection; `scope` is the scope whose key its client has proved."""

    __slots__ = (
        *("_abort", "_behind", "_body", "_counted_bytes", "_end", "_is_full", "_is_over"),
        *("_is_paused", "_is_sending", "_is_wanted", "_line", "_progress_s", "_proof", "_reader"),
        *("_request", "_rest", "_unsent_bytes", "_waits", "_work"),
        "server",
    )

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.routes.watches)
        self.server = server
        self._proof: ServerProof | None = None
        if server.keys:
            self._proof = ServerProof(server.keys, secrets.token_bytes(NONCE_BYTES))
        self._line = server.new
        self._abort: Callable[[], object] | None = None
        # Reader of a head that is not complete; None: no head is being read.
        self._reader: HeadReader | None = None
        self._request: Request | None = None  # Request being served; None: none is.
        self._work: EagerTask[Response] | None = None
        self._body: Body | None = None  # Body of the request, if it still arrives.
        self._behind = b""  # Bytes received behind the request being served.
        self._is_wanted = False  # The handler of the request reads the body.
        self._waits = False  # The connection waits for its turn to read.
        self._is_paused = False  # Reading from the transport is paused.
        self._is_full = False  # The client reads more slowly than the port writes.
        self._is_over = False  # The connection ends: further bytes are dropped.
        # The last response is complete, but not all of it has been written, or has room.
        self._is_sending = False
        self._rest = memoryview(b"")  # Rest of the response that is written in pieces.
        # Function that ends the connection behind the response; None: it stays open.
        self._end: Callable[[], None] | None = None
        # Number of unsent bytes at the last look; 0: none yet, or there has been room since.
        self._unsent_bytes = 0
        self._progress_s = 0.0  # Time of the last look at which fewer bytes were unsent.
        self._counted_bytes = 0  # Number of unsent bytes that the port's budget counts.

    def reserve(self, address: str, abort: Callable[[], object]) -> bool:
        """Count the connection, from before it has a transport until `connection_lost`; return
        False if the port's limits refuse it. `abort` ends it while it has no transport.
        """
        self.address, self._abort = address, abort
        self.idle_since_s = asyncio.get_running_loop().time()
        return self.server.among.admit(self)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        elif self._abort is not None:
            self._abort()

    def close_if_idle(self) -> None:
        """Close the connection if no request is being served, behind a response that is being
        sent.
        """
        if self._is_sending:
            self._end = self._end or self._close
        elif self._request is None and self.transport is not None:
            self._close()

    def check_room(self, size_bytes: int) -> None:
        budget = self.server.budget
        if budget.held_bytes + size_bytes > budget.total_bytes:
            raise RequestError(
                "responses that their clients do not read, and open requests, take up the memory",
                status=503,
                code="no_room",
            )

    def look_at_unsent(self, now_s: float) -> bool:
        """End the connection if its unsent bytes make no progress; return whether it has unsent
        bytes that must be looked at again. While a request is served, only a full buffer of a
        stranger counts: what is written on may hide that a client reads, and a process of the
        cluster may wait for a client of its own, whom it ends itself.
        """
        if (transport := self.transport) is None:
            return False
        size_bytes = transport.get_write_buffer_size() + len(self._rest)
        # The kernel takes no more bytes before a third of its own are read, which a slow client may
        # not do in time. Over TLS those tell of others before them, which no transport shows.
        if size_bytes or transport.get_extra_info("ssl_object") is not None:
            size_bytes += _queued_bytes(transport)
        is_judged = self._request is None or (self._is_full and self.scope is None)
        if not size_bytes or not is_judged:
            self._unsent_bytes = 0
            self._count_unsent(0)
            return False
        if not self._unsent_bytes or size_bytes < self._unsent_bytes:
            self._progress_s = now_s
        elif now_s - self._progress_s >= WRITE_TIMEOUT_S:
            log.info("a client does not read", extra={"unsent_bytes": size_bytes})
            transport.abort()
            return False
        self._unsent_bytes = size_bytes
        self._count_unsent(max(size_bytes, self._counted_bytes))
        return True

    # The event loop calls the methods below.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface of asyncio's, but not their base class.
        transport = cast(asyncio.Transport, transport)
        if self._abort is None and not self.reserve(address_of(transport), transport.abort):
            refuse(transport)
            return
        self.transport = transport
        self.server.connections.add(self)
        tcp_keepalive(transport)
        self.idle_since_s = now_s = asyncio.get_running_loop().time()
        self._line.append(self, now_s + HEAD_S)

    def data_received(self, data: bytes) -> None:
        if self.transport is None or self._is_over:  # The connection was refused, or is ending.
            return
        if self._proof is not None:
            data = self._prove(self._proof, data)
            if not data:
                return
        if self._request is not None or self._behind or self._is_full:
            self._take_more(data)
            return
        usual = parse_usual(data) if self._reader is None else None
        found = usual or self._read_head(data)
        if found is None:
            return
        head, at, length = found
        end, coming, body = at + length, None, b""
        if usual is not None and length <= LARGE_BYTES and end <= len(data):
            body, self._behind = data[at:end].removeprefix(BYTE_ORDER_MARK), data[end:]
        else:
            self._body = coming = Body(length)
            self._behind = coming.feed(data[at:])
        server, self.idle_since_s = self.server, None
        self._line.pop(self, None)
        route, parameters = server.routes.exact.get((head.method, head.path)), NO_PARAMETERS
        if route is None:
            route, parameters = server.routes.find(head.method, head.path)
        self._request = request = Request(
            head.method,
            head.path,
            head.headers,
            head.keep_alive,
            head.minor_version,
            head.query,
            length if length >= 0 else None,
            body,
            coming,
            self.address,
            self,
            route.path,
            parameters,
            head.expects,
        )
        self._work = task = EagerTask(server.serve(request, route.handler), self._answered)
        task.begin()

    def eof_received(self) -> None:
        """Give the transport the rest of the response. The client sends nothing more, so the
        transport closes, and sends what it has by then.
        """
        if self._rest and self.transport is not None:
            rest, self._rest = bytes(self._rest), memoryview(b"")
            self.transport.write(rest)
            self.server.unsent.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.server.forget(self)
        self._line.pop(self, None)
        self.transport = self.writer = self._request = self._body = self._end = None
        self._behind, self._rest, self._is_sending = b"", memoryview(b""), False
        self._count_unsent(0)
        if self._work is not None:
            self._work.cancel()
            self._work = None

    def pause_writing(self) -> None:
        self._is_full, transport = True, self.transport
        assert transport is not None
        # A response in pieces is in memory as a whole, until its last piece is written.
        whole_bytes = len(cast(bytes, self._rest.obj)) if self._rest else 0
        self._count_unsent(whole_bytes or transport.get_write_buffer_size())
        self.server.unsent.add(self)
        if self.writer is not None:
            self.writer.room_changed(False)

    def resume_writing(self) -> None:
        self._is_full, self._unsent_bytes = False, 0
        self._write_rest()
        if self._is_full:
            return
        self._count_unsent(0)
        if self.writer is not None:
            self.writer.room_changed(True)
        elif self._is_sending:
            self._go_on_behind()

    def _prove(self, proof: ServerProof, data: bytes) -> bytes:
        """Pass data to the client's proof; return the data behind the proof."""
        assert self.transport is not None
        try:
            answer, data = proof.receive(data)
        except ProofError as fault:
            log.warning("a client failed to prove itself: %s", fault)
            self.transport.abort()
            return b""
        if answer:
            self.transport.write(answer)
        if proof.is_over:
            self._proof = None
            self.scope = None if proof.scope is None else proof.scope.scope
        return data

    # The methods below read a head, and refuse a broken request.

    def _read_head(self, data: bytes) -> tuple[Head, int, int] | None:
        """Read an unusual or incomplete head; None: it is incomplete, or was refused."""
        server, loop = self.server, asyncio.get_running_loop()
        if self._reader is None:
            self._reader = HeadReader(loop)
            if self._line is server.kept:
                self._line.pop(self, None)
                self._line = server.new
                self._line.append(self, loop.time() + HEAD_S)
        try:
            found = self._reader.feed(data)
        except BrokenRequestError as error:
            self._refuse(error)
            return None
        if found is not None:
            self._reader = None
        return found

    def _refuse(self, error: BrokenRequestError) -> None:
        """Answer a request that reaches no handler, and end the connection."""
        # The bytes are not logged, because they may belong to a prompt or a key.
        log.warning("broken HTTP: %s", error.cause)
        headers = self.server.note_refusal(error.refusal.status, error.headers)
        assert self.transport is not None
        self.transport.write(written(refused(error.refusal, headers), keeps_open=False))
        self._line.pop(self, None)
        self._linger()

    def _linger(self) -> None:
        """Read on until the client closes, at most for `LINGERING_S`: closing a socket with unread
        bytes resets it, and the client loses the answer.
        """
        self._is_over, self._behind, self._body = True, b"", None
        transport = self.transport
        assert transport is not None
        self._adjust_reading()
        if transport.can_write_eof():
            transport.write_eof()
        asyncio.get_running_loop().call_later(LINGERING_S, self.close_if_idle)

    # The methods below serve a request whose head is complete.

    def want_body(self) -> None:
        """Note that the request's handler now reads the body: more of it is received."""
        request, body, self._is_wanted = self._request, self._body, True
        if self.transport is None or request is None or body is None:
            return
        if request.expects and not body.received_bytes and not body.is_over:
            self.transport.write(_GO_ON)
        self._adjust_reading()

    def has_turn(self) -> None:
        """Read on, because the connection has waited for its turn."""
        self._waits = False
        self._adjust_reading()

    def _take_more(self, data: bytes) -> None:
        """Take more bytes of the request's body, or of the next request."""
        if (body := self._body) is not None and not body.is_over:
            size_bytes, data = len(data), body.feed(data)
            self._behind += data
            if size_bytes >= _MUCH_BYTES and self.scope is None and not self._waits:
                self._waits = True
                self.server.turns.wait(self)
            if body.changed is not None:
                body.changed()
        else:
            self._behind += data
        self._adjust_reading()

    def _answered(self, task: EagerTask[Response], error: BaseException | None) -> None:
        """Write the response, if the handler has not, and go on with the next request."""
        self._work = None
        if error is not None:
            if not isinstance(error, asyncio.CancelledError):
                log.error("request ended by a bug", exc_info=error)
            self.abort()  # Written bytes cannot be replaced by an error.
            return
        request, self._request, self.writer = self._request, None, None
        body, self._body = self._body, None
        response, server, transport = task.result, self.server, self.transport
        if request is None or transport is None:
            return
        assert response is not None
        is_whole = body is None or body.is_whole
        keeps_open = request.keep_alive and is_whole and not server.is_closing
        if response.body is not None:
            try:
                self._write(written(response, request, keeps_open=keeps_open))
            except Exception:
                log.exception("response ended by a bug")
                keeps_open = False
        self._is_wanted = False
        self.idle_since_s = asyncio.get_running_loop().time()
        if not keeps_open:
            self._is_over, self._end = not is_whole, self._close if is_whole else self._linger
        if self._is_full:
            self._is_sending = True
        else:
            self._go_on_behind()

    def _write(self, data: bytes) -> None:
        """Write a response. A long one is written in pieces as there is room for them, since TLS
        neither limits nor counts what one write leaves unsent.
        """
        assert self.transport is not None
        if len(data) <= _PIECE_BYTES:
            self.transport.write(data)
            return
        self.transport.set_write_buffer_limits(high=UNSENT_BYTES, low=UNSENT_BYTES)
        self._rest = memoryview(data)
        self._write_rest()

    def _write_rest(self) -> None:
        transport = self.transport
        while self._rest and not self._is_full and transport is not None:
            piece, self._rest = self._rest[:_PIECE_BYTES], self._rest[_PIECE_BYTES:]
            transport.write(bytes(piece))

    def _go_on_behind(self) -> None:
        """End the connection behind a response, or wait for the next request: at most a small part
        of the response is not sent.
        """
        server, self._is_sending = self.server, False
        if self not in server.unsent:
            server.unsent.add(self)
        if self._end is not None:
            self._end()
            return
        self._line = line = server.kept
        line[self] = asyncio.get_running_loop().time() + server.idle_s
        if line.look is None:
            line.begin()
        if self._is_paused or self._behind:
            self._read_on()

    def _close(self) -> None:
        """Close the connection; its last bytes are still sent, as long as the client reads them."""
        assert self.transport is not None
        self.transport.close()
        self.server.unsent.add(self)

    def _count_unsent(self, size_bytes: int) -> None:
        self.server.budget.held_bytes += size_bytes - self._counted_bytes
        self._counted_bytes = size_bytes

    def _read_on(self) -> None:
        """Go on with the next request: the client has room for its response."""
        self._adjust_reading()
        if self._behind:
            # A later call serves the next request: a read may hold many, and recursion is limited.
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        data, self._behind = self._behind, b""
        if data:
            self.data_received(data)

    def _adjust_reading(self) -> None:
        """Read only while there is room for more bytes and the connection has its turn."""
        unread_bytes = 0
        if self._body is not None and not self._is_wanted:
            unread_bytes = self._body.received_bytes
        is_full = len(self._behind) > _MAX_PIPELINED_BYTES or unread_bytes > _UNREAD_BYTES
        pauses = is_full or self._waits
        if pauses is not self._is_paused and self.transport is not None:
            self._is_paused = pauses
            if pauses:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()


def address_of(transport: asyncio.Transport) -> str:
    return str((transport.get_extra_info("peername") or ("",))[0])


def _queued_bytes(transport: asyncio.Transport) -> int:
    """Return the number of bytes that the client's kernel has not confirmed."""
    found, of = bytes(4), transport.get_extra_info("socket")
    # The connection has just ended, and over TLS its protocol is told of that a turn later.
    if of is None:
        return 0
    with suppress(OSError, ValueError):
        found = fcntl.ioctl(of.fileno(), termios.TIOCOUTQ, found)
    return int(struct.unpack("i", found)[0])


def refuse(transport: asyncio.Transport) -> None:
    """Answer 503 and close the connection, because the port has no room for it."""
    transport.write(written(refused(_FULL, {"Retry-After": retry_after(1.0)}), keeps_open=False))
    transport.close()
