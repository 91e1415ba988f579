"""Requests that are served in the callback that brings their last byte, without aiohttp's server.

Taken is what clients send nearly always: POST to one of some paths, HTTP/1.1, a body with its
length, whole within a moment. All else goes, with its connection, to aiohttp's server: so nothing
is refused here that is served there, and the other way round.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import msgspec
from aiohttp import HttpVersion, HttpVersion11, web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.tcp_helpers import tcp_keepalive
from multidict import CIMultiDict, CIMultiDictProxy

from kvrs.net.broken_http import MOST_HEAD_BYTES, MOST_HEADERS
from kvrs.net.connections import Connections
from kvrs.net.http_connection import SERVER, HttpConnection, WaitingTimes, address_of, refuse
from kvrs.net.unfinished import SMALL_BYTES, UnfinishedBodies
from kvrs.process.eager_task import EagerTask
from kvrs.process.large_work import LARGE_BYTES
from kvrs.protocol.openai.structure import BYTE_ORDER_MARK

log = logging.getLogger(__name__)

_GATHERING_S = 0.2  # For the rest of a body, of which parts have come.
_MOST_GATHERED_BYTES = 16 << 20  # Of all connections.
_MAX_PIPELINED_BYTES = 64 << 10  # Of requests behind the one that is served.

_REQUEST_LINE = re.compile(r"POST (/[!-~]*) HTTP/1\.1(?=\r\n)")
# To the end of its line, without the blanks around the value: one with a control character is for
# the full parser.
_FIELD = re.compile(
    r"\r\n([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*+([!-~]*+(?: ++[!-~]++)*+) *+(?=\r\n|\Z)"
)
_LENGTH_LINE = re.compile(rb"\r\n(?i:Content-Length):[ \t]*([0-9]{1,9}) *\r\n")
_UNUSUAL = ("Transfer-Encoding", "Content-Encoding", "Expect", "Upgrade")
NO_HEADERS = CIMultiDictProxy(CIMultiDict[str]())


class SentResponse:
    """A response that has been written already."""

    __slots__ = ()

    keeps_open: bool  # Another request may follow on the connection.


DirectResponse = web.Response | SentResponse
Serve = Callable[["DirectRequest"], Coroutine[Any, Any, DirectResponse]]


class _Head(msgspec.Struct, frozen=True):
    """A head, but for the length of its body."""

    path: str
    headers: CIMultiDictProxy[str]
    keep_alive: bool


# Heads so far, by their bytes without the digits of the length: a client sends few different ones,
# unless it or a gateway names each request.
_KNOWN_HEADS: dict[bytes, _Head] = {}
_MOST_KNOWN = 256
_MOST_KNOWN_BYTES = 2048
_OF_ONE_REQUEST = ("X-Request-Id", "traceparent", "Idempotency-Key")


def parse_head(data: bytes) -> tuple[_Head, int, int] | None:
    """The head of a usual request at the beginning of `data`, and how many bytes it and its body
    have; None: it is another, or not whole.
    """
    end = data.find(b"\r\n\r\n", 0, MOST_HEAD_BYTES)
    if end < 0 or (length := _LENGTH_LINE.search(data, 0, end + 2)) is None:
        return None
    known_by = data[: length.start(1)] + data[length.end(1) : end]
    head = _KNOWN_HEADS.get(known_by)
    if head is None:
        if (head := _read_head(data[:end])) is None:
            return None
        is_of_one = any(map(head.headers.__contains__, _OF_ONE_REQUEST))
        if end <= _MOST_KNOWN_BYTES and not is_of_one:
            if len(_KNOWN_HEADS) >= _MOST_KNOWN:
                _KNOWN_HEADS.clear()
            _KNOWN_HEADS[known_by] = head
    return head, end + 4, int(length[1])


def _read_head(data: bytes) -> _Head | None:
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        return None
    if (line := _REQUEST_LINE.match(text)) is None:
        return None
    fields = _FIELD.findall(text, line.end())
    # A line that is no field, or a bare CR or LF, is for the full parser.
    if len(fields) != text.count("\n") or len(fields) != text.count("\r"):
        return None
    headers = CIMultiDict[str](fields)
    if len(headers) > MOST_HEADERS:
        return None
    for name in _UNUSUAL:
        if name in headers:
            return None
    if len(headers.popall("Content-Length", ())) != 1 or len(headers.getall("Host", ())) != 1:
        return None
    connection = ", ".join(headers.getall("Connection", ("keep-alive",))).lower()
    if connection not in ("keep-alive", "close"):
        return None
    return _Head(line[1], CIMultiDictProxy(headers), connection == "keep-alive")


@dataclass(slots=True, eq=False)
class DirectRequest(dict[Any, Any]):
    """A request with the part of aiohttp's interface that handlers need. It holds, as aiohttp's
    requests do, what is noted of it by its keys.
    """

    path: str
    headers: CIMultiDictProxy[str]  # None once it is admitted: nothing reads them any more.
    keep_alive: bool
    content_length: int
    remote: str
    protocol: "DirectConnection"
    body: bytes  # Until it is parsed, whose result keeps the parts that it needs.
    is_begun: bool = False  # The head of the response has been written.

    method: ClassVar[str] = "POST"
    version: ClassVar[HttpVersion] = HttpVersion11


class ClosingLine(dict["DirectConnection", float]):
    """Connections without a request, each with the time when it is closed, the next one first. None
    is added with an earlier time than another one has. One that has a request is removed.
    """

    look: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Close those that are due, now and later on."""
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


