"""The client's side of a stream. Events are written as they arrive, directly to the transport of
the connection. Head and framing are made here, so a write is one call and needs no task.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from aiohttp.helpers import rfc822_formatted_time

from kvrs.errors import KvrsError
from kvrs.ids import StreamId
from kvrs.net.connections import UNSENT_BYTES
from kvrs.net.routes import SERVER, WRITTEN, Request, Response
from kvrs.protocol.mirror import StreamEvent
from kvrs.proxy.wire.requests import REQUEST_ID

# A comment line without an empty line behind it: many decoders dispatch an event at each empty
# line, some only after an `id:`. The next event then follows as further lines.
_COMMENT = b": keep-alive\n"
_LAST_CHUNK = b"0\r\n\r\n"
# Part of the head that all event streams have.
_EVENT_STREAM = (
    " 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    f"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\nServer: {SERVER}\r\n"
)
_CHUNKED = "Transfer-Encoding: chunked\r\n"
_LAST_OF_CONNECTION = "Connection: close\r\n"

# Longest time without bytes to a client, after which it gets a comment: load balancers cut
# connections that send nothing for a minute.
KEEP_ALIVE_S = 10.0
# Number of looks at all clients in that time; a look finds clients that got nothing since the look
# before.
_LOOKS = 2


# Function that takes a token's id, its event, and the time.
TakeToken = Callable[[int, bytes, float], None]


class ClientGoneError(KvrsError):
    """The client closed its connection, or did not read for too long."""


class Client(Protocol):
    """Takes the events of a stream for a client."""

    @property
    def blocked(self) -> bool:
        """Return whether the client must read before it gets more; the engine's silence is excused
        then.
        """

    @property
    def direct(self) -> "SseClient | None":
        """The client to whose connection an event may be written unchanged, as a chunk; None:
        `send` must take it.
        """

    @property
    def take_token(self) -> "TakeToken | None":
        """Function that takes an event of one journaled token, like `send`; None: use `send`."""

    def send(self, events: Sequence[bytes]) -> None:
        """Send events, given as JSON payloads. Raises ClientGoneError."""

    def when_free(self, resume: Callable[[], None]) -> None:
        """Call `resume` once, when a blocked client is no longer blocked."""


class StreamClient(Client, Protocol):
    """Writes the events of a chat or completion to a client's connection, in the form of its API.
    `numbers_events`: the ids of events count what the client gets, so a proxy that takes the stream
    over must make the same events, and the client gets only those that the mirror has.
    """

    numbers_events: bool

    @property
    def has_begun(self) -> bool:
        """Return whether the head of the response is sent."""

    def break_silence(self) -> None:
        """Send something without content if nothing was sent since the last call."""

    async def finish(self, data: bytes) -> Response:
        """Send the last events, given as server-sent events, and end the response."""


@dataclass(slots=True, eq=False)
class SseClient:
    """A client that gets a stream. Headers are sent with the first event, or with a comment that
    keeps the connection open, so earlier errors have a status.
    """

    request: Request
    # Function that makes the extra headers when the response begins.
    head: Callable[[], Mapping[str, str]]
    blocked: bool = False
    was_silent: bool = False  # Nothing was sent since the last call of `break_silence`.
    # Transport of the client's connection; None: the response has not begun.
    transport: asyncio.Transport | None = None
    _is_chunked: bool = False
    _head: bytes = b""  # Head of the response, until it is written with the first bytes.
    _waiting: tuple[Callable[[], None], ...] = ()
    _is_over: bool = False

    take_token = None
    numbers_events = False

    @property
    def has_begun(self) -> bool:
        return self.transport is not None

    @property
    def is_open(self) -> bool:
        """Return whether the response has begun and its connection stands."""
        return self.transport is not None and not self.transport.is_closing()

    @property
    def direct(self) -> "SseClient | None":
        return self if self.request.minor_version else None

    def send(self, events: Sequence[bytes]) -> None:
        """Send events, of which there must be at least one."""
        self.send_framed(b"data: %b\n\n" % b"\n\ndata: ".join(events))

    def send_numbered(self, stream: StreamId, events: Sequence[StreamEvent]) -> None:
        """Send events like `send`, with event ids, which a resuming client sends back."""
        name = stream.encode()
        self.send_framed(
            b"".join([b"id: %b:%d\ndata: %b\n\n" % (name, each.seq, each.data) for each in events])
        )

    def when_free(self, resume: Callable[[], None]) -> None:
        self._waiting = (*self._waiting, resume)

    def break_silence(self, comment: bytes = _COMMENT) -> None:
        """Send a comment, which clients ignore, if nothing was sent since the last call."""
        if self.was_silent and not self.blocked and not self._is_over:
            with suppress(ClientGoneError):  # The end of the client's connection ends its stream.
                self.send_framed(comment)
        self.was_silent = True

    async def finish(self, data: bytes) -> Response:
        """Send the last events, already framed, and end the response."""
        self._is_over = True
        self.send_framed(data or _COMMENT, is_last=True)
        if self.blocked:
            read = asyncio.Event()
            self.when_free(read.set)
            await read.wait()
        return WRITTEN

    def send_framed(self, data: bytes, *, is_last: bool = False) -> None:
        """Send events that are already framed."""
        transport = self.transport or self._open()
        if transport.is_closing():
            raise ClientGoneError("the client closed its connection, or did not read from it")
        self.was_silent = False
        if self._is_chunked:
            data = b"%x\r\n%b\r\n%b" % (len(data), data, _LAST_CHUNK if is_last else b"")
        if self._head:
            data, self._head = self._head + data, b""
        transport.write(data)

    def _open(self) -> asyncio.Transport:
        """Make the head, which is written with the first bytes; return the transport."""
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
        heads = [self.head()] if request.head is None else [self.head(), request.head()]
        for name, value in (line for head in heads for line in head.items()):
            lines += f"{name}: {value}\r\n"
        if request.id:
            lines += f"{REQUEST_ID}: {request.id}\r\n"
        if self._is_chunked:
            lines += _CHUNKED if request.keep_alive else _CHUNKED + _LAST_OF_CONNECTION
        version = f"HTTP/1.{request.minor_version}"
        date = rfc822_formatted_time()
        self._head = f"{version}{_EVENT_STREAM}{lines}Date: {date}\r\n\r\n".encode()
        request.is_begun = True  # No error response is possible from now on.
        return transport

    def _room_changed(self, has_room: bool) -> None:
        self.blocked = not has_room
        if has_room:
            waiting, self._waiting = self._waiting, ()
            for resume in waiting:
                resume()


class KeepAlives:
    """Sends comments to streams that wait or recover, because a proxy in front may cut silent
    connections. The head precedes the first comment, so an earlier error has a status. One timer
    runs while any streams are open.
    """

    def __init__(self) -> None:
        # Clients that get comments; callers remove a client when its stream ends.
        self.open: set[StreamClient] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, client: StreamClient) -> None:
        """Send this client comments in silences, until the caller removes it from `open`."""
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
