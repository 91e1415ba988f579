"""Connection to an instance. It sends a request in one write, and passes the response's bytes on
within the callback that receives them. There is no task, future, lock or timer per token, so code
that runs per token must neither block nor await.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, assert_never, cast

from kvrs.errors import UpstreamError
from kvrs.net.server import ReadingTurns
from kvrs.process.eager_task import Signal
from kvrs.proxy.wire.errors import ConnectionLostError, UnusableError
from kvrs.proxy.wire.http_response import (
    BrokenBody,
    Fault,
    HttpResponse,
    NotHttp,
    end_of_chunk,
)
from kvrs.proxy.wire.sse import EventSplitter
from kvrs.proxy.wire.steady_reads import SteadyReads

_MAX_REFUSAL_BYTES = 8 << 20
_LARGE_BODY_BYTES = 256 << 10  # Size of a request's body above which it is sent in pieces.
_READ_BYTES = 8 << 10  # Most bytes that one read takes from a steady stream.
# A read of this many bytes that the shortcut leaves is taken in the connection's turn, and of one
# connection no more than `_TURN_BYTES` per turn of the event loop: at most 40 ms of work, if an
# engine sends only framing.
_MUCH_BYTES = 16 << 10
_TURN_BYTES = 64 << 10
_FEW_BYTES = 64  # A rest of fewer bytes contains no token's event, only the end of a stream.


class Need(Enum):
    """Part of a response that its reader still needs."""

    MORE = "more"
    END = "end"  # Only the response's end, so that the connection can be reused.
    NOTHING = "nothing"


# Function that takes whole chunks from the start of a read, and returns the bytes that it leaves.
Shortcut = Callable[[bytes], bytes]


class Reader(Protocol):
    """Takes the bytes of a response's body."""

    # Connection that the bytes come from; None: the request is not sent yet.
    flow: "Upstream | None"

    @property
    def shortcut(self) -> Shortcut | None:
        """Return the function that gets each read before `feed`; None: no such function."""

    def feed(self, data: bytes) -> Need:
        """Take the next bytes of the body; return what is still needed. The call ends with an error
        that this method raises.
        """


@dataclass(slots=True, eq=False)
class WholeReader:
    """Collects the body of a response; more than `max_bytes` end the call with an error."""

    max_bytes: int
    size_bytes: int = 0
    chunks: list[bytes] = field(default_factory=list)
    flow: "Upstream | None" = None

    shortcut = None

    def feed(self, data: bytes) -> Need:
        self.chunks.append(data)
        self.size_bytes += len(data)
        if self.size_bytes > self.max_bytes:
            raise UpstreamError(f"sent an answer of more than {self.max_bytes} bytes")
        return Need.MORE

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)


@dataclass(slots=True, eq=False)
class EventReader:
    """Collects the payloads of all events of a short stream."""

    payloads: list[bytes] = field(default_factory=list)
    splitter: EventSplitter = field(default_factory=EventSplitter)
    flow: "Upstream | None" = None

    shortcut = None

    def feed(self, data: bytes) -> Need:
        self.payloads += self.splitter.feed(data)
        return Need.MORE


def one_by_one() -> ReadingTurns:
    """Make turns of connections to instances: one of those that bring much reads in each turn of
    the event loop.
    """
    return ReadingTurns(1)


