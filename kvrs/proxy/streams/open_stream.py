"""An open stream of the proxy: its client, task, outcome, and time per phase.

Events are written to a client as they arrive, directly to the transport of its connection. Head and
framing are made here, so a write is one call and needs no task.
"""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec
from aiohttp.helpers import rfc822_formatted_time

from kvrs.core.fleet.self_tests import TestedProcess
from kvrs.core.model.streams import Complete, LiveStream
from kvrs.errors import KvrsError, UndecodableError
from kvrs.ids import InstanceId, StreamId
from kvrs.net.connections import UNSENT_BYTES
from kvrs.net.routes import SERVER, WRITTEN, Request, Response
from kvrs.process.eager_task import EagerTask
from kvrs.protocol.mirror import StreamEvent
from kvrs.protocol.openai.chunks import UNDECODABLE, error_body
from kvrs.proxy.wire.journal import Journal
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
        connection.writer = self
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

    def room_changed(self, has_room: bool) -> None:
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


class Failed(msgspec.Struct, frozen=True):
    """An error for the client: sent by the response's status before the first byte, as an event
    afterwards.
    """

    status: int
    body: bytes
    retry_after_s: float | None = None
    rejected: bool = False  # The request is at fault, not an instance or the proxy.
    is_final: bool = False  # Clients must not repeat the request, though none is at fault.


Outcome = Complete | Failed


CLIENT_GONE = Failed(499, error_body("the client is gone", kind="client_gone"))


def undecodable(error: UndecodableError) -> Failed:
    """Return the failure of a stream whose output cannot be passed on in the form of its API."""
    body = error_body(str(error), kind="server_error", code=UNDECODABLE)
    return Failed(502, body, is_final=True)


def failed_by(error: ClientGoneError | UndecodableError) -> Failed:
    """Return the failure of a stream whose client takes no more events."""
    return CLIENT_GONE if isinstance(error, ClientGoneError) else undecodable(error)


class StreamPhase(StrEnum):
    """Phase of a stream, as shown to people."""

    WAITING = "waiting"  # No attempt is running, or the attempt waits for a place at an instance.
    PREFILL = "prefill"
    DECODE = "decode"


_PLACES = {phase: place for place, phase in enumerate(StreamPhase)}
_NOTHING = array("d", [0.0] * len(_PLACES))


@dataclass(slots=True, eq=False, kw_only=True)
class OpenStream(LiveStream):
    journal: Journal
    client: Client
    outcome: asyncio.Future[Outcome]
    clock: Callable[[], float]
    phase: StreamPhase = StreamPhase.WAITING
    # Instance that runs the current phase; None: the stream waits.
    instance: InstanceId | None = None
    entered_s: float  # Time at which the current phase began.
    # The core still decides about the first attempt, whose task begins afterwards.
    is_opening: bool = True
    # Seconds spent in each phase before the current phase began, over all attempts, in the order of
    # the phases.
    spent_s: "array[float]" = field(default_factory=_NOTHING.__copy__)
    task: EagerTask[None] | None = None
    decoders: tuple[TestedProcess, ...] = ()  # Processes that computed output, the latest last.
    # Makes the current attempt report its next token as if it were its first; None: no decode call
    # runs.
    expect_token: Callable[[], None] | None = None
    # Latest refusal by an instance, which the client gets if no other instance takes the request.
    refusal: Failed | None = None
    # Instances that refused the request, until it is known whether the request is at fault.
    refused_by: tuple[InstanceId, ...] = ()

    def enter(self, phase: StreamPhase, instance: InstanceId | None) -> None:
        if phase is not self.phase:
            now_s = self.clock()
            self.spent_s[_PLACES[self.phase]] += now_s - self.entered_s
            self.entered_s = now_s
        self.phase, self.instance = phase, instance

    def phase_seconds(self, now_s: float) -> dict[StreamPhase, float]:
        """Return the seconds spent in each phase until now, over all attempts."""
        spent = dict(zip(_PLACES, self.spent_s, strict=True))
        spent[self.phase] += now_s - self.entered_s
        return spent