class DirectServer:
    """The requests of one port that are served so: `paths` with what serves them. `unfinished`
    counts what has come of those that are not whole.
    """

    def __init__(self, paths: Mapping[str, Serve], unfinished: UnfinishedBodies[Any]) -> None:
        self.paths = paths
        self.unfinished = unfinished
        self.gathered_bytes = 0
        self.is_closing = False
        self.connections: set[DirectConnection] = set()
        self.new, self.kept = ClosingLine(), ClosingLine()  # Before and after a first request.
        self._quiet: asyncio.Future[None] | None = None

    def connect(
        self, full: Callable[[], HttpConnection], among: Connections, times: WaitingTimes
    ) -> "DirectConnection":
        return DirectConnection(self, full, among, times)

    async def close(self, timeout_s: float) -> None:
        """Wait so long for the requests that are being served, then end all connections."""
        self.is_closing = True
        for connection in list(self.connections):
            connection.close_if_idle()
        if self.connections:
            self._quiet = asyncio.get_running_loop().create_future()
            await asyncio.wait({self._quiet}, timeout=timeout_s)
        for connection in list(self.connections):
            connection.abort()
        self.new.end()
        self.kept.end()

    def forget(self, connection: "DirectConnection") -> None:
        self.connections.discard(connection)
        if not self.connections and self._quiet is not None and not self._quiet.done():
            self._quiet.set_result(None)


