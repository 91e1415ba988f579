"""The server of an HTTP port over sockets: requests behind each other, slow ones, and limits."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from ssl import MemoryBIO, SSLContext, SSLWantReadError
from typing import Any, cast

import pytest
import uvloop

from kvrs.config.security import TlsSettings
from kvrs.errors import RequestError
from kvrs.net import server
from kvrs.net.connections import ConnectionLimits
from kvrs.net.http import PieceWriter, inner_server
from kvrs.net.http_request import no_note
from kvrs.net.routes import Handler, Request, Response, Routes, written
from kvrs.net.server import ClosingLine, HttpConnection, HttpServer, ReadingTurns, TakesTurns
from kvrs.net.tls import Certificates
from kvrs.protocol.secrets import Scope
from kvrs_testkit.certificates import Authority

pytestmark = pytest.mark.network

PATH = "/v1/completions"
MUCH_BYTES = 1 << 18


def connection_of(request: Request) -> HttpConnection:
    assert isinstance(request.connection, HttpConnection)
    return request.connection


def post(body: bytes = b"{}", path: str = PATH, **headers: str) -> bytes:
    fields = {"Host": "x", "Content-Length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


@dataclass
class Port:
    server: HttpServer
    port: int = 0
    served: list[Request] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    release: asyncio.Event = field(default_factory=asyncio.Event)
    then: bytes = field(default_factory=lambda: post(b"third"))  # What comes behind the first.

    async def serve(self, request: Request) -> Response:
        self.served.append(request)
        body = await request.read()
        if b"bug" in body:
            raise ZeroDivisionError
        if b"wait" in body:
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                raise
        if b"first" in body:
            # It comes after the response to this one, and before the next one's turn, as TLS may
            # have it.
            loop = asyncio.get_running_loop()
            loop.call_soon(request.connection.data_received, self.then)
        if b"much" in body:
            return Response(body=body.ljust(MUCH_BYTES))
        return Response(body=body)


async def _run(request: Request, handler: Handler) -> Response:
    try:
        return await handler(request)
    except RequestError as error:
        return Response(error.status)


@asynccontextmanager
async def opened(
    limits: ConnectionLimits | None = None, idle_s: float = 60.0
) -> AsyncIterator[Port]:
    limits = limits or ConnectionLimits(16, 16)
    made = Port(HttpServer(Routes(), _run, no_note, limits, idle_s=idle_s, shutdown_timeout_s=0.3))
    made.server.routes.add("POST", PATH, made.serve)
    made.server.routes.add("GET", PATH, made.serve)
    made.port = await made.server.open("127.0.0.1", 0)
    try:
        yield made
    finally:
        await made.server.close()


# Of the event loop, in which the server reads a piece, whatever time they take.
TURNS = 20


async def answers(port: int, *pieces: bytes, count: int = 1, pause_s: float = 0.02) -> list[bytes]:
    """The bodies of so many responses to what is sent in pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
            for _ in range(TURNS):
                await asyncio.sleep(0)
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
# Not a usual one.
ODD = post(b'{"a": 1}', X_Odd="\xe9")


@pytest.mark.parametrize(
    ("pieces", "is_usual"),
    [
        ((WHOLE,), True),
        ((WHOLE[:-3], WHOLE[-3:]), False),
        ((WHOLE[:30], WHOLE[30:]), False),
        ((ODD,), False),
        ((CHUNKED, b'8\r\n{"a": 1}\r\n0\r\n\r\n'), False),
    ],
)
async def test_a_usual_request_comes_with_its_body(
    pieces: tuple[bytes, ...], is_usual: bool
) -> None:
    """Any other has its body read by its handler."""
    async with opened() as port:
        found = await answers(port.port, *pieces)

    assert found == [b'{"a": 1}']
    assert [each.coming is None for each in port.served] == [is_usual]


async def test_a_client_that_waits_to_be_told_goes_on() -> None:
    """Once its handler reads the body, and not where that has come already."""
    head, body = (request := post(b"{}", Expect="100-continue"))[:-2], request[-2:]
    async with opened() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(head)
        told = await reader.readuntil(b"\r\n\r\n")
        writer.write(body + request)
        found = await bodies(reader, 2)
        writer.close()

    assert told == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert found == [b"{}", b"{}"]


async def test_a_response_to_head_has_no_body() -> None:
    """But its length; the next response follows its head."""
    head = f"HEAD {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode()
    async with opened() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(head + WHOLE)
        first = await reader.readuntil(b"\r\n\r\n")
        second = await reader.readuntil(b'{"a": 1}')
        writer.close()

    assert b"Content-Length: 2\r\n" in first
    assert second.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("status", [100, 101, 103, 199, 204, 304])
