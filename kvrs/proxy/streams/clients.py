"""The client's side of a stream: events are written as they come, straight to the transport of its
connection. The head and the framing of the body are made here, so that a write is one call and
needs no task.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from aiohttp.helpers import rfc822_formatted_time

from kvrs.errors import KvrsError
from kvrs.ids import StreamId
from kvrs.net.routes import SERVER, WRITTEN, Request, Response
from kvrs.protocol.mirror import StreamEvent
from kvrs.proxy.wire.requests import REQUEST_ID

# More than this unsent: the client does not read as fast as the engine writes.
UNSENT_BYTES = 64 << 10

# Its one line has no empty line behind it: many decoders dispatch an event at each empty line, some
# only once they have seen an `id:`. The next event follows it as a further line.
_COMMENT = b": keep-alive\n"
_LAST_CHUNK = b"0\r\n\r\n"
# The head of a stream of events, but for what each has of its own.
_EVENT_STREAM = (
    " 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    f"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\nServer: {SERVER}\r\n"
)
_CHUNKED = "Transfer-Encoding: chunked\r\n"
_LAST_OF_CONNECTION = "Connection: close\r\n"

# The longest silence: load balancers cut what sends nothing for a minute.
KEEP_ALIVE_S = 10.0
# Each look finds the streams that were silent since the one before, so the longest silence is two.
_LOOKS = 2


# The token, its event, the time.
TakeToken = Callable[[int, bytes, float], None]


class ClientGoneError(KvrsError):
    """The client closed its connection, or did not read for too long."""


class Client(Protocol):
    """The destination of a stream's events."""

    @property
    def blocked(self) -> bool:
        """The client has to read before it is given more, which excuses the engine's silence."""

    @property
    def direct(self) -> "SseClient | None":
        """The client on whose connection an event may lie as it is, in a chunk of its own."""

    @property
    def take_token(self) -> "TakeToken | None":
        """Takes an event of one token, which is in the journal, as `send` would."""

    def send(self, events: Sequence[bytes]) -> None:
        """Send JSON payloads; raises ClientGoneError."""

    def when_free(self, resume: Callable[[], None]) -> None:
        """Call this once, when a client that is blocked is so no more."""


# A client that does not read for this long is cut off.
WRITE_TIMEOUT_S = 30.0


@dataclass(slots=True, eq=False)
class SseClient:
    """A client that gets a stream. Headers are sent with the first event, or with a comment that
    keeps the connection open, so that earlier errors have a status.
    """

    request: Request
    head: Callable[[], Mapping[str, str]]  # Headers beside the usual ones, asked for as it begins.
    blocked: bool = False
    was_silent: bool = False  # Since the last look at it.
    # Of the response, once it has begun.
    transport: asyncio.Transport | None = None
    _is_chunked: bool = False
    _head: bytes = b""  # Until the first bytes are written.
    _waiting: tuple[Callable[[], None], ...] = ()
    _patience: asyncio.TimerHandle | None = None
    _gone: str | None = None
    _is_over: bool = False

    take_token = None

    @property
    def has_begun(self) -> bool:
        return self.transport is not None

    @property
    def is_open(self) -> bool:
        """The response has begun, and its connection stands."""
        return self.transport is not None and not self.transport.is_closing()

    @property
    def direct(self) -> "SseClient | None":
        return self if self.request.minor_version else None

    def send(self, events: Sequence[bytes]) -> None:
        """Send events, of which there is at least one."""
        self.send_framed(b"data: %b\n\n" % b"\n\ndata: ".join(events))

    def send_numbered(self, stream: StreamId, events: Sequence[StreamEvent]) -> None:
        """Send events as `send` does, with event ids, which a client that resumes sends back."""
        name = stream.encode()
        self.send_framed(
            b"".join([b"id: %b:%d\ndata: %b\n\n" % (name, each.seq, each.data) for each in events])
        )

    def when_free(self, resume: Callable[[], None]) -> None:
        self._waiting = (*self._waiting, resume)

    def break_silence(self) -> None:
        """Send a comment, which clients ignore, if nothing was sent since the last call."""
        if self.was_silent and not self.blocked and not self._is_over:
            with suppress(ClientGoneError):  # The end of its connection ends its stream.
                self.send_framed(_COMMENT)
        self.was_silent = True

    async def finish(self, data: bytes) -> Response:
        """Send the last events, which are framed already, and end the response."""
        self._is_over = True
        self.send_framed(data or _COMMENT, is_last=True)
        if self.blocked:
            read = asyncio.Event()
            self.when_free(read.set)
            await read.wait()
        return WRITTEN

    def send_framed(self, data: bytes, *, is_last: bool = False) -> None:
        """Send events that are framed already."""
        transport = self.transport or self._open()
        if transport.is_closing():
            raise ClientGoneError(self._gone or "the client closed its connection")
        self.was_silent = False
        if self._is_chunked:
            data = b"%x\r\n%b\r\n%b" % (len(data), data, _LAST_CHUNK if is_last else b"")
        if self._head:
            data, self._head = self._head + data, b""
        transport.write(data)

    def _open(self) -> asyncio.Transport:
        """Make the head, which is written with the first bytes."""
        request = self.request
        connection = request.connection
        if (transport := connection.transport) is None:
            raise ClientGoneError("the client closed its connection")
        self.transport = transport
        self._is_chunked = bool(request.minor_version)
        request.keep_alive = request.keep_alive and self._is_chunked
        transport.set_write_buffer_limits(high=UNSENT_BYTES, low=UNSENT_BYTES)
        connection.room_changed = self._room_changed
        lines = ""
        for name, value in self.head().items():
            lines += f"{name}: {value}\r\n"
        if request.id:
            lines += f"{REQUEST_ID}: {request.id}\r\n"
        if self._is_chunked:
            lines += _CHUNKED if request.keep_alive else _CHUNKED + _LAST_OF_CONNECTION
        version = f"HTTP/1.{request.minor_version}"
        date = rfc822_formatted_time()
        self._head = f"{version}{_EVENT_STREAM}{lines}Date: {date}\r\n\r\n".encode()
        request.is_begun = True  # No error is sent after this.
        return transport

    def _room_changed(self, has_room: bool) -> None:
        self.blocked = not has_room
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if not has_room:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(WRITE_TIMEOUT_S, self._give_up)
            return
        waiting, self._waiting = self._waiting, ()
        for resume in waiting:
            resume()

    def _give_up(self) -> None:
        # The loss of its connection cancels the request, and with it the stream.
        assert self.transport is not None
        self._gone = f"the client did not read for {WRITE_TIMEOUT_S} s"
        self.transport.abort()


class KeepAlives:
    """Comments for streams that wait or recover: a proxy in front of this one cuts what is silent
    for too long. Where nothing was sent yet the head goes before the first comment, so an error
    before that has a status of its own. One timer for all streams that are open, while there are
    any.
    """

    def __init__(self) -> None:
        self.open: set[SseClient] = set()  # Until they are discarded from it.
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, client: SseClient) -> None:
        """Keep the connection of this client alive, while it is in `open`."""
        self.open.add(client)
        if self._timer is None:
            self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(KEEP_ALIVE_S / _LOOKS, self._look)

    def _look(self) -> None:
        self._timer = None
        for client in list(self.open):
            client.break_silence()
        if self.open:
            self._arm()