class DirectConnection(asyncio.Protocol):
    """A connection that counts, until aiohttp's server takes it over. `room_changed` is called with
    whether its client reads as fast as is written to it.
    """

    __slots__ = (
        *("_abort", "_among", "_behind", "_full", "_gathered", "_gathering", "_head_until_s"),
        *("_is_full", "_is_paused", "_line", "_needs_bytes", "_request", "_server", "_times"),
        *("_work", "address", "idle_since_s", "room_changed", "transport"),
    )

    scope = None  # Client connections are not authenticated by proof.

    def __init__(
        self,
        server: DirectServer,
        full: Callable[[], HttpConnection],
        among: Connections,
        times: WaitingTimes,
    ) -> None:
        self.address = ""
        self.room_changed: Callable[[bool], None] | None = None
        self.transport: asyncio.Transport | None = None
        self._server = server
        self._full = full
        self._among = among
        self._times = times
        self._head_until_s = 0.0  # For its first request; 0: it has had one.
        self._line = server.new
        self.idle_since_s: float | None = None  # None: it has a request.
        self._abort: Callable[[], object] | None = None
        self._request: DirectRequest | None = None  # The one that is served.
        self._work: EagerTask[DirectResponse] | None = None
        # The request that has come in part.
        self._gathered = b""
        self._needs_bytes = 0
        self._gathering: asyncio.TimerHandle | None = None
        self._behind = b""  # What came while a request was served.
        self._is_paused = False  # Nothing is read.
        self._is_full = False  # The client does not read as fast as is written to it.

    def reserve(self, address: str, abort: Callable[[], object]) -> bool:
        """Admit the request as `HttpConnection.reserve` does."""
        self.address, self._abort = address, abort
        self.idle_since_s = asyncio.get_running_loop().time()
        return self._among.admit(self)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        elif self._abort is not None:
            self._abort()

    def close_if_idle(self) -> None:
        if self._request is None and self.transport is not None:
            self.transport.close()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do what asyncio's do, and descend from none of them.
        transport = cast(asyncio.Transport, transport)
        if self._abort is None and not self.reserve(address_of(transport), transport.abort):
            refuse(transport)
            return
        self.transport = transport
        self._server.connections.add(self)
        tcp_keepalive(transport)
        self.idle_since_s = now_s = asyncio.get_running_loop().time()
        self._head_until_s = now_s + self._times.head_s
        self._line[self] = self._head_until_s
        if self._line.look is None:
            self._line.begin()

    def data_received(self, data: bytes) -> None:
        if self.transport is None:  # Refused.
            return
        if self._request is not None or self._behind or self._is_full:
            self._keep_for_later(data)
            return
        if self._gathered:
            data = self._gathered + data
            if len(data) < self._needs_bytes:
                self._gather(data, self._needs_bytes)
                return
            self._stop_gathering()
        found = parse_head(data)
        if found is None or found[2] > LARGE_BYTES or found[0].path not in self._server.paths:
            self._hand_over(data)
            return
        head, head_bytes, body_bytes = found
        end = head_bytes + body_bytes
        if len(data) < end:
            self._gather(data, end)
            return
        self._behind, self.idle_since_s = data[end:], None
        self._head_until_s = 0.0
        self._line.pop(self, None)
        self._request = request = DirectRequest(
            head.path,
            head.headers,
            head.keep_alive,
            body_bytes,
            self.address,
            self,
            data[head_bytes:end].removeprefix(BYTE_ORDER_MARK),
        )
        serve = self._server.paths[head.path]
        self._work = task = EagerTask(serve(request), self._answered)
        task.begin()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._among.forget(self)
        self._server.forget(self)
        self._line.pop(self, None)
        self.transport = self.room_changed = self._request = None
        self._behind = b""
        self._stop_gathering()
        if self._work is not None:
            self._work.cancel()
            self._work = None

    def pause_writing(self) -> None:
        self._is_full = True
        if self.room_changed is not None:
            self.room_changed(False)

    def resume_writing(self) -> None:
        self._is_full = False
        if self.room_changed is not None:
            self.room_changed(True)
        elif self._request is None:
            self._read_on()

    # With a part of a request.

    def _gather(self, data: bytes, needs_bytes: int) -> None:
        server, grown_bytes = self._server, len(data) - len(self._gathered)
        if server.gathered_bytes + grown_bytes > _MOST_GATHERED_BYTES:
            self._hand_over(data)
            return
        server.gathered_bytes += grown_bytes
        # With its head it may be a little more, but its body is a small one.
        received_bytes = min(len(data), SMALL_BYTES)
        server.unfinished.note(self, len(data), received_bytes, 0.0)
        self._gathered, self._needs_bytes = data, needs_bytes
        if self._gathering is None:
            self._line.pop(self, None)
            loop = asyncio.get_running_loop()
            self._gathering = loop.call_later(_GATHERING_S, self._give_up_gathering)

    def _give_up_gathering(self) -> None:
        self._hand_over(self._gathered)

    def _stop_gathering(self) -> None:
        self._server.gathered_bytes -= len(self._gathered)
        self._server.unfinished.end(self)
        self._gathered = b""
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None

    def _hand_over(self, data: bytes) -> None:
        """Have aiohttp's server take the connection, to its end."""
        transport = self.transport
        assert transport is not None
        self._stop_gathering()
        self._resume_reading()
        self._among.forget(self)
        self._server.forget(self)
        self._line.pop(self, None)
        self.transport = None
        full = self._full()
        transport.set_protocol(full)
        now_s = asyncio.get_running_loop().time()
        full.take_over(transport, self._head_until_s or now_s + self._times.head_s)
        full.data_received(data)

    # With a request.

    def _answered(self, task: EagerTask[DirectResponse], error: BaseException | None) -> None:
        """Write the response, if that is not done, and go on with the next request."""
        self._work = None
        if error is not None:
            if not isinstance(error, asyncio.CancelledError):
                log.error("request ended by a bug", exc_info=error)
            self.abort()  # What is written already cannot be taken back.
            return
        request, self._request, self.room_changed = self._request, None, None
        response, transport = task.result, self.transport
        if request is None or transport is None:
            return
        assert response is not None
        if not isinstance(response, SentResponse):
            keeps_open = request.keep_alive and response.keep_alive is not False
            keeps_open = keeps_open and not self._server.is_closing
            try:
                transport.write(_written(response, keeps_open=keeps_open))
            except Exception:
                log.exception("response ended by a bug")
                keeps_open = False
        else:
            keeps_open = response.keeps_open and not self._server.is_closing
        self.idle_since_s = now_s = asyncio.get_running_loop().time()
        if not keeps_open:
            transport.close()
            return
        self._line = line = self._server.kept
        line[self] = now_s + self._times.idle_s
        if line.look is None:
            line.begin()
        if not self._is_full and (self._is_paused or self._behind):
            self._read_on()

    def _read_on(self) -> None:
        """The client has room for the next response."""
        self._resume_reading()
        if self._behind:
            # Not within this call: as many may follow as fit into a read.
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        data, self._behind = self._behind, b""
        if data:
            self.data_received(data)

    def _resume_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            assert self.transport is not None
            self.transport.resume_reading()

    def _keep_for_later(self, data: bytes) -> None:
        self._behind += data
        if len(self._behind) > _MAX_PIPELINED_BYTES and not self._is_paused:
            assert self.transport is not None
            self._is_paused = True
            self.transport.pause_reading()


def _written(response: web.Response, *, keeps_open: bool) -> bytes:
    body = response.body or b""
    assert isinstance(body, bytes)
    fields = {
        **response.headers,
        "Content-Length": str(len(body)),
        "Date": rfc822_formatted_time(),
        "Server": SERVER,
    }
    if not keeps_open:
        fields["Connection"] = "close"
    lines = [f"HTTP/1.1 {response.status} {response.reason}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
