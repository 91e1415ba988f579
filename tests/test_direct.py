"""Requests that are served without aiohttp's server, and those that go to it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import cast

import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.http_parser import HttpRequestParser
from hypothesis import example, given
from hypothesis import strategies as st
from multidict import CIMultiDict

from kvrs.net import direct, http
from kvrs.net.connections import ConnectionLimits
from kvrs.net.direct import ClosingLine, DirectConnection, DirectRequest, DirectServer, parse_head
from kvrs.net.http import HttpPort
from kvrs.net.unfinished import UnfinishedBodies
from kvrs.process.large_work import LARGE_BYTES

pytestmark = pytest.mark.network

PATH = "/v1/completions"
MUCH_BYTES = 1 << 18


def post(body: bytes = b"{}", path: str = PATH, **headers: str) -> bytes:
    fields = {"Host": "x", "Content-Length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
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


@given(
    st.builds(
        lambda start, lines: "\r\n".join([start, *lines, "", "{}"]).encode("latin-1"),
        st.one_of(st.just("POST /a HTTP/1.1"), STARTS),
        st.lists(LINES, max_size=5),
    )
)
@example(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
def test_a_head_that_is_taken_is_what_the_full_parser_makes_of_it(data: bytes) -> None:
    """Two readings of one request are how one is smuggled into another."""
    found = parse_head(data)
    assert parse_head(data) == found  # It is known by now.
    if found is None:
        return
    head, head_bytes, body_bytes = found
    loop = asyncio.new_event_loop()
    try:
        parser = HttpRequestParser(BaseProtocol(loop), loop, 1 << 16)
        ((message, payload),), is_upgraded, _ = parser.feed_data(data)
        payload_is_whole = payload.is_eof()
    finally:
        loop.close()

    assert (message.method, message.path) == ("POST", head.path)
    headers = CIMultiDict(message.headers)
    assert (int(headers.pop("Content-Length")), data[head_bytes:]) == (body_bytes, b"{}")
    assert headers == head.headers
    assert message.should_close is not head.keep_alive
    assert (message.chunked, message.compression, is_upgraded) == (False, None, False)
    assert payload_is_whole == (body_bytes <= 2)


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

    assert parse_head(usual) is not None
    assert parse_head(usual.replace(b"\r\n\r\n", f"\r\n{line}\r\n\r\n".encode())) is None


@given(st.binary(max_size=200))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    """Bytes that are no usual request are for the full server."""
    found = parse_head(data)

    assert found is None or data.startswith(b"POST ")


def test_a_head_is_known_again_whatever_the_length_of_its_body() -> None:
    """Nothing else of it may differ."""
    heads = [parse_head(post(b"{}" * count, A="b")) for count in (1, 100)]
    another = parse_head(post(b"{}", A="c"))

    assert heads[0] is not None
    assert heads[1] is not None
    assert another is not None
    assert heads[0][0] is heads[1][0]
    assert [body_bytes for _, _, body_bytes in (heads[0], heads[1], another)] == [2, 200, 2]
    assert [head.headers["A"] for head, _, _ in (heads[0], another)] == ["b", "c"]


def test_a_head_with_two_lengths_is_none_that_is_known() -> None:
    """Servers that take the one or the other would read different requests."""
    usual, line = post(b"{}", A="b"), b"Content-Length: 2\r\n"

    assert parse_head(usual) is not None
    for another in (line, b"Content-Length: \r\n", b"content-length:3\r\n"):
        for after in (b"HTTP/1.1\r\n", b"Host: x\r\n", line, b"A: b\r\n"):
            assert parse_head(usual.replace(after, after + another)) is None


def test_heads_of_many_clients_take_no_more_memory_than_their_bound() -> None:
    """And one that names its request, which comes but once, takes none."""
    for number in range(1000):
        assert parse_head(post(b"{}", A=str(number))) is not None
    assert parse_head(post(b"{}", A="x" * 4096)) is not None
    assert parse_head(post(b"{}", X_Request_ID="x")) is not None

    assert 0 < len(direct._KNOWN_HEADS) <= 256
    assert max(map(len, direct._KNOWN_HEADS)) <= 2048
    assert not any(b"X-Request-ID" in each for each in direct._KNOWN_HEADS)


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

    assert parse_head(data) is None


@dataclass
class Port:
    """`served` has what was served directly."""

    port: int
    served: list[DirectRequest] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    http: HttpPort | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)
    unfinished: UnfinishedBodies[object] = field(default_factory=lambda: UnfinishedBodies(0))
    then: bytes = field(default_factory=lambda: post(b"third"))  # What comes behind the first.

    async def serve(self, request: DirectRequest) -> web.Response:
        self.served.append(request)
        if b"bug" in request.body:
            raise ZeroDivisionError
        if b"wait" in request.body:
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                raise
        if b"first" in request.body:
            # It comes after the response to this one, and before the next one's turn, as TLS may
            # have it.
            loop = asyncio.get_running_loop()
            loop.call_soon(request.protocol.data_received, self.then)
        if b"much" in request.body:
            return web.Response(body=request.body.ljust(MUCH_BYTES))
        return web.Response(body=b"direct:" + request.body)


@asynccontextmanager
async def opened(
    limits: ConnectionLimits | None = None, idle_s: float | None = None
) -> AsyncIterator[Port]:
    async def full(request: web.Request) -> web.Response:
        return web.Response(body=b"full:" + await request.read())

    app = web.Application()
    app.router.add_post(PATH, full)
    app.router.add_post("/other", full)
    made = Port(0)
    limits = limits or ConnectionLimits(16, 16)
    server = DirectServer({PATH: made.serve}, made.unfinished)
    made.http = HttpPort(
        app, limits, shutdown_timeout_s=0.3, names=None, direct=server, idle_s=idle_s
    )
    made.port = await made.http.open("127.0.0.1", 0)
    try:
        yield made
    finally:
        await made.http.close()


async def answers(port: int, *pieces: bytes, count: int = 1, pause_s: float = 0.02) -> list[bytes]:
    """The bodies of so many responses to what is sent in pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        return await bodies(reader, count)
    finally:
        writer.close()


