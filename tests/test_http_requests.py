"""Requests as they are read from the bytes of a connection, however those are cut."""

import asyncio
import re

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from kvrs.errors import RequestError
from kvrs.net import http_request
from kvrs.net.connections import ConnectionLimits
from kvrs.net.http_request import (
    MOST_HEAD_BYTES,
    MOST_URL_BYTES,
    OLD_CHUNKS,
    no_note,
    parse_usual,
)
from kvrs.net.routes import Request, Response, Routes
from kvrs.net.server import HttpConnection, HttpServer


def post(body: bytes = b"{}", **headers: str) -> bytes:
    fields = {"Host": "x", "Content-Length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = ["POST /a HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


# Pieces of which heads are made, right and wrong.
LINES = st.sampled_from(
    [
        *("Host: x", "host:y", "Content-Length: 2", "Content-Length: 02", "Content-Length:  2 "),
        *("Connection: close", "Connection: keep-alive", "Connection: Keep-Alive, x", "A:", "A: b"),
        *("Transfer-Encoding: chunked", "Expect: 100-continue", "Upgrade: h2c", "A : b", " A: b"),
        *("A: b\x00", "A: \xe9", "A: b\nB: c", "A: b\rB: c", "A\t: b", "A: b \t", ": b", "A"),
        *("Authorization: a b", "authorization: a", "Authorization: a\tb", "Authorization: \xe9"),
        *("Authorization: a ", "Authorization: ", "Authorization:  a", "authorization: a\nb"),
        *("Content-Encoding: gzip", "Content-Length: +2", "Content-Length: 2, 2", "A: \tb", "Ä: b"),
    ]
)
STARTS = st.sampled_from(
    [
        *("POST /a HTTP/1.1", "POST /a HTTP/1.0", "post /a HTTP/1.1", "POST  /a HTTP/1.1"),
        *("POST a HTTP/1.1", "POST /a HTTP/1.1 ", "POST http://x/a HTTP/1.1", "POST /a?b HTTP/1.1"),
        *("GET /a HTTP/1.1", "POST /\xe9 HTTP/1.1", "POST /a HTTP/11", "\r\nPOST /a HTTP/1.1"),
    ]
)


CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
TRAILER = b"0\r\nA: b\r\n\r\n"
BODIES = [
    *("{}", "", "2\r\n{}\r\n0\r\n\r\n", f"2;a=b\r\n{{}}\r\n{TRAILER.decode()}", "2\r\n{}"),
    *("0x2\r\n{}\r\n0\r\n\r\n", "2\r\n{}a\r\n0\r\n\r\n", "1\n{\r\n"),
]
REQUESTS = st.builds(
    lambda start, lines, body: "\r\n".join([start, *lines, "", body]).encode("latin-1"),
    st.one_of(st.just("POST /a HTTP/1.1"), STARTS),
    st.lists(st.one_of(st.just("Host: x"), LINES), max_size=4),
    st.sampled_from(BODIES),
)
Found = tuple[str, str, CIMultiDict[str], bytes]


class Written(asyncio.Transport):
    """The far end of a connection, which keeps what is written to it."""

    data = b""
    is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data += data

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False


async def served(*pieces: bytes) -> tuple[list[Found], bytes]:
    """The requests that a connection serves, and what it answers, but for the date."""
    found: list[Found] = []

    async def serve(request: Request, _: object) -> Response:
        try:
            body = await request.read()
        except RequestError as error:
            return Response(error.status)
        headers = CIMultiDict(request.headers)
        headers.popall("Content-Length", None)
        found.append((request.method, request.path, headers, body))
        return Response(body=body)

    limits = ConnectionLimits(4, 4)
    server = HttpServer(Routes(), serve, no_note, limits, idle_s=60, shutdown_timeout_s=1)
    connection, transport = HttpConnection(server), Written()
    connection.connection_made(transport)
    for piece in pieces:
        if not transport.is_closed:
            connection.data_received(piece)
        for _ in range(12):  # A turn of the event loop for each request that may have come.
            await asyncio.sleep(0)
    connection.connection_lost(None)
    server.new.end()
    server.kept.end()
    return found, re.sub(rb"Date: [^\r]*", b"", transport.data)


def parsed(data: bytes) -> list[Found] | None:
    """The whole requests that aiohttp's parser finds, up to the last of the connection; None: it
    refuses one.
    """
    loop = asyncio.get_running_loop()
    parser = HttpRequestParser(BaseProtocol(loop), loop, 1 << 16, auto_decompress=False)
    found: list[Found] = []
    try:
        messages, _, _ = parser.feed_data(data)
        for message, payload in messages:
            if payload.exception() is not None:
                return None
            if not payload.is_eof():
                break
            headers = CIMultiDict(message.headers)
            headers.popall("Content-Length", None)
            body = payload.read_nowait() if payload.total_bytes else b""
            found.append((message.method, message.url.path, headers, body))
            if message.should_close:
                break
    except HttpProcessingError:
        return None
    return found


@given(st.lists(REQUESTS, min_size=1, max_size=3).map(b"".join), st.just(17))
@example(post() + CHUNKED + b"2\r\n{}\r\n" + TRAILER + post(b"", A="b") + CHUNKED, 1)
@example(
    b"GET /a?b=1 HTTP/1.1\r\nHost: x\r\n\r\n" + post(A="\xe9") + b"HEAD /a HTTP/1.0\r\n\r\n", 1
)
@settings(deadline=None)
def test_requests_and_answers_are_the_same_wherever_the_bytes_are_cut(
    data: bytes, step: int
) -> None:
    """And they are those that the full parser finds: two readings of one request are how one is
    smuggled into another.
    """

    async def read() -> None:
        requests, answers = await served(data)

        for cut in range(1, len(data), step):
            assert await served(data[:cut], data[cut:]) == (requests, answers), cut
        assert await served(*(bytes([each]) for each in data)) == (requests, answers)
        if (full := parsed(data)) is None:
            assert b" 40" in answers or b"Connection: close" in answers or not answers
        elif not any(each in answers for each in (b" 417 ", OLD_CHUNKS.message.encode())):
            # That parser gives a field behind the last chunk to the next request.
            assert requests == full or TRAILER in data

    asyncio.run(read())


@pytest.mark.parametrize("excess", [-1, 0, 1, 1000])
@pytest.mark.parametrize("kind", ["chunk", "trailer", "blanks", "url", "headers"])
async def test_a_limit_does_not_depend_on_where_the_bytes_are_cut(kind: str, excess: int) -> None:
    """A limit that only an incomplete line had was one of the network's mood."""
    size = 4096 + excess
    match kind:
        case "chunk":
            data = CHUNKED + b"2;".ljust(size, b"a") + b"\r\n{}\r\n0\r\n\r\n"
        case "trailer":
            data = CHUNKED + b"2\r\n{}\r\n0\r\n" + b"A:".ljust(size, b"b") + b"\r\n\r\n"
        case "url":
            url = b"/".ljust(MOST_URL_BYTES + excess, b"a")
            data = CHUNKED.replace(b"/a", url) + b"2\r\n{}\r\n0\r\n\r\n"
        case "headers":
            more = MOST_HEAD_BYTES + excess - len(CHUNKED.partition(b"\r\n")[2])
            data = CHUNKED[:-2] + b"A: ".ljust(more, b"b") + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
        case _:
            # Blanks around a value are no part of any field.
            more = MOST_URL_BYTES + MOST_HEAD_BYTES + excess - len(CHUNKED) - 2
            data = CHUNKED[:-2] + b"A:".ljust(more, b" ") + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n"

    requests, answers = await served(data)
    divided = [
        await served(*(data[at : at + step] for at in range(0, len(data), step)))
        for step in (100, 1000, 4096, len(data) - 10)
    ]

    assert divided == [(requests, answers)] * 4
    assert len(requests) == (excess <= 0)


@pytest.mark.parametrize(
    "line",
    [
        *("Transfer-Encoding: chunked", "Content-Encoding: gzip", "Expect: 100-continue"),
        *("Upgrade: h2c", "Connection: upgrade", "Content-Length: 3", "Host: y", " folded"),
        *("Idempotency-Key: a\tb", "Authorization: Bearer a\0b", "A: b\x7f", "A: b\x0b "),
        "Connection: keep-alive\r\nConnection: close",
    ],
)
def test_a_line_of_another_kind_of_request_is_for_the_full_parser(line: str) -> None:
    """Each by itself, in a head that is usual but for it."""
    usual = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"

    assert parse_usual(usual) is not None
    assert parse_usual(usual.replace(b"\r\n\r\n", f"\r\n{line}\r\n\r\n".encode())) is None


@given(st.binary(max_size=200))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    """Bytes that are no usual request are for the parser."""
    found = parse_usual(data)

    assert found is None or data.startswith(b"POST ")


def test_a_head_is_known_again_whatever_the_length_of_its_body() -> None:
    """Nothing else of it may differ."""
    heads = [parse_usual(post(b"{}" * count, A="b")) for count in (1, 100)]
    another = parse_usual(post(b"{}", A="c"))

    assert heads[0] is not None
    assert heads[1] is not None
    assert another is not None
    assert heads[0][0] is heads[1][0]
    assert [body_bytes for _, _, body_bytes in (heads[0], heads[1], another)] == [2, 200, 2]
    assert [head.headers["A"] for head, _, _ in (heads[0], another)] == ["b", "c"]


def test_a_head_with_two_lengths_is_none_that_is_known() -> None:
    """Servers that take the one or the other would read different requests."""
    usual, line = post(b"{}", A="b"), b"Content-Length: 2\r\n"

    assert parse_usual(usual) is not None
    for another in (line, b"Content-Length: \r\n", b"content-length:3\r\n"):
        for after in (b"HTTP/1.1\r\n", b"Host: x\r\n", line, b"A: b\r\n"):
            assert parse_usual(usual.replace(after, after + another)) is None


def test_heads_of_many_clients_take_no_more_memory_than_their_bound() -> None:
    """And one that names its request, which comes but once, takes none."""
    for number in range(1000):
        assert parse_usual(post(b"{}", A=str(number))) is not None
    assert parse_usual(post(b"{}", A="x" * 4096)) is not None
    assert parse_usual(post(b"{}", X_Request_ID="x")) is not None

    assert 0 < len(http_request._KNOWN_HEADS) <= 256
    assert max(map(len, http_request._KNOWN_HEADS)) <= 2048
    assert not any(b"X-Request-ID" in each for each in http_request._KNOWN_HEADS)


@pytest.mark.parametrize(
    "lines", ["Host: x\r\n y\r\nContent-Length: 2", "Host: x\r\nContent-Length: 2\x0b3"]
)
def test_what_the_full_parser_refuses_is_not_taken(lines: str) -> None:
    """Obsolete line folding, and a length that goes on behind a control character."""
    data = f"POST /a HTTP/1.1\r\n{lines}\r\n\r\n{{}}".encode()
    loop = asyncio.new_event_loop()
    with pytest.raises(HttpProcessingError):
        HttpRequestParser(BaseProtocol(loop), loop, 1 << 16).feed_data(data)
    loop.close()

    assert parse_usual(data) is None


async def test_a_body_in_another_coding_is_refused() -> None:
    """It would be read as if it were not coded."""
    coded = CHUNKED.replace(b": chunked", b": gzip, chunked")

    found, answers = await served(coded + b"1\r\nx\r\n0\r\n\r\n")

    assert found == []
    assert answers.startswith(b"HTTP/1.1 501 ")
