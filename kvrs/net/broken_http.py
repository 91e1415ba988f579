"""Requests that the HTTP server refuses before any handler sees them: broken HTTP, and heads beyond
the limits.

An answer says what is wrong in words of its own. The errors of aiohttp's parser quote the bytes
that they found, which may be of a prompt or a key.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from aiohttp.http_exceptions import (
    BadStatusLine,
    HttpProcessingError,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
)

# Of all headers together: names, values, and four bytes for each line. 32 kB are for those of the
# client and of gateways (tokens, cookies), the rest is for what every request has.
MOST_HEAD_BYTES = 33 << 10
MOST_HEADERS = 128
MOST_URL_BYTES = 8190

# Notes a request with this status and these headers, which are none where they are not known;
# returns headers for its answer.
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
OLD_CHUNKS = HttpRefusal(400, "HTTP/1.0 has no Transfer-Encoding")
BAD_LINE = HttpRefusal(400, "the first line is not that of an HTTP request")
_BAD_URL = HttpRefusal(400, "the URL is not valid")
_BAD_HEADER = HttpRefusal(400, "a header is not valid HTTP")
BAD_REQUEST = HttpRefusal(400, "the request is not valid HTTP")


def no_note(status: int, headers: Mapping[str, str]) -> Mapping[str, str]:
    return {}


def refusal_of(error: HttpProcessingError) -> HttpRefusal:
    """The refusal of what aiohttp's parser could not read."""
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


def are_too_large(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """The headers of a request, as they came, have more bytes than are allowed in all."""
    return sum(len(name) + len(value) + 4 for name, value in headers) > MOST_HEAD_BYTES