class Upstream(asyncio.Protocol):
    """A connection to an instance, for one call at a time. `lost` is called when the connection has
    ended, with its call, if any, and the error that the call must raise. `steady` reads the
    connection while tokens take the reader's shortcut; None: the event loop does. Connections that
    bring much take `turns`; None: the connection shares them with no other one.
    """

    __slots__ = (
        *("_descriptor", "_ended", "_held", "_is_paused", "_is_sent", "_is_steady", "_loop"),
        *("_lost", "_reader", "_refusal", "_response", "_room", "_shortcut", "_steady", "_take"),
        *("_turns", "_waits", "proof", "status", "transport"),
    )

    transport: asyncio.Transport  # Set by `connection_made`, before any call.

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lost: "Lost",
        steady: SteadyReads | None = None,
        turns: ReadingTurns | None = None,
    ) -> None:
        self._loop = loop
        self._lost = lost
        self._turns = turns or one_by_one()
        # The connection waits for its turn, with received bytes that are not taken yet. Its
        # transport is paused.
        self._waits, self._held = False, b""
        self._steady = steady
        self._is_steady = False
        # Descriptor of the connection while `steady` reads it; None: the event loop reads it.
        self._descriptor: int | None = None
        # Response to the running call; None: no call runs.
        self._response: HttpResponse | None = None
        self._reader: Reader | None = None
        # Function that takes the bytes of the body; None: the head is not complete yet.
        self._take: Callable[[bytes], Need] | None = None
        self._shortcut: Shortcut | None = None
        self._refusal: WholeReader | None = None
        self._ended: Signal[Need] | None = None
        # Future of room in the transport, while a large body waits for it.
        self._room: asyncio.Future[None] | None = None
        self._is_sent = True
        self._is_paused = False
        self.status = 0  # Status of the last response whose head is complete; 0: none yet.
        # Proof of this process's key, sent before the first request; empty: nothing to send.
        self.proof = b""

    async def send(self, head: bytes, body: bytes, reader: Reader) -> Awaitable[Need]:
        """Send a request, and pass its response's body to the reader from now on. The body of a
        refusal, with another status than 200, is kept instead. Returns a future of the call's end:
        the response has ended, or the reader needs no more.

        Raises:
            UpstreamError: from the future: the connection was lost, or the bytes are not a
                response.
        """
        self._response, self._reader = HttpResponse(self._loop), reader
        self._take = self._refusal = None
        ended: Signal[Need] = Signal(loop=self._loop)
        self._ended, reader.flow = ended, self
        head, self.proof = self.proof + head, b""
        if len(body) <= _LARGE_BODY_BYTES:
            self.transport.write(head + body)
            return ended
        self._is_sent = False
        self.transport.write(head)
        rest = memoryview(body)
        while rest and not self.transport.is_closing() and not ended.done():
            self.transport.write(bytes(rest[:_LARGE_BODY_BYTES]))
            rest = rest[_LARGE_BODY_BYTES:]
            if self._room is None:
                await asyncio.sleep(0)
            else:
                await asyncio.wait({self._room})
        self._is_sent = not rest
        return ended

    async def read_rest(self, timeout_s: float) -> None:
        """Read the rest of a response that nothing needs, within a time limit, so that the
        connection can be used again.
        """
        response = self._response
        if response is None or response.is_complete:
            return
        self._ended = Signal(loop=self._loop)
        self.resume()
        with suppress(TimeoutError, UpstreamError):
            async with asyncio.timeout(timeout_s):
                await self._ended

    @property
    def headers(self) -> Mapping[str, str]:
        assert self._response is not None
        return self._response.headers

    @property
    def refusal(self) -> bytes:
        """Body of a response with another status than 200."""
        return b"" if self._refusal is None else self._refusal.body

    def leave(self) -> bool:
        """End the call; return whether the connection can serve another call. If it cannot, the
        connection is closed, which ends the request in the engine.
        """
        response, self._response = self._response, None
        self._reader = self._take = self._refusal = self._ended = self._shortcut = None
        if self._is_steady:
            self.end_steady()
        is_over = response is not None and response.is_complete and response.keeps_open
        if is_over and self._is_sent and not self._held:
            if self._is_paused:
                self.resume()
            return not self.transport.is_closing()
        self.close()
        return False

    def close(self) -> None:
        if self._is_steady:
            self.end_steady(reads_on=False)
        self._held = b""
        self.transport.abort()

    def pause(self) -> None:
        if not self._is_paused and not self.transport.is_closing():
            self._is_paused = True
            if self._is_steady:
                self.end_steady(reads_on=False)
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if not self._waits and not self.transport.is_closing():
                if self._held:
                    self._wait()
                else:
                    self.transport.resume_reading()

    def _use_shortcut(self, shortcut: Shortcut, response: HttpResponse) -> None:
        if self._refusal is not None or self._take is _drop or not response.is_between_chunks:
            return
        self._shortcut = shortcut
        is_read = not (self._is_steady or self._is_paused or self._waits)
        if self._steady is not None and is_read and not self.transport.is_closing():
            self._is_steady = True
            self._descriptor = self._steady.begin(self.transport, self)

    def read(self) -> None:
        """Read the received bytes of a steady stream."""
        assert self._descriptor is not None
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.data_received(data)
        else:
            # The event loop then reads the end of the connection, and reports it.
            self.end_steady()

    def end_steady(self, *, reads_on: bool = True) -> None:
        """Return the connection to the event loop, which reads on with `reads_on`."""
        assert self._steady is not None
        descriptor, self._descriptor, self._is_steady = self._descriptor, None, False
        self._steady.end(descriptor, self)
        if reads_on and descriptor is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface of asyncio's, but not their base class.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        is_rest = False
        while self._shortcut is not None:
            size = len(data)
            try:
                if not (data := self._shortcut(data)):
                    return
            except Exception as error:
                self._fail(error)
                return
            # The shortcut is tried again behind one unusual event, but not behind a second unusual
            # event: all further events of the read are likely of the same kind.
            end = end_of_chunk(data)
            if (is_rest and len(data) == size) or not 0 < end < len(data) - _FEW_BYTES:
                break
            if end >= _MUCH_BYTES:
                break
            self._take_read(data[:end])
            data, is_rest = data[end:], True
        if len(data) < _MUCH_BYTES or self.transport.is_closing():
            self._take_read(data)
            return
        # Large reads take turns. Until the next one nothing is read.
        self.transport.pause_reading()
        self._held = data
        if self._turns.is_taken:
            self._wait()
        else:
            self._take_held()

    def has_turn(self) -> None:
        """Take the next part of the bytes that are held, or read on."""
        self._waits = False
        if self._is_paused or self.transport.is_closing():
            return  # `resume` goes on.
        if self._held:
            self._take_held()
        else:
            self.transport.resume_reading()

    def _take_held(self) -> None:
        data, self._held = self._held[:_TURN_BYTES], self._held[_TURN_BYTES:]
        self._wait()
        self._take_read(data)

    def _wait(self) -> None:
        self._waits = True
        self._turns.wait(self)

    def _take_read(self, data: bytes) -> None:
        """Take the bytes of a read that the shortcut has left."""
        response, self._shortcut, need = self._response, None, Need.MORE
        if response is None:  # The server sends bytes that no call has asked for.
            self.close()
            return
        try:
            body = response.feed(data)
            take = self._take
            if take is None and response.status is not None:
                assert self._reader is not None
                take, self.status = self._reader.feed, response.status
                if response.status != 200:
                    self._refusal = WholeReader(_MAX_REFUSAL_BYTES)
                    take = self._refusal.feed
                self._take = take
            if body:
                assert take is not None
                need = take(body)
        except Exception as error:
            # The reader's error, which may be a bug: the task that awaits the call raises it.
            self._fail(error)
            return
        if need is not Need.MORE:
            self._take = _drop
            if response.fault is not None:
                self.close()
            # Nothing is left to read of a complete response.
            self._end(Need.NOTHING if response.is_complete else need)
        elif response.is_complete:
            self._end(Need.MORE)
        elif response.fault is not None:
            self._fail(_error_of(response.fault))
        elif self._reader is not None and (shortcut := self._reader.shortcut) is not None:
            self._use_shortcut(shortcut, response)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_steady:
            self.end_steady(reads_on=False)
        if self._held:
            data, self._held = self._held, b""
            self._take_read(data)
        self._shortcut, response = None, self._response
        if response is not None:
            response.feed_eof()
        self.resume_writing()
        call = self._ended
        if response is None or call is None or call.done():
            self._lost(self, None, None)
        elif response.is_complete:
            self._lost(self, None, None)
            call.set_result(Need.MORE)
        elif response.status is not None:
            self._lost(self, call, _error_of(BrokenBody()))
        elif isinstance(exc, OSError) and exc.errno is not None and exc.errno > 0:
            error = ConnectionLostError(f"connection lost: {os.strerror(exc.errno)}")
            self._lost(self, call, error)
        else:
            error = ConnectionLostError("connection lost: closed without an answer")
            self._lost(self, call, error)

    def pause_writing(self) -> None:
        self._room = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._room is not None:
            self._room.cancel()
            self._room = None

    def _end(self, need: Need) -> None:
        if self._room is not None:
            self.resume_writing()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(need)

    def _fail(self, error: Exception) -> None:
        self._take, self._shortcut = _drop, None
        self.close()
        self.resume_writing()
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


# Function called at the end of a connection, with its running call and the call's error, if any.
Lost = Callable[[Upstream, Signal[Need] | None, UpstreamError | None], None]


def _drop(_: bytes) -> Need:
    return Need.MORE


def _error_of(fault: Fault) -> UpstreamError:
    match fault:
        case NotHttp(cause=cause):
            return UnusableError(f"its answer is not HTTP: {cause[:80]!r}")
        case BrokenBody():
            return ConnectionLostError("connection lost: closed in the middle of a response")
        case _:
            assert_never(fault)
