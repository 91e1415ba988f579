"""Connections to engines: the response of a call is parsed as it comes, and a pool keeps idle
connections of an instance for further calls.

A connection sends a request in one write, and passes the response's bytes on within the callback
that receives them. There is no task, future, lock or timer per token, so code that runs per token
must neither block nor await. aiohttp's parser parses the head of a response; the body of a usual
one, in plain chunks or with a length, is found by offset, and the parser takes every other body.

Each call has a connection of its own: a multiplexer saved no CPU (`experiments/bench_proxy`).
"""

import asyncio
import logging
import os
import re
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Protocol, assert_never, cast
from urllib.parse import urlsplit

import msgspec
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpResponseParser, RawResponseMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from msgspec.structs import replace

from kvrs.config.settings import is_numeric
from kvrs.core.fleet.silence import LOST_TOGETHER_S
from kvrs.errors import UpstreamError
from kvrs.net.proving import PROOF_TIMEOUT_S, HandshakeProtocol, Keys, address_of
from kvrs.net.server import ReadingTurns
from kvrs.net.tls import Certificates
from kvrs.process.eager_task import Signal
from kvrs.process.large_work import LargeWork
from kvrs.process.memory import is_exhausted
from kvrs.protocol.secrets import ProofError, ScopedKey
from kvrs.proxy.wire.errors import (
    BusyError,
    ConnectionLostError,
    UnusableError,
    unproven,
    unreached,
)
from kvrs.proxy.wire.events import EventSplitter
from kvrs.proxy.wire.steady_reads import SteadyReads
from kvrs.proxy.wire.watchdog import SilentError, Watchdog, reset_timeout

log = logging.getLogger(__name__)

_END_OF_HEAD = b"\r\n\r\n"
_END_OF_CHUNK = b"\r\n"
_HEAD_OF_CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_SWITCHING = 101  # Status of a server that goes on in another protocol.
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,7})\r\n")
_BEGUN_CHUNK = re.compile(rb"[0-9a-fA-F]{0,7}\r?")
# Matches a whole chunk of fewer bytes than _TINY_BYTES. Many of them are split by the regular
# expression at a sixth of the cost of a loop in Python.
_TINY_BYTES = 16
_TINY_CHUNK = re.compile(
    b"(?:%b)\r\n" % b"|".join(b"[%x%X]\r\n.{%d}" % (n, n, n) for n in range(1, _TINY_BYTES)), re.S
)
_TINY_CHUNKS = re.compile(b"(?:%b)++" % _TINY_CHUNK.pattern, re.S)
_LENGTH = re.compile(r"[0-9]{1,15}")
# Most informational responses (1xx) before a response, and most bytes of all heads together.
_MOST_INFORMATIONAL = 8
_MOST_HEAD_BYTES = 64 << 10
# Limit of the parser's buffer. It is never reached: the buffer is emptied after every read.
_UNLIMITED_BYTES = 1 << 30


class NotHttp(msgspec.Struct, frozen=True):
    """Fault of a response: its head is malformed, or exceeds the parser's limits."""

    cause: str


class BrokenBody(msgspec.Struct, frozen=True):
    """Fault of a response: its body is malformed, or the connection has ended within the body."""


Fault = NotHttp | BrokenBody


_NO_HEADERS: Mapping[str, str] = {}


class _Framing(Enum):
    HEAD = "head"
    CHUNKS = "chunks"
    LENGTH = "length"
    PARSER = "parser"  # aiohttp's parser reads the body.


class _UsualHead(msgspec.Struct, frozen=True):
    """The head of a response whose body comes in plain chunks, or with a length."""

    status: int
    headers: Mapping[str, str]
    framing: _Framing
    size_bytes: int  # Size of the body by its Content-Length; 0: the body comes in chunks.
    keeps_open: bool