def test_a_status_without_a_body_never_has_one(status: int) -> None:
    """Its client takes whatever comes behind the head for the next response."""
    response = Response(status, b'{"error": 1}', {"X-Said": "y"})

    raw = written(response, keeps_open=True)

    head, end, rest = raw.partition(b"\r\n\r\n")
    assert (end, rest) == (b"\r\n\r\n", b"")
    assert b"X-Said: y" in head
    assert b"content-length" not in head.lower()


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_client_of_http_1_0_says_whether_its_connection_stays(keeps: bool) -> None:
    """And is told so."""
    fields = "Connection: keep-alive\r\n" if keeps else ""
    request = f"GET {PATH} HTTP/1.0\r\nHost: x\r\n{fields}\r\n".encode()
    async with opened(idle_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(request * 2)
        async with asyncio.timeout(10):
            found = await reader.read()
        writer.close()

    assert found.count(b"HTTP/1.0 200 OK\r\n") == (2 if keeps else 1)
    assert found.count(b"Connection: keep-alive\r\n") == (2 if keeps else 0)


async def test_the_rest_of_a_body_that_nobody_reads_is_no_request() -> None:
    """The response is the last one of its connection, which the client is told."""
    request = post(b"x" * 100, "/other")
    async with opened() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(request[:-50])
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE)
        rest = await reader.read()
        writer.close()

    assert b"Connection: close\r\n" in head
    assert b"HTTP/1.1" not in rest
    assert port.served == []


async def test_requests_behind_another_are_answered_in_order() -> None:
    """A client may send the next one before it has the response to the first, of any kind."""
    sent = b"".join(post(b"%d" % number) + ODD for number in range(40))
    async with opened() as port:
        found = await answers(port.port, sent, CHUNKED, b"2\r\n{}\r\n0\r\n\r\n" + WHOLE, count=82)

    assert found[:80:2] == [b"%d" % number for number in range(40)]
    assert {*found[1:80:2]} == {b'{"a": 1}'}
    assert found[80:] == [b"{}", b'{"a": 1}']


async def test_a_request_that_comes_before_the_next_one_s_turn_is_behind_it() -> None:
    """Requests are answered in the order in which they were sent."""
    async with opened() as port:
        found = await answers(port.port, post(b"first") + post(b"second"), count=3)

    assert found == [b"first", b"second", b"third"]


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


async def test_a_connection_is_read_on_when_requests_behind_another_are_answered() -> None:
    """Also where they had stopped it from being read."""
    empty = post(b"", A="a" * 4000)
    async with opened() as port:
        port.then = empty
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(post(b"first, wait"))
        async with asyncio.timeout(60):
            while not port.served:
                await asyncio.sleep(0.01)
            writer.write(20 * empty)
            while len(connection_of(port.served[0])._behind) < 20 * len(empty):
                await asyncio.sleep(0.01)
        port.release.set()
        found = await bodies(reader, 22)
        writer.write(post(b"last"))
        found += await bodies(reader, 1)
        writer.close()

    assert found == [b"first, wait", *21 * [b""], b"last"]


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

        assert await answers(port.port, WHOLE) == [b'{"a": 1}']


