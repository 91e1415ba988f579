"""Parser of an HTTP/1.1 response from the bytes of its connection. No I/O.

aiohttp's parser parses the head. The body of a usual response, in plain chunks or with a length, is
found by offset; the parser takes every other body.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpResponseParser, RawResponseMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

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
