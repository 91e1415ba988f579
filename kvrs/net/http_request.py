"""Parser of an HTTP/1 request from the bytes of its connection. No I/O.

A usual head (POST, HTTP/1.1, Content-Length) is looked up by its bytes. aiohttp's parser parses
every other head, up to the head's end, so all bodies are found here, by their length or their
chunks.

Refusals have messages of their own, because errors of aiohttp's parser quote the bytes, which may
belong to a prompt or a key.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import (
    BadStatusLine,
    HttpProcessingError,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
)
from aiohttp.http_parser import HttpRequestParser, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

# Most bytes of all headers: names, values, and four bytes per line; more are refused with 431. 32
# kB are for headers of clients and gateways (tokens, cookies), the rest for headers that every
# request has.
MOST_HEAD_BYTES = 33 << 10
MOST_HEADERS = 128
MOST_URL_BYTES = 8190

# Callback that notes a refused request by its status and headers (empty if they could not be read),
# and returns headers for the answer.
NoteRefusal = Callable[[int, Mapping[str, str]], Mapping[str, str]]


class HttpRefusal(NamedTuple):
    status: int
    message: str


TOO_LARGE = HttpRefusal(
    431,
    f"the headers are too large; allowed: {MOST_HEADERS}, of {MOST_HEAD_BYTES} bytes in all",
)
BROKEN_BODY = HttpRefusal(400, "the body is not valid HTTP: a chunk of it is malformed")
BAD_EXPECT = HttpRefusal(417, "this Expect is not supported; allowed: '100-continue'")
_URL_TOO_LONG = HttpRefusal(414, f"the URL is too long; allowed: {MOST_URL_BYTES} bytes")
BAD_CODING = HttpRefusal(501, "this Transfer-Encoding is not supported; allowed: 'chunked'")
OLD_CHUNKS = HttpRefusal(400, "HTTP/1.0 has no Transfer-Encoding")
BAD_LINE = HttpRefusal(400, "the first line is not that of an HTTP request")
_BAD_URL = HttpRefusal(400, "the URL is not valid")
_BAD_HEADER = HttpRefusal(400, "a header is not valid HTTP")
BAD_REQUEST = HttpRefusal(400, "the request is not valid HTTP")

_END_OF_HEAD = b"\r\n\r\n"
# Request line of a usual head. A path with a query or an escape does not match, and is left to
# aiohttp's parser.
_REQUEST_LINE = re.compile(r"POST (/[!\"$&->@-~]*) HTTP/1\.1(?=\r\n)")
# Header line of a usual head: name and value, without the blanks around the value. A value with
# control or non-ASCII characters does not match, and its head is left to aiohttp's parser.
_FIELD = re.compile(
    r"\r\n([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*+([!-~]*+(?: ++[!-~]++)*+) *+(?=\r\n|\Z)"
)
_LENGTH_LINE = re.compile(rb"\r\n(?i:Content-Length):[ \t]*([0-9]{1,9}) *\r\n")
_LENGTH = re.compile(r"[0-9]{1,15}", re.ASCII)
_UNUSUAL = ("Transfer-Encoding", "Content-Encoding", "Expect", "Upgrade")
IN_CHUNKS: Final = -1  # Length that stands for a body in chunks.
NO_HEADERS = CIMultiDictProxy(CIMultiDict[str]())
_NO_QUERY: Mapping[str, str] = {}

_CHUNK = re.compile(rb"([0-9a-fA-F]{1,15})(?:;[\t -~\x80-\xff]*)?")
_USUAL_CHUNK = re.compile(rb"([0-9a-fA-F]{1,7})\r\n")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t -~\x80-\xff]*")
# Most bytes of a line before a chunk, or after the last chunk; a longer line breaks the body.
_MOST_LINE_BYTES = 4096
# Smaller pieces of a body are joined up to this number of bytes.
_PART_BYTES = 16 << 10


def no_note(status: int, headers: Mapping[str, str]) -> Mapping[str, str]:
    return {}


class Head(msgspec.Struct, frozen=True):
    """A request's head, without the length of its body."""

    method: str
    path: str
    headers: CIMultiDictProxy[str]
    keep_alive: bool
    query: Mapping[str, str] = _NO_QUERY
    minor_version: int = 1  # Minor version of HTTP/1: 0 or 1.
    expects: bool = False  # The client waits for 100 Continue before it sends its body.


class BrokenRequestError(Exception):
    """A request is not HTTP, or has a form that is not served. `headers` are the request's, or
    empty if they could not be read; `cause` is for the log.
    """

    def __init__(
        self,
        refusal: HttpRefusal,
        headers: Mapping[str, str] = NO_HEADERS,
        cause: str = "beyond the limits",
    ) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal
        self.headers = headers
        self.cause = cause


# Cache of parsed usual heads, by their bytes without the digits of Content-Length: clients send few
# different heads. Heads with an id of the request are not kept.
_KNOWN_HEADS: dict[bytes, Head] = {}
_MOST_KNOWN = 256
_MOST_KNOWN_BYTES = 2048
_OF_ONE_REQUEST = ("X-Request-Id", "traceparent", "Idempotency-Key")