@pytest.mark.parametrize("sent", [b"", WHOLE])
async def test_an_idle_connection_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first request, and after one."""
    monkeypatch.setattr(server, "HEAD_S", 0.1)
    async with opened(idle_s=0.1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(sent)
        async with asyncio.timeout(10):
            received = await reader.read()
        writer.close()

    assert received.endswith(b'{"a": 1}') == bool(sent)


RESPONSE_BYTES = 4 << 20


@asynccontextmanager
async def serving(
    size_bytes: int = RESPONSE_BYTES, *, tls: Certificates | None = None, budget_bytes: int = 0
) -> AsyncIterator[tuple[HttpServer, int]]:
    """A port whose responses have this size."""
    routes = Routes()

    async def much(_: Request) -> Response:
        return Response(body=bytes(size_bytes))

    routes.add("GET", "/much", much)
    port = inner_server(
        routes, ConnectionLimits(50, 50), shutdown_timeout_s=0.1, names=None, tls=tls
    )
    if budget_bytes:
        port.budget.total_bytes = budget_bytes
    number = await port.open("127.0.0.1", 0)
    try:
        yield port, number
    finally:
        await port.close()


async def asking(
    number: int, *, ssl: SSLContext | None = None, close: bool = False, count: int = 1
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has asked for so many responses, and takes few bytes before it reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", number))
    name = "127.0.0.1" if ssl is not None else None
    opened = asyncio.open_connection(sock=client, ssl=ssl, server_hostname=name, limit=1 << 10)
    reader, writer = await opened
    end = "Connection: close\r\n" if close else ""
    writer.write(f"GET /much HTTP/1.1\r\nHost: x\r\n{end}\r\n".encode() * count)
    await writer.drain()
    return reader, writer


@pytest.fixture
def certificates(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Certificates, SSLContext] | tuple[None, None]:
    """The port's and the client's end of TLS, or none where the parameter is False."""
    if not request.param:
        return None, None
    authority = Authority(tmp_path_factory.mktemp("ca"))
    found = Certificates("tls", TlsSettings.model_validate(authority.issue("port").section()))
    return found, authority.client()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


TLS = pytest.mark.parametrize(
    "certificates",
    [pytest.param(False, id="plain"), pytest.param(True, id="tls", marks=pytest.mark.process)],
    indirect=True,
)


@TLS
@pytest.mark.parametrize("close", [False, True])
async def test_a_client_that_reads_nothing_is_ended_with_what_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, certificates: tuple[Any, Any], close: bool
) -> None:
    """The connection ends whether or not it was to stay open; what waits counts until then."""
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.6)
    tls, context = certificates
    async with serving(tls=tls) as (port, number):
        clients = [await asking(number, ssl=context, close=close) for _ in range(4)]
        await until(lambda: port.budget.held_bytes >= 4 * RESPONSE_BYTES)
        unread_bytes = port.budget.held_bytes
        await until(lambda: not port.connections)

        assert unread_bytes < 4 * RESPONSE_BYTES + (1 << 12)
        assert port.budget.held_bytes == 0
        for _, writer in clients:
            writer.transport.abort()


@TLS
async def test_unread_responses_that_fit_the_buffers_end_the_connection_too(
    monkeypatch: pytest.MonkeyPatch, certificates: tuple[Any, Any]
) -> None:
    """A client that sends request behind request without reading, until little of a response
    waits, and then closing.
    """
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.6)
    tls, context = certificates
    async with serving(10_000, tls=tls) as (port, number):
        _, writer = await asking(number, ssl=context, count=2000)
        await until(lambda: bool(port.connections))
        (connection,) = port.connections
        await until(lambda: connection.look_at_unsent(0.0) or not port.connections)
        await until(lambda: not port.connections)

        assert port.budget.held_bytes == 0
        writer.transport.abort()


@TLS
@pytest.mark.parametrize("close", [False, True])
async def test_a_client_that_reads_slowly_gets_the_whole_response(
    monkeypatch: pytest.MonkeyPatch, certificates: tuple[Any, Any], close: bool
) -> None:
    """However many times the limit that takes, as long as it goes on; also past the time for which
    the port keeps an idle connection.
    """
    tls, context = certificates
    # A client of TLS reads a quarter of a megabyte at once, and then nothing until that is used.
    limit_s, pause_s = (0.6, 0.005) if tls is None else (1.0, 0.002)
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", limit_s)
    async with serving(tls=tls) as (port, number):
        port.idle_s = 0.3
        reader, writer = await asking(number, ssl=context, close=close)
        await reader.readuntil(b"\r\n\r\n")
        received = reads = 0
        while received < RESPONSE_BYTES and (data := await reader.read(1 << 12)):
            received, reads = received + len(data), reads + 1
            await asyncio.sleep(pause_s)
        await until(lambda: not port.connections)

        assert received == RESPONSE_BYTES
        assert reads * pause_s > 2 * limit_s
        writer.transport.abort()


def half_closed(number: int, context: SSLContext | None) -> int:
    """Ask for a response, end the sending side before any of the response is read, and return the
    number of bytes that come.
    """
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.settimeout(20)
        client.connect(("127.0.0.1", number))
        asked = b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n"
        if context is None:
            client.sendall(asked)
            client.shutdown(socket.SHUT_WR)
        else:
            received, sent = MemoryBIO(), MemoryBIO()
            tls = context.wrap_bio(received, sent, server_hostname="127.0.0.1")
            for step in (tls.do_handshake, partial(tls.write, asked), tls.unwrap):
                while True:
                    try:
                        step()
                    except SSLWantReadError:
                        client.sendall(sent.read())
                        if step == tls.unwrap:
                            break
                        received.write(client.recv(1 << 12))
                    else:
                        client.sendall(sent.read())
                        break
        return sum(map(len, iter(partial(client.recv, 1 << 16), b"")))


@TLS
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_sends_nothing_more_gets_the_whole_response(
    certificates: tuple[Any, Any], loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Also where the end of its sending comes while the response is written in pieces."""
    tls, context = certificates

    async def received() -> int:
        async with serving(tls=tls) as (port, number):
            found = await asyncio.to_thread(half_closed, number, context)
            await until(lambda: not port.budget.held_bytes)
            return found

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(received()) > RESPONSE_BYTES


