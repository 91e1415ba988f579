"""One HTTP/1.1 response, read from the bytes of its connection as they come. No I/O.

The head is parsed by aiohttp's parser. The body of a usual response, in plain chunks or of a given
length, is found by offset; every other body is left to the same parser, to its end.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpResponseParser, RawResponseMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

_END_OF_HEAD = b"\r\n\r\n"
_END_OF_CHUNK = b"\r\n"
_HEAD_OF_CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_CHUNK = re.compile(rb"([0-9a-fA-F]{1,7})\r\n")
_BEGUN_CHUNK = re.compile(rb"[0-9a-fA-F]{0,7}\r?")
_LENGTH = re.compile(r"[0-9]{1,15}")
# The parser's buffer is emptied after every read, so that its limit is never reached.
_UNLIMITED_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class NotHttp:
    """The head is malformed, or exceeds the parser's limits."""

    cause: str


@dataclass(frozen=True, slots=True)
class BrokenBody:
    """The body is malformed, or its connection has ended within it."""


Fault = NotHttp | BrokenBody


class _Framing(Enum):
    HEAD = "head"
    CHUNKS = "chunks"
    LENGTH = "length"
    PARSER = "parser"  # The parser takes the body.


class HttpResponse:
    """`status` is None until the head is complete; informational responses (1xx) are skipped. What
    comes before a `fault` counts, wherever the bytes were cut; nothing counts after it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.status: int | None = None
        self.headers: Mapping[str, str] = {}
        self.is_complete = False
        self.fault: Fault | None = None
        self._keeps_open = False
        self._framing = _Framing.HEAD
        self._left = 0  # Bytes of the body, or of the current chunk, that are still to come.
        self._is_closing = False  # A chunk's bytes have come, the end of its line has not.
        self._rest = b""  # The last bytes, if they may be the beginning of a mark.
        self._loop = loop
        # None: the framing is a usual one, and needs none of its state.
        self._parser: HttpResponseParser | None = _new_parser(loop)
        self._payload: StreamReader | None = None

    @property
    def allows_reuse(self) -> bool:
        """Whether the connection is at the end of a usual response, and stays open."""
        return self.is_complete and self._keeps_open

    @property
    def is_between_chunks(self) -> bool:
        """Whether the next byte is the first one of a chunk."""
        return (
            self._framing is _Framing.CHUNKS
            and not self._left
            and not self._rest
            and not self._is_closing
        )

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body in `data`."""
        if self._framing is _Framing.CHUNKS:
            # The usual read: one chunk, and all of it.
            if self.is_between_chunks and (match := _CHUNK.match(data)) is not None:
                start = match.end()
                end = start + int(match[1], 16)
                if start < end == len(data) - 2 and data.endswith(_END_OF_CHUNK):
                    return data[start:end]
            return self._feed_chunks(data)
        if self._framing is _Framing.LENGTH:
            return self._feed_length(data)
        if self._framing is _Framing.PARSER:
            return self._feed_parser(data)
        return self._feed_head(data) if self.fault is None else b""

    def feed_eof(self) -> None:
        """The connection has ended."""
        if self.is_complete or self.fault is not None:
            return
        self._keeps_open = False
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

    # The head.

    def _feed_head(self, data: bytes) -> bytes:
        """The parser gets the head to its last byte and nothing else, if its end is where it
        usually is.
        """
        while data and self.fault is None:
            known = self._rest
            at = (known + data).find(_END_OF_HEAD)
            end = len(data) if at < 0 else at + len(_END_OF_HEAD) - len(known)
            head, data = data[:end], data[end:]
            self._rest = b"" if at >= 0 else (known + head)[1 - len(_END_OF_HEAD) :]
            message = self._parse_head(head)
            if message is not None:
                return self._begin_body(message, data, is_exact=at >= 0)
        return b""

    def _parse_head(self, head: bytes) -> RawResponseMessage | None:
        assert self._parser is not None
        try:
            messages, _, _ = self._parser.feed_data(head)
        except HttpProcessingError as error:
            # Its other lines quote the bytes of this read.
            self.fault = NotHttp(error.message.partition("\n")[0])
            return None
        for message, payload in messages:
            if 100 <= message.code < 200 and message.code != 101:
                continue
            self.status, self.headers = message.code, message.headers
            self._payload = payload
            return message
        return None

    def _begin_body(self, message: RawResponseMessage, data: bytes, *, is_exact: bool) -> bytes:
        self._rest = b""
        length = message.headers.get("Content-Length")
        has_body = message.code >= 200 and message.code not in (204, 304)
        if not is_exact or not has_body:
            self._framing = _Framing.PARSER
        elif message.chunked:
            self._framing = _Framing.CHUNKS
        elif length is not None and _LENGTH.fullmatch(length):
            self._framing, self._left = _Framing.LENGTH, int(length)
        else:
            self._framing = _Framing.PARSER
        self._keeps_open = self._framing is not _Framing.PARSER and not message.should_close
        if self._framing is not _Framing.PARSER:
            self._parser = self._payload = None
        if self._framing is _Framing.LENGTH:
            return self._feed_length(data)
        if self._framing is _Framing.CHUNKS:
            return self._feed_chunks(data) if data else b""
        return self._feed_parser(data)

    # The body.

    def _feed_length(self, data: bytes) -> bytes:
        if len(data) > self._left:
            self._keeps_open = False  # More than was asked for.
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
            elif (match := _CHUNK.match(data, at)) is not None and int(match[1], 16):
                at, self._left = match.end(), int(match[1], 16)
            else:
                pieces.append(self._feed_unusual(data[at:]))
                break
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _feed_unusual(self, data: bytes) -> bytes:
        """At the beginning of what is no usual chunk: the end, a part of a mark, or the parser's
        affair.
        """
        if data == _LAST_CHUNK:
            self.is_complete = True
            self._framing = _Framing.PARSER
            return b""
        if _BEGUN_CHUNK.fullmatch(data) or _LAST_CHUNK.startswith(data):
            self._rest = data
            return b""
        self._keeps_open = False
        self._framing = _Framing.PARSER
        # A new parser at the same place: behind a head, or behind a chunk, which is the same.
        self._parser = _new_parser(self._loop)
        ((_, self._payload),), _, _ = self._parser.feed_data(_HEAD_OF_CHUNKS)
        return self._feed_parser(data)

    def _feed_parser(self, data: bytes) -> bytes:
        if self.is_complete or self.fault is not None:
            self._keeps_open = self._keeps_open and not data
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
        # After the last byte of the body, what follows does not count.
        if is_broken and not self.is_complete:
            self._fail()
        return body

    def _fail(self) -> None:
        self.fault = BrokenBody()
        self._keeps_open = False
        self._framing = _Framing.PARSER


def _new_parser(loop: asyncio.AbstractEventLoop) -> HttpResponseParser:
    return HttpResponseParser(
        BaseProtocol(loop), loop, _UNLIMITED_BYTES, read_until_eof=True, auto_decompress=False
    )