def parse_usual(data: bytes) -> tuple[Head, int, int] | None:
    """Parse a usual head at the start of `data`; return it with its length and that of the body.
    None: the head is not a usual one, or incomplete.
    """
    end = data.find(_END_OF_HEAD, 0, MOST_HEAD_BYTES)
    if end < 0 or (length := _LENGTH_LINE.search(data, 0, end + 2)) is None:
        return None
    known_by = data[: length.start(1)] + data[length.end(1) : end]
    head = _KNOWN_HEADS.get(known_by)
    if head is None:
        if (head := _read_usual(data[:end])) is None:
            return None
        is_of_one = any(map(head.headers.__contains__, _OF_ONE_REQUEST))
        if end <= _MOST_KNOWN_BYTES and not is_of_one:
            if len(_KNOWN_HEADS) >= _MOST_KNOWN:
                _KNOWN_HEADS.clear()
            _KNOWN_HEADS[known_by] = head
    return head, end + 4, int(length[1])


def _read_usual(data: bytes) -> Head | None:
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        return None
    if (line := _REQUEST_LINE.match(text)) is None:
        return None
    fields = _FIELD.findall(text, line.end())
    # A line that is no usual header, or a bare CR or LF, leaves the head to aiohttp's parser.
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
    return Head("POST", line[1], CIMultiDictProxy(headers), connection == "keep-alive")


class HeadReader:
    """Reads a head that is not usual or did not arrive at once, by aiohttp's parser."""

    __slots__ = ("_last", "_parser", "_size_bytes")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._parser = HttpRequestParser(
            BaseProtocol(loop),
            loop,
            _PART_BYTES,
            max_line_size=MOST_URL_BYTES,
            max_field_size=MOST_HEAD_BYTES,
            max_headers=MOST_HEADERS,
            auto_decompress=False,
        )
        self._last = b""  # Last three bytes so far, which may be the beginning of the head's end.
        self._size_bytes = 0

    def feed(self, data: bytes) -> tuple[Head, int, int] | None:
        """Take the next bytes. Once the head is complete, return it with the number of bytes of
        `data` that belong to it and the length of its body or `IN_CHUNKS`; None: it is incomplete.

        Raises:
            BrokenRequestError: the head is not HTTP, or not served.
        """
        at = 0
        while at < len(data):
            found = (self._last + data[at : at + 3]).find(_END_OF_HEAD)
            if found < 0:
                found = data.find(_END_OF_HEAD, at)
                end = len(data) if found < 0 else found + 4
            else:
                end = at + found + 4 - len(self._last)
            # The parser gets no byte behind the limit, wherever reads divide the head.
            most = at + MOST_URL_BYTES + MOST_HEAD_BYTES - self._size_bytes
            if is_long := end > most:
                found, end = -1, most
            piece = data[at:end]
            self._size_bytes += len(piece)
            self._last = b"" if found >= 0 else (self._last + piece)[-3:]
            if is_long:  # End the head there, for the headers before the limit.
                piece += _END_OF_HEAD
            try:
                messages, _, _ = self._parser.feed_data(piece)
            except HttpProcessingError as error:
                refusal = _refusal_of(error)
                raise BrokenRequestError(refusal, cause=type(error).__name__) from None
            if is_long:
                headers = messages[0][0].headers if messages else NO_HEADERS
                raise BrokenRequestError(TOO_LARGE, headers)
            if messages:
                # The parser got only the head's bytes: if it sees a body or a second request in
                # them, it reads the head in another way.
                if found < 0 or len(messages) > 1 or messages[0][1].total_bytes:
                    raise BrokenRequestError(BAD_REQUEST)
                head, length = _read(messages[0][0])
                return head, end, length
            at = end
        return None


def _refusal_of(error: HttpProcessingError) -> HttpRefusal:
    """Return the answer to a head that aiohttp's parser could not read."""
    match error:
        case LineTooLong():
            return _URL_TOO_LONG if error.args[1] == MOST_URL_BYTES else TOO_LARGE
        case BadStatusLine():
            return BAD_LINE
        case InvalidURLError():
            return _BAD_URL
        case InvalidHeader():
            return _BAD_HEADER
        case _ if error.message.startswith("Too many headers"):
            return TOO_LARGE
        case _:
            return BAD_REQUEST