async def bodies(reader: asyncio.StreamReader, count: int) -> list[bytes]:
    """Those of the next so many responses."""
    found = []
    async with asyncio.timeout(60):
        for _ in range(count):
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = (
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            )
            found.append(await reader.readexactly(length))
    return found


WHOLE = post(b'{"a": 1}')
CHUNKED = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        ((WHOLE,), b'direct:{"a": 1}'),
        ((WHOLE[:-3], WHOLE[-3:]), b'direct:{"a": 1}'),  # A body that comes in two reads.
        ((WHOLE[:30], WHOLE[30:]), b'full:{"a": 1}'),  # A head that does.
        ((post(b"{}", "/other"),), b"full:{}"),
        ((post(b"{}", Expect="100-continue"),), b"full:{}"),
        ((post(b" " * (70 << 10)),), b"full:" + b" " * (70 << 10)),
        (
            (CHUNKED, b"2\r\n{}\r\n0\r\n\r\n"),
            b"full:{}",
        ),
    ],
)
async def test_what_is_unusual_goes_to_the_full_server(
    pieces: tuple[bytes, ...], answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is served there, with all that has come of it."""
    monkeypatch.setattr(direct, "_GATHERING_S", 60.0)
    async with opened() as port:
        expects = b"Expect" in pieces[0]
        if expects:  # It is told to go on, and that is no response.
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            writer.write(pieces[0])
            found = [(await reader.readuntil(answer))[-len(answer) :]]
            writer.close()
        else:
            found = await answers(port.port, *pieces)

    assert found == [answer]
    assert len(port.served) == answer.startswith(b"direct")


async def test_a_body_that_does_not_come_on_is_the_full_server_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There the limits of slow bodies hold, and what came counts."""
    monkeypatch.setattr(direct, "_GATHERING_S", 0.02)
    async with opened() as port:
        found = await answers(port.port, WHOLE[:-3], WHOLE[-3:], pause_s=0.2)

    assert found == [b'full:{"a": 1}']


async def test_parts_of_bodies_take_no_more_memory_than_their_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond it they are the full server's at once."""
    monkeypatch.setattr(direct, "_MOST_GATHERED_BYTES", 10)
    monkeypatch.setattr(direct, "_GATHERING_S", 60.0)
    async with opened() as port:
        found = await answers(port.port, WHOLE[:-3], WHOLE[-3:])

    assert found == [b'full:{"a": 1}']


async def test_what_has_come_of_a_body_is_counted_until_it_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the longest body counts as a small one here: it is never cut."""
    monkeypatch.setattr(direct, "_GATHERING_S", 60.0)
    request = post(b" " * LARGE_BYTES)
    async with opened() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(request[:-1])
        async with asyncio.timeout(60):
            while port.unfinished.held_bytes < len(request) - 1:
                await asyncio.sleep(0.01)
        assert (port.unfinished.small_bytes, port.served) == (len(request) - 1, [])

        writer.write(request[-1:])
        await bodies(reader, 1)
        writer.close()

        assert port.unfinished.held_bytes == 0
        assert len(port.served) == 1


async def test_requests_behind_another_are_answered_in_order() -> None:
    """A client may send the next one before it has the response to the first, also of a kind that
    the full server takes.
    """
    sent = b"".join(post(b"%d" % number) for number in range(40))
    async with opened() as port:
        found = await answers(port.port, sent, post(b"last", "/other"), count=41)

    assert found == [*(b"direct:%d" % number for number in range(40)), b"full:last"]


async def test_a_request_that_comes_before_the_next_one_s_turn_is_behind_it() -> None:
    """Requests are answered in the order in which they were sent."""
    async with opened() as port:
        found = await answers(port.port, post(b"first") + post(b"second"), count=3)

    assert found == [b"direct:first", b"direct:second", b"direct:third"]


async def test_a_client_that_does_not_read_is_not_answered_on() -> None:
    """Its responses would fill the memory; once it reads, it gets them all, in order."""
    asked = [b"much %d" % number for number in range(64)]
    async with opened() as port:
        loop = asyncio.get_running_loop()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port.port))
        await loop.sock_sendall(client, b"".join(map(post, asked)))
        async with asyncio.timeout(60):
            while not port.served:
                await asyncio.sleep(0.01)
        for _ in range(1000):  # Turns of the event loop, in each of which one could be served.
            await asyncio.sleep(0)
        served_unread = len(port.served)
        reader, writer = await asyncio.open_connection(sock=client)
        found = await bodies(reader, len(asked))
        writer.close()

    assert served_unread < len(asked)
    assert [each.rstrip() for each in found] == asked


async def test_a_connection_that_goes_to_the_full_server_is_read_on() -> None:
    """Also where the bytes behind a request have stopped it from being read."""
    empty = post(b"", "/other", A="a" * 4000)
    async with opened() as port:
        port.then = empty
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(post(b"first, wait"))
        async with asyncio.timeout(60):
            while not port.served:
                await asyncio.sleep(0.01)
            writer.write(20 * empty)
            while len(port.served[0].protocol._behind) < 20 * len(empty):
                await asyncio.sleep(0.01)
        port.release.set()
        found = await bodies(reader, 22)
        writer.write(post(b"last", "/other"))
        found += await bodies(reader, 1)
        writer.close()

    assert found == [b"direct:first, wait", *21 * [b"full:"], b"full:last"]


async def test_a_client_that_leaves_cancels_its_request() -> None:
    """The task that runs for it ends."""
    async with opened() as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(post(b"wait"))
        async with asyncio.timeout(60):
            while not port.served:
                await asyncio.sleep(0.01)
            writer.close()
            while not port.ended:
                await asyncio.sleep(0.01)

    assert port.ended == ["cancelled"]


async def test_a_bug_ends_the_connection_alone() -> None:
    """The client is not left waiting, and others are served."""
    async with opened() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(post(b"bug"))
        async with asyncio.timeout(10):
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()

        assert await answers(port.port, WHOLE) == [b'direct:{"a": 1}']


@pytest.mark.parametrize("sent", [b"", WHOLE])
async def test_an_idle_connection_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first request, and after one."""
    monkeypatch.setattr(http, "HEAD_S", 0.1)
    async with opened(idle_s=0.1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(sent)
        async with asyncio.timeout(10):
            received = await reader.read()
        writer.close()

    assert received.endswith(b'direct:{"a": 1}') == bool(sent)


BY_BOTH = pytest.mark.parametrize(
    ("request_", "answer"), [(WHOLE, b'direct:{"a": 1}'), (post(b"{}", "/other"), b"full:{}")]
)


@BY_BOTH
async def test_a_connection_between_two_requests_outlives_the_time_for_a_head(
    request_: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load balancer in front keeps its connections for a minute; a stranger gets no minute."""
    monkeypatch.setattr(http, "HEAD_S", 0.2)
    async with opened(idle_s=60.0) as port:
        found = await answers(port.port, request_, request_, count=2, pause_s=0.6)

    assert found == [answer, answer]


@BY_BOTH
async def test_a_further_head_that_drips_ends_its_connection(
    request_: bytes, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for a head counts from its first byte, and no further byte extends it."""
    monkeypatch.setattr(http, "HEAD_S", 0.2)
    async with opened(idle_s=60.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(request_)
        assert await bodies(reader, 1) == [answer]
        with suppress(ConnectionError):
            async with asyncio.timeout(10):
                for each in request_[:-10].ljust(4096, b"x"):
                    writer.write(bytes([each]))
                    await asyncio.sleep(0.02)
                    if reader.at_eof():
                        break
        assert await reader.read() == b""
        writer.close()


@BY_BOTH
async def test_a_head_that_begins_in_time_is_awaited(request_: bytes, answer: bytes) -> None:
    """Its first byte reaches a connection that would be closed in the next moment."""
    async with opened(idle_s=2.0) as port:
        pieces = request_, request_[:20], request_[20:]
        found = await answers(port.port, *pieces, count=2, pause_s=1.2)

    assert found == [answer, answer.replace(b"direct", b"full")]


async def test_one_timer_closes_idle_connections_in_the_order_of_their_last_requests() -> None:
    """One that was used meanwhile is closed behind those that were not."""
    line, closed, all_closed = ClosingLine(), list[str](), asyncio.Event()

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def close_if_idle(self) -> None:
            closed.append(self.name)
            if len(closed) == 2:
                all_closed.set()

    a, b, c = (cast(DirectConnection, Noting(name)) for name in "abc")
    now_s = asyncio.get_running_loop().time()
    for connection, until_s in ((a, 0.02), (b, 0.03), (c, 0.04)):
        line[connection] = now_s + until_s
    line.begin()
    del line[a]
    line[a] = now_s + 0.05
    del line[c]
    async with asyncio.timeout(60):
        await all_closed.wait()

    assert closed == ["b", "a"]


async def test_a_port_that_closes_waits_for_requests_and_not_for_idle_connections() -> None:
    """The last words of a response reach its client."""
    async with opened() as port:
        _, idle = await asyncio.open_connection("127.0.0.1", port.port)
        asking = asyncio.create_task(answers(port.port, post(b"wait")))
        async with asyncio.timeout(60):
            while not port.served:
                await asyncio.sleep(0.01)
            assert port.http is not None
            closing = asyncio.create_task(port.http.close())
            await asyncio.sleep(0.05)
            port.release.set()
            await closing

            assert await asking == [b"direct:wait"]
        idle.close()


async def test_connections_beyond_the_limit_are_refused_while_all_are_busy() -> None:
    """And an idle one gives way."""
    async with opened(ConnectionLimits(1, 1)) as port:
        _, idle = await asyncio.open_connection("127.0.0.1", port.port)
        asking = asyncio.create_task(answers(port.port, post(b"wait")))
        async with asyncio.timeout(60):
            while not port.served:
                await asyncio.sleep(0.01)
            reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
            refused = await reader.read()
            port.release.set()
            served = await asking
        idle.close()
        writer.close()

    assert b" 503 " in refused.split(b"\r\n")[0]
    assert served == [b"direct:wait"]