@TLS
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connections_that_are_just_ending_are_looked_at(
    certificates: tuple[Any, Any], loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """In each turn until they are told of their end, behind the loss of their socket too."""
    tls, context = certificates

    async def looked() -> bool:
        async with serving(tls=tls) as (port, number):
            _, writer = await asyncio.open_connection(
                "127.0.0.1",
                number,
                ssl=context,
                server_hostname=None if context is None else "127.0.0.1",
            )
            await until(lambda: bool(port.connections))
            (connection,) = port.connections
            connection.abort()
            for _ in range(TURNS):
                connection.look_at_unsent(asyncio.get_running_loop().time())
                await asyncio.sleep(0)
            writer.transport.abort()
            return connection.transport is None

    with asyncio.Runner(loop_factory=loop) as runner:
        assert runner.run(looked())


@pytest.mark.parametrize("scope", [None, Scope.PROXY])
async def test_a_stream_that_nobody_reads_is_ended_for_a_stranger_only(
    monkeypatch: pytest.MonkeyPatch, scope: Scope | None
) -> None:
    """A process of the cluster may wait for a client of its own."""
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.3)
    async with serving() as (port, number):

        async def flow(request: Request) -> Response:
            request.connection.scope = scope
            writer = PieceWriter(request, "text/plain")
            while True:
                await writer.write(bytes(1 << 16))

        port.routes.add("GET", "/flow", flow)
        client = socket.create_connection(("127.0.0.1", number))
        client.sendall(b"GET /flow HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: port.budget.held_bytes > 0)
        await asyncio.sleep(1.2)  # Four times the limit.
        is_kept = bool(port.connections)
        if scope is None:
            await until(lambda: not port.connections)
        client.close()

        assert is_kept is (scope is not None)


async def test_a_response_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unread responses fill the memory of the port; once they are gone there is room again."""
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 1.2)
    async with serving(budget_bytes=RESPONSE_BYTES * 5 // 2) as (port, number):
        unread = [await asking(number) for _ in range(2)]
        await until(lambda: port.budget.held_bytes > 2 * RESPONSE_BYTES)

        reader, writer = await asking(number)
        refused = await reader.readuntil(b"\r\n\r\n")
        message = await reader.readuntil(b"no_room")
        await until(lambda: port.budget.held_bytes == 0)
        writer.write(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"}}")
        served = await reader.readuntil(b"\r\n\r\n")

        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"do not read" in message
        assert served.startswith(b"HTTP/1.1 200 ")
        for each in (*unread, (reader, writer)):
            each[1].transport.abort()


async def test_a_slow_handler_is_no_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent engine or a long prefill ends no connection."""
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.2)
    async with opened() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(WHOLE + post(b"wait"))
        assert await bodies(reader, 1) == [b'{"a": 1}']
        await asyncio.sleep(1.0)
        port.release.set()

        assert await bodies(reader, 1) == [b"wait"]
        writer.close()


async def test_a_port_that_closes_lets_a_response_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within its time for that, also what has not left the process yet."""
    async with serving() as (port, number):
        monkeypatch.setattr(port, "_shutdown_timeout_s", 30.0)
        reader, writer = await asking(number)
        await until(lambda: port.budget.held_bytes > 0)
        closing = asyncio.create_task(port.close())
        await asyncio.sleep(0.1)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(RESPONSE_BYTES)
        rest = await reader.read()
        await closing

        assert head.startswith(b"HTTP/1.1 200 ")
        assert (len(body), rest) == (RESPONSE_BYTES, b"")
        writer.close()


async def test_a_connection_between_two_requests_outlives_the_time_for_a_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A load balancer in front keeps its connections for a minute; a stranger gets no minute."""
    monkeypatch.setattr(server, "HEAD_S", 0.2)
    async with opened() as port:
        found = await answers(port.port, WHOLE, ODD, WHOLE, count=3, pause_s=0.6)

    assert found == [b'{"a": 1}'] * 3