# Parsed heads by their bytes; an instance sends few different heads.
_KNOWN_HEADS: dict[bytes, _UsualHead] = {}
_MOST_KNOWN = 256
_MOST_KNOWN_BYTES = 512


def _know(head: bytes, usual: _UsualHead) -> None:
    if len(_KNOWN_HEADS) >= _MOST_KNOWN:
        _KNOWN_HEADS.clear()
    _KNOWN_HEADS[head] = usual


def _usual_head(message: RawResponseMessage) -> _UsualHead | None:
    """Return the message as a usual head; None: aiohttp's parser must read the body."""
    length = message.headers.get("Content-Length")
    if message.code < 200 or message.code in (204, 304):
        return None
    if message.chunked:
        framing, size_bytes = _Framing.CHUNKS, 0
    elif length is not None and _LENGTH.fullmatch(length):
        framing, size_bytes = _Framing.LENGTH, int(length)
    else:
        return None
    headers = _NO_HEADERS if message.code == 200 else message.headers
    return _UsualHead(message.code, headers, framing, size_bytes, not message.should_close)


@dataclass(slots=True, eq=False)
class HttpResponse:
    """An HTTP response, parsed as its bytes arrive. `status` is None until the head is complete;
    a few informational responses (1xx) are skipped. Bytes of the body before a `fault` are valid,
    wherever reads divide them; bytes after it are dropped.
    """

    loop: asyncio.AbstractEventLoop
    status: int | None = None
    # Headers of a response with another status than 200; else empty.
    headers: Mapping[str, str] = field(default_factory=dict)
    is_complete: bool = False
    fault: Fault | None = None
    keeps_open: bool = False  # The server leaves the connection open after the response.
    _framing: _Framing = _Framing.HEAD
    _head_bytes: int = 0  # Number of bytes of all heads so far.
    _informational: int = 0  # Number of informational responses so far.
    _left: int = 0  # Number of bytes still missing of the body, or of the current chunk.
    # All bytes of the current chunk have come, but not the end of its line.
    _is_closing: bool = False
    _rest: bytes = b""  # Last received bytes, if they may begin a chunk's head or line end.
    # aiohttp's parser; None: not needed, because the head is known or the framing usual.
    _parser: HttpResponseParser | None = None
    _payload: StreamReader | None = None

    @property
    def is_between_chunks(self) -> bool:
        """Return whether the next byte begins a chunk."""
        return (
            self._framing is _Framing.CHUNKS
            and not self._left
            and not self._rest
            and not self._is_closing
        )

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; return those of them that belong to the body, without framing."""
        if self._framing is _Framing.CHUNKS:
            # Fast path: the read is one whole chunk.
            is_begun = self._left or self._rest or self._is_closing
            if not is_begun and (match := _CHUNK.match(data)) is not None:
                start = match.end()
                end = start + int(match[1], 16)
                if start < end == len(data) - 2 and data.endswith(_END_OF_CHUNK):
                    return data[start:end]
            return self._feed_chunks(data)
        if self._framing is _Framing.LENGTH:
            return self._feed_length(data)
        if self._framing is _Framing.PARSER:
            return self._feed_parser(data)
        if self.fault is not None:
            return b""
        if self._parser is None:
            end = data.find(_END_OF_HEAD) + len(_END_OF_HEAD)
            if (usual := _KNOWN_HEADS.get(data[:end])) is not None:
                return self._begin_usual(usual, data[end:])
        return self._feed_head(data)

    def feed_eof(self) -> None:
        """Note that the server has ended the connection."""
        if self.is_complete or self.fault is not None:
            return
        self.keeps_open = False
        if self._framing is _Framing.PARSER:
            assert self._parser is not None
            try:
                self._parser.feed_eof()
            except HttpProcessingError:
                pass
            else:
                assert self._payload is not None
                self.is_complete = self._payload.is_eof()
        if not self.is_complete:
            self.fault = BrokenBody()

    def _feed_head(self, data: bytes) -> bytes:
        """Take bytes of the head. If the head ends at the usual place, the parser gets exactly the
        head, and no bytes of the body.
        """
        if is_first := self._parser is None:
            self._parser = _new_parser(self.loop)
        while data and self.fault is None:
            known = self._rest
            at = (known + data).find(_END_OF_HEAD)
            end = len(data) if at < 0 else at + len(_END_OF_HEAD) - len(known)
            if is_long := end > _MOST_HEAD_BYTES - self._head_bytes:
                at, end = -1, _MOST_HEAD_BYTES - self._head_bytes
            head, data = data[:end], data[end:]
            self._head_bytes += end
            self._rest = b"" if at >= 0 else (known + head)[1 - len(_END_OF_HEAD) :]
            message = self._parse_head(head)
            if message is not None:
                if message.code == _SWITCHING:
                    # The bytes behind the head are of another protocol, and may never end.
                    self._rest, self._framing, self.is_complete = b"", _Framing.PARSER, True
                    return b""
                usual = _usual_head(message) if at >= 0 else None
                if usual is None:
                    self._rest = b""
                    self._framing = _Framing.PARSER
                    return self._feed_parser(data)
                if is_first and len(head) <= _MOST_KNOWN_BYTES:
                    _know(head, usual)
                return self._begin_usual(usual, data)
            if is_long and self.fault is None:
                self.fault = NotHttp(f"heads of more than {_MOST_HEAD_BYTES} bytes")
            is_first = False
        return b""

    def _parse_head(self, head: bytes) -> RawResponseMessage | None:
        assert self._parser is not None
        try:
            messages, _, _ = self._parser.feed_data(head)
        except HttpProcessingError as error:
            # Keep only the first line of the message: the other lines quote received bytes.
            self.fault = NotHttp(error.message.partition("\n")[0])
            return None
        for message, payload in messages:
            if 100 <= message.code < 200 and message.code != _SWITCHING:
                self._informational += 1
                if self._informational > _MOST_INFORMATIONAL:
                    self.fault = NotHttp(f"more than {_MOST_INFORMATIONAL} responses 1xx")
                    return None
                continue
            self.status, self.headers = message.code, message.headers
            self._payload = payload
            return message
        return None

    def _begin_usual(self, head: "_UsualHead", data: bytes) -> bytes:
        self._rest = b""
        self.status, self.headers = head.status, head.headers
        self._framing, self._left = head.framing, head.size_bytes
        self.keeps_open = head.keeps_open
        self._parser = self._payload = None
        if head.framing is _Framing.LENGTH:
            return self._feed_length(data)
        return self._feed_chunks(data) if data else b""

    def _feed_length(self, data: bytes) -> bytes:
        if len(data) > self._left:
            # The server sent more than the response, so the connection cannot be used again.
            self.keeps_open = False
            data = data[: self._left]
        self._left -= len(data)
        self.is_complete = self._left == 0
        return data

    def _feed_chunks(self, data: bytes) -> bytes:
        if self._rest:
            data, self._rest = self._rest + data, b""
        pieces: list[bytes] = []
        at, size = 0, len(data)
        while at < size:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._is_closing = self._left == 0
            elif self._is_closing:
                if size - at < 2 and data.startswith(b"\r", at):
                    self._rest = data[at:]
                    break
                if not data.startswith(_END_OF_CHUNK, at):
                    self._fail()
                    break
                at += 2
                self._is_closing = False
            elif (match := _CHUNK.match(data, at)) is not None and (left := int(match[1], 16)):
                if left < _TINY_BYTES and (tiny := _TINY_CHUNKS.match(data, at)) is not None:
                    pieces += [each[3:-2] for each in _TINY_CHUNK.findall(data, at, tiny.end())]
                    at = tiny.end()
                else:
                    at, self._left = match.end(), left
            else:
                pieces.append(self._feed_unusual(data[at:]))
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _feed_unusual(self, data: bytes) -> bytes:
        """Handle data that begins no usual chunk: the last chunk, an incomplete chunk head, or a
        form that only the parser reads.
        """
        if data == _LAST_CHUNK:
            self.is_complete = True
            self._framing = _Framing.PARSER
            return b""
        if _BEGUN_CHUNK.fullmatch(data) or _LAST_CHUNK.startswith(data):
            self._rest = data
            return b""
        self.keeps_open = False
        self._framing = _Framing.PARSER
        # A new parser may go on here, because its state behind a head equals the state behind a
        # chunk.
        self._parser = _new_parser(self.loop)
        ((_, self._payload),), _, _ = self._parser.feed_data(_HEAD_OF_CHUNKS)
        return self._feed_parser(data)

    def _feed_parser(self, data: bytes) -> bytes:
        if self.is_complete or self.fault is not None:
            self.keeps_open = self.keeps_open and not data
            return b""
        payload, parser = self._payload, self._parser
        assert payload is not None
        assert parser is not None
        is_broken = False
        try:
            if data:
                parser.feed_data(data)
        except HttpProcessingError:
            is_broken = True
        body = b"" if payload is EMPTY_PAYLOAD else payload.read_nowait()
        self.is_complete = payload.is_eof()
        # Bytes behind the end of the body are ignored.
        if is_broken and not self.is_complete:
            self._fail()
        return body

    def _fail(self) -> None:
        self.fault = BrokenBody()
        self.keeps_open = False
        self._framing = _Framing.PARSER


def end_of_chunk(data: bytes) -> int:
    """Return the offset of the end of the chunk at the start of `data`; 0: the chunk is incomplete
    or unusual.
    """
    match = _CHUNK.match(data)
    size = 0 if match is None else int(match[1], 16)
    if match is None or not size:
        return 0
    end = match.end() + size + len(_END_OF_CHUNK)
    return end if end <= len(data) else 0


def _new_parser(loop: asyncio.AbstractEventLoop) -> HttpResponseParser:
    return HttpResponseParser(
        BaseProtocol(loop), loop, _UNLIMITED_BYTES, read_until_eof=True, auto_decompress=False
    )


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


_MAX_LINE_BYTES = 8 << 20


class Lines(AsyncIterator[bytes]):
    """Lines of one answer, read by one task as they arrive.

    Raises:
        UpstreamError: the connection has ended, or brought no lines.
    """

    shortcut = None

    def __init__(self, upstream: Upstream, path: str) -> None:
        self.flow: Upstream | None = None
        self._upstream = upstream
        self._path = path
        self._lines = deque[bytes]()
        self._rest = bytearray()  # Received part of a line that is not complete yet.
        self._ended: asyncio.Future[Need]
        self._news: asyncio.Future[None] | None = None

    def feed(self, data: bytes) -> Need:
        first, *others = data.split(b"\n")
        self._rest += first
        for line in others:
            self._check()
            self._lines.append(bytes(self._rest))
            self._rest[:] = line
        self._check()
        self._wake()
        return Need.MORE

    def _check(self) -> None:
        if len(self._rest) > _MAX_LINE_BYTES:
            raise UpstreamError("sent a report of more than 8 MiB")

    def until(self, ended: Awaitable[Need]) -> None:
        """Wait for the end of the call, and then end the iteration over its lines."""
        self._ended = cast("asyncio.Future[Need]", ended)
        self._ended.add_done_callback(self._wake)

    def _wake(self, ended: asyncio.Future[Need] | None = None) -> None:
        if ended is not None and not ended.cancelled():
            ended.exception()  # Mark the error as retrieved, so that asyncio does not log it.
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def __anext__(self) -> bytes:
        while not self._lines:
            if self._ended.done():
                self._ended.result()
                if self._upstream.status != 200:
                    raise UpstreamError(f"HTTP {self._upstream.status} for {self._path}")
                raise ConnectionLostError("connection closed")
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._lines.popleft()


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
