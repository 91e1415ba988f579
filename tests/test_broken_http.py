"""Heads up to their limits, and what clients are told beyond those and of broken HTTP."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from kvrs.errors import RequestError
from kvrs.net import server
from kvrs.net.connections import ConnectionLimits
from kvrs.net.http_request import MOST_HEAD_BYTES, MOST_HEADERS, HttpRefusal, no_note, parse_usual
from kvrs.net.routes import Handler, Request, Response, Routes, refused
from kvrs.net.server import HttpServer

pytestmark = pytest.mark.network

HEAD = b"POST /read HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
SECRET = b"sesame"
ANOTHER = b"GET /read HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def opened() -> AsyncIterator[int]:
    async def read(request: Request) -> Response:
        return Response(body=b"read", headers={"X-Length": str(len(await request.read()))})

    async def serve(request: Request, handler: Handler) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            return refused(HttpRefusal(error.status, str(error)), {})

    routes, limits = Routes(), ConnectionLimits(16, 16)
    routes.add("POST", "/read", read)
    listening = HttpServer(routes, serve, no_note, limits, idle_s=20, shutdown_timeout_s=0.3)
    yield await listening.open("127.0.0.1", 0)
    await listening.close()


async def exchange(port: int, *pieces: bytes) -> bytes:
    """Everything that the server answers to pieces that reach it one by one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


def post(path: str, headers: Sequence[tuple[str, str]]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Length: 2", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers]
    return ("\r\n".join(lines) + "\r\n\r\n{}").encode()


LARGE_HEADS: dict[str, list[tuple[str, str]]] = {
    "a token of 32 kB": [("Authorization", "Bearer " + "x" * 32_000)],
    "two cookies of 16 kB": [("Cookie", "y" * 16_000), ("X-Cookie", "z" * 16_000)],
    "100 headers": [(f"X-{number}", "v") for number in range(100)],
}


@pytest.mark.parametrize("headers", LARGE_HEADS.values(), ids=LARGE_HEADS)
async def test_heads_of_32_kb_and_of_100_headers_are_taken(headers: list[tuple[str, str]]) -> None:
    """Tokens of many groups have more than 8 kB. Also those that come in two reads."""
    request = post("/read", headers)

    async with opened() as port:
        answers = [await exchange(port, request), await exchange(port, request[:99], request[99:])]

    assert parse_usual(request) is not None
    assert [each.rpartition(b"\r\n\r\n")[2] for each in answers] == [b"read", b"read"]


LONG, COUNT = SECRET.ljust(MOST_HEAD_BYTES + 1, b"x"), MOST_HEADERS + 1
MANY = [b"X-%d: %s\r\n" % (number, SECRET.ljust(3000, b"x")) for number in range(20)]
REFUSED: dict[str, tuple[int, list[bytes]]] = {
    "a long header": (431, [HEAD + b"A: " + LONG + b"\r\n\r\n"]),
    "a long header that drips": (431, [HEAD + b"A: ", *[SECRET * 2000] * 4]),
    "a long name": (431, [HEAD + LONG + b": a\r\n\r\n"]),
    "headers that are long together": (431, [HEAD + b"".join(MANY) + b"\r\n"]),
    "headers that are long together and drip": (431, [HEAD, *MANY]),
    "a long head behind a request": (431, [post("/read", []).replace(b"close", b"x"), HEAD, *MANY]),
    "many headers": (431, [HEAD + b"".join(b"X: sesame\r\n" for _ in range(COUNT)) + b"\r\n"]),
    "a long URL": (414, [b"POST /" + SECRET * 2000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"]),
    "no HTTP": (400, [SECRET + b"\r\n\r\n"]),
    "TLS": (400, [b"\x16\x03\x01" + SECRET + b"\r\n\r\n"]),
    "another method": (400, [b"SESAME sesame HTTP/1.1\r\nHost: x\r\n\r\n"]),
    "another version": (400, [b"POST /sesame HTTP/7.5\r\nHost: sesame\r\n\r\n"]),
    "a URL that is none": (400, [b"POST sesame HTTP/1.1\r\nHost: x\r\n\r\n"]),
    "no host": (400, [b"POST /read HTTP/1.1\r\nX-A: sesame\r\n\r\n"]),
    "two hosts": (400, [HEAD + b"Host: sesame\r\n\r\n"]),
    "a header without a colon": (400, [HEAD + SECRET + b"\r\n\r\n"]),
    "a zero byte": (400, [HEAD + b"Authorization: sesame\0\r\n\r\n"]),
    "a length that is none": (400, [HEAD + b"Content-Length: sesame\r\n\r\n"]),
    "two lengths": (400, [HEAD + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nsesame"]),
    "a chunk that is none": (400, [CHUNKED + b"sesame\r\nab\r\n"]),
    "a further chunk that is none": (400, [CHUNKED + b"2\r\nab\r\n", b"sesame\r\n{}\r\n0\r\n\r\n"]),
    "a chunk of another size": (400, [CHUNKED + b"2\r\n", b"sesame\r\n0\r\n\r\n"]),
    "HTTP/1.0 with chunks": (400, [CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n"]),
    "an encoding of the transfer": (400, [HEAD + b"Transfer-Encoding: sesame\r\n\r\n"]),
}


@pytest.mark.parametrize(("status", "pieces"), REFUSED.values(), ids=REFUSED)
async def test_what_is_refused_gets_an_error_in_the_form_of_openai_without_its_bytes(
    status: int, pieces: list[bytes]
) -> None:
    """They may be of a key, and the client may show the answer to anybody. Nothing behind them is a
    request.
    """
    async with opened() as port:
        whole = await exchange(port, *pieces, ANOTHER)
    *earlier, answer = re.split(rb"HTTP/1[.][01] (?=[0-9]{3} )", whole)[1:]

    head, _, body = answer.partition(b"\r\n\r\n")
    error = msgspec.json.decode(body)["error"]
    assert int(head.split()[0]) == status
    assert b"Content-Type: application/json" in head
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert b"sesame" not in answer.lower()
    assert all(each.startswith(b"200 ") for each in earlier)


async def test_an_answer_reaches_a_client_that_goes_on_sending() -> None:
    """A socket that is closed with unread bytes in it is reset, and the answer lost."""
    async with opened() as port:
        answer = await exchange(port, HEAD + b"A: " + LONG, *[b"x" * 100_000] * 10)

    assert b" 431 " in answer.split(b"\r\n")[0]


async def test_a_client_that_goes_on_sending_for_ever_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes are read for a moment only."""
    monkeypatch.setattr(server, "LINGERING_S", 0.1)
    async with opened() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"A: " + LONG)
        answer = await reader.read()
        with pytest.raises(ConnectionError):
            await _send_on(writer)
        writer.close()

    assert b" 431 " in answer.split(b"\r\n")[0]


async def _send_on(writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(30):
        while True:
            writer.write(b"x" * 100)
            await writer.drain()
            await asyncio.sleep(0.01)


async def test_a_large_body_is_no_head() -> None:
    """Its end comes in one read with a part of it, and a further request may follow."""
    body = b"x" * 300_000
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    async with opened() as port:
        pieces = [request, body[:100_000], body[100_000:], post("/read", [])]
        answer = await exchange(port, *pieces)

    assert answer.count(b" 200 OK\r\n") == 2