async def test_a_further_head_that_drips_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time for a head counts from its first byte, and no further byte extends it."""
    monkeypatch.setattr(server, "HEAD_S", 0.2)
    async with opened() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(WHOLE)
        assert await bodies(reader, 1) == [b'{"a": 1}']
        with suppress(ConnectionError):
            async with asyncio.timeout(10):
                for each in WHOLE[:-20].ljust(4096, b"x"):
                    writer.write(bytes([each]))
                    await asyncio.sleep(0.02)
                    if reader.at_eof() or writer.is_closing():  # Ended, or reset.
                        break
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_a_head_that_begins_in_time_is_awaited() -> None:
    """Its first byte reaches a connection that would be closed in the next moment."""
    async with opened(idle_s=2.0) as port:
        found = await answers(port.port, WHOLE, WHOLE[:20], WHOLE[20:], count=2, pause_s=1.2)

    assert found == [b'{"a": 1}'] * 2


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

    a, b, c = (cast(HttpConnection, Noting(name)) for name in "abc")
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
            closing = asyncio.create_task(port.server.close())
            await asyncio.sleep(0.05)
            port.release.set()
            await closing

            assert await asking == [b"wait"]
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
    assert served == [b"wait"]


async def test_few_connections_that_bring_much_read_in_one_turn() -> None:
    """In the order in which they came, so that together they keep no other one from the loop."""
    turns, read = ReadingTurns(), list[int]()

    class Noting:
        def __init__(self, number: int) -> None:
            self.number = number

        def has_turn(self) -> None:
            read.append(self.number)

    for number in range(9):
        turns.wait(Noting(number))
    counts = []
    for _ in range(3):
        await asyncio.sleep(0)
        counts.append(len(read))

    assert (counts, read) == ([4, 8, 9], [*range(9)])


async def test_a_connection_that_waits_again_in_its_turn_gets_one_in_each_turn() -> None:
    """And not one more for each that it had."""
    turns, read = ReadingTurns(1), list[int]()

    class Again:
        def has_turn(self) -> None:
            read.append(1)
            turns.wait(self)

    turns.wait(Again())
    counts = []
    for _ in range(5):
        await asyncio.sleep(0)
        counts.append(len(read))

    assert counts == [1, 2, 3, 4, 5]


async def test_a_body_that_brings_much_waits_for_its_turns() -> None:
    """And all of it comes in the end."""
    waited: list[HttpConnection] = []

    class Holding(ReadingTurns):
        def wait(self, connection: TakesTurns) -> None:
            waited.append(cast(HttpConnection, connection))

    body, turns = b" " * (1 << 22), 0
    async with opened() as port:
        port.server.turns = Holding()
        answer = asyncio.create_task(answers(port.port, post(body)))
        async with asyncio.timeout(30):
            while not answer.done():
                await asyncio.sleep(0.001)
                for connection in waited:
                    assert connection.transport is None or not connection.transport.is_reading()
                    connection.has_turn()
                    turns += 1
                waited.clear()
        assert await answer == [body]

    assert turns > 4


async def test_a_body_that_nobody_reads_yet_fills_no_memory() -> None:
    """No more of it is read than a bound, until its handler asks for it."""
    body = b" " * (1 << 22)
    async with opened() as port:
        asked = asyncio.Event()

        async def later(request: Request) -> Response:
            port.served.append(request)
            await asked.wait()
            return Response(body=b"%d" % len(await request.read()))

        port.server.routes.add("POST", "/later", later)
        answer = asyncio.create_task(answers(port.port, post(body, "/later")))
        async with asyncio.timeout(60):
            while not port.served or not connection_of(port.served[0])._is_paused:
                await asyncio.sleep(0.01)
        held = port.served[0].coming
        assert held is not None
        held_bytes = held.received_bytes
        asked.set()

        assert await answer == [b"%d" % len(body)]

    assert held_bytes < 1 << 20


async def test_a_body_that_is_cut_by_its_own_check_is_refused_once() -> None:
    """A body may be the next in line when its own bytes exceed the memory for bodies."""
    async with opened() as port:

        async def cut(request: Request) -> Response:
            def check() -> None:
                if (body := request.coming) is not None and body.received_bytes:
                    changed, body.changed = body.changed, None
                    if changed is not None:
                        changed()
                    raise RequestError("cut", status=408)

            return Response(body=await request.read(check))

        port.server.routes.add("POST", "/cut", cut)
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(post(b"x" * 100, "/cut")[:-50])
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"x" * 50)
        rest = await reader.read()
        writer.close()

    assert head.startswith(b"HTTP/1.1 408 ")
    assert rest == b""