def _read(message: RawRequestMessage) -> tuple[Head, int]:
    """Return the head of a parsed message, and the length of its body or `IN_CHUNKS`. Raises
    BrokenRequestError: the request is not served.
    """
    headers, minor_version = message.headers, message.version.minor
    if message.version.major != 1 or minor_version > 1:
        raise BrokenRequestError(BAD_LINE, headers)
    if sum(len(name) + len(value) + 4 for name, value in message.raw_headers) > MOST_HEAD_BYTES:
        raise BrokenRequestError(TOO_LARGE, headers)
    if not minor_version and "Transfer-Encoding" in headers:
        # Servers differ on where such a body of HTTP/1.0 ends: another request could be smuggled in
        # it.
        raise BrokenRequestError(OLD_CHUNKS, headers)
    if headers.get("Transfer-Encoding", "chunked").lower() != "chunked":
        raise BrokenRequestError(BAD_CODING, headers)
    expect = headers.get("Expect", "") if minor_version else ""
    if expect.lower() not in ("", "100-continue"):
        raise BrokenRequestError(BAD_EXPECT, headers)
    length = IN_CHUNKS
    if not message.chunked:
        given = headers.get("Content-Length", "0")
        if _LENGTH.fullmatch(given) is None:
            raise BrokenRequestError(BAD_REQUEST, headers)
        length = int(given)
    url = message.url
    keep_alive, expects = not message.should_close, bool(expect)
    path, method = url.path, message.method
    return Head(method, path, headers, keep_alive, url.query, minor_version, expects), length


class Body:
    """The received part of a request's body. It is kept in pieces, because a single growing buffer
    would be moved again and again, and would fragment memory.

    `changed` is called when a part of the body, or its end, has arrived.
    """

    __slots__ = (
        *("_in_trailers", "_is_behind_chunk", "_left", "_line", "_parts", "_small"),
        *("_trailers_bytes", "changed", "is_broken", "is_whole", "received_bytes"),
    )

    def __init__(self, length: int) -> None:
        self.changed: Callable[[], None] | None = None
        self.is_whole = length == 0
        self.is_broken = False
        self.received_bytes = 0
        # Number of bytes of the body, or of the present chunk, that are missing.
        self._left = max(length, 0)
        # Received part of a line between chunks; None: the body has no chunks.
        self._line: bytes | None = b"" if length == IN_CHUNKS else None
        self._is_behind_chunk = self._in_trailers = False
        self._trailers_bytes = 0
        self._parts: list[bytes] = []
        self._small = bytearray()

    @property
    def is_over(self) -> bool:
        return self.is_whole or self.is_broken

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; return those behind the body's end. A broken body takes all
        bytes.
        """
        if self._line is not None:
            at = self._feed_chunks(self._line + data if self._line else data)
            return b"" if self.is_broken else data[len(data) - at :] if at else b""
        self._add(data[: self._left])
        rest = data[self._left :]
        self._left = max(0, self._left - len(data))
        self.is_whole = not self._left
        return rest

    def take(self) -> bytes:
        """Return the body, and free the memory that it has here."""
        parts, self._parts = self._parts, []
        return b"".join((*parts, self._small))

    def drop(self) -> None:
        """Free the received part of the body without using it."""
        self._parts, self._small = [], bytearray()

    def _add(self, piece: bytes) -> None:
        self.received_bytes += len(piece)
        if len(piece) < _PART_BYTES:
            self._small += piece
            if len(self._small) < _PART_BYTES:
                return
            piece = b""
        if self._small:
            self._parts.append(bytes(self._small))
            self._small = bytearray()
        if piece:
            self._parts.append(piece)

    def _feed_chunks(self, data: bytes) -> int:
        """Take bytes of a body in chunks; return the number of bytes behind the body's end."""
        at, self._line = 0, b""
        while not self.is_over:
            if self._left:
                piece = data[at : at + self._left]
                self._add(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._is_behind_chunk = True
            elif not self._is_behind_chunk and not self._in_trailers:
                at = self._feed_whole_chunks(data, at)
            if (end := data.find(b"\r\n", at)) < 0:
                self._line = data[at:]
                # The last byte may be the CR of the line's end.
                self.is_broken = len(self._line) > _MOST_LINE_BYTES + 1
                break
            self.is_broken = end - at > _MOST_LINE_BYTES
            if self.is_broken:
                break
            self._take_line(data[at:end])
            at = end + 2
        return len(data) - at if self.is_over else 0

    def _feed_whole_chunks(self, data: bytes, at: int) -> int:
        """Take all complete chunks without extensions from offset `at` on; return the offset behind
        the last one.
        """
        pieces = []
        while (match := _USUAL_CHUNK.match(data, at)) is not None:
            end = (start := match.end()) + int(match[1], 16)
            if start == end or data[end : end + 2] != b"\r\n":
                break
            pieces.append(data[start:end])
            at = end + 2
        self._add(b"".join(pieces))
        return at

    def _take_line(self, line: bytes) -> None:
        """Take a complete line between chunks: a chunk's size, the end of a chunk, or a trailer."""
        if self._is_behind_chunk:
            self._is_behind_chunk, self.is_broken = False, bool(line)
        elif self._in_trailers:
            self.is_whole = not line
            self._trailers_bytes += len(line)
            is_field = not line or _TRAILER.fullmatch(line) is not None
            self.is_broken = not is_field or self._trailers_bytes > MOST_HEAD_BYTES
        elif (match := _CHUNK.fullmatch(line)) is None:
            self.is_broken = True
        else:
            self._left = int(match[1], 16)
            self._in_trailers = not self._left
