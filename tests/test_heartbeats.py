"""Heartbeats of a server whose event loop may stall."""

import asyncio
import os
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest
import uvloop

from kvrs.config.security import PeerTlsSettings
from kvrs.net import heartbeats, http
from kvrs.net.connections import ConnectionLimits
from kvrs.net.proving import ProvingConnector
from kvrs.net.routes import Request, Response
from kvrs.net.server import HttpServer
from kvrs.net.tls import Certificates
from kvrs.protocol.instance import Heartbeat
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_testkit import certificates
from kvrs_testkit.certificates import Authority

pytestmark = [pytest.mark.network, pytest.mark.process]

KEY = scoped_key(b"a secret of the tests, long enough", Scope.INSTANCE, "e0")
STALL_S = 1.0  # Until a heartbeat says so.
STALL_ENDS = threading.Event()
LEAST_BEATS = 5


async def _stall(request: Request) -> Response:
    STALL_ENDS.wait(60.0)
    STALL_ENDS.clear()
    return Response()


@asynccontextmanager
async def serving(
    tls: Certificates | None = None,
) -> AsyncIterator[HttpServer]:
    routes = http.authenticated(Scope.INSTANCE)
    heartbeats.add_heartbeats(routes)
    routes.add("GET", "/stall", _stall)
    limits = ConnectionLimits(100, 100)
    port = http.inner_server(routes, limits, shutdown_timeout_s=0.5, names=(), keys=[KEY], tls=tls)
    await port.open("127.0.0.1", 0)
    try:
        yield port
    finally:
        await port.close()


@pytest.fixture
async def port() -> AsyncIterator[HttpServer]:
    async with serving() as port:
        yield port


def _session(port: int, tls: Certificates | None = None) -> aiohttp.ClientSession:
    connector = ProvingConnector({("127.0.0.1", port): KEY}, tls)
    scheme = "http" if tls is None else "https"
    return aiohttp.ClientSession(f"{scheme}://127.0.0.1:{port}", connector=connector)


def _beats(raw: bytes) -> list[float]:
    return [msgspec.json.decode(line, type=Heartbeat).loop_age_s for line in raw.splitlines()]


async def _read(port: int, query: str, tls: Certificates | None = None) -> bytes:
    """The heartbeats that a client in a thread of its own reads while it makes the loop stall."""

    async def read() -> bytes:
        async with (
            _session(port, tls) as session,
            session.get(f"/kvrs/v1/heartbeat{query}") as response,
        ):
            assert response.status == 200
            # The second line is the thread's.
            first = await response.content.readline() + await response.content.readline()
            stalling = asyncio.create_task(session.get("/stall"))
            raw = first
            try:
                async with asyncio.timeout(60):
                    # Also on a machine that is too busy for one each 50 ms.
                    while max(_beats(raw)) < STALL_S or len(_beats(raw)) <= LEAST_BEATS:
                        raw += await response.content.readline()
            finally:
                STALL_ENDS.set()
            await stalling
            assert response.connection is not None
            assert response.connection.transport is not None
            connection = response.connection.transport.get_extra_info("socket")
        async with asyncio.timeout(60):
            while connection.fileno() != -1:  # Over TLS the server takes part in the end.
                await asyncio.sleep(0.02)
        return raw

    return await asyncio.to_thread(asyncio.run, read())


async def test_heartbeats_go_on_while_the_event_loop_stalls(port: HttpServer) -> None:
    """And say for how long it has."""
    ages_s = _beats(await _read(port.port, "?watch=0.05"))

    assert len(ages_s) > LEAST_BEATS
    assert ages_s[0] < STALL_S / 2


@pytest.mark.skipif(certificates.MISSING is not None, reason=str(certificates.MISSING))
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_heartbeats_over_tls_go_on_while_the_event_loop_stalls(
    tmp_path: Path, run: Callable[[Coroutine[None, None, None]], None]
) -> None:
    """The thread encrypts them, whichever event loop serves; nothing is left when the watchers have
    gone.
    """
    ca = Authority(tmp_path)
    pair = ca.issue("member")
    tls = Certificates("security.tls", PeerTlsSettings.model_validate(pair.section(ca.cert)))

    raws: list[bytes] = []
    left = -1

    async def scenario() -> None:
        nonlocal left
        async with serving(tls) as port:
            for _ in range(2):
                raws.append(await _read(port.port, "?watch=0.05", tls))
            async with asyncio.timeout(60):
                while port.routes.watches:
                    await asyncio.sleep(0.05)
            left = sum(_is_of(port.port, number) for number in os.listdir("/proc/self/fd"))

    run(scenario())

    assert left == 1  # It listens.
    for raw in raws:
        ages_s = _beats(raw)
        assert len(ages_s) > LEAST_BEATS
        assert ages_s[0] < STALL_S / 2


def _is_of(port: int, number: str) -> bool:
    """True if this descriptor is a socket of that port."""
    try:
        duplicate = os.dup(int(number))
    except OSError:
        return False
    try:
        with socket.socket(fileno=duplicate) as found:
            return bool(found.getsockname()[1] == port)
    except IndexError:
        return False
    except OSError:  # No socket, so the descriptor still belongs to this function.
        os.close(duplicate)
        return False


async def test_heartbeats_need_the_key_and_a_time(port: HttpServer) -> None:
    """The key is that of every request to an instance or agent; the time is a number of seconds."""
    path = "/kvrs/v1/heartbeat"
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{port.port}") as stranger,
        stranger.get(f"{path}?watch=1") as refused,
    ):
        assert refused.status == 401
    async with _session(port.port) as session, session.get(f"{path}?watch=nan") as nonsense:
        assert nonsense.status == 400


async def test_a_watcher_that_does_not_read_is_cut_off() -> None:
    """The thread never waits for a socket."""
    sender, receiver = socket.socketpair()
    with sender, receiver:
        for _ in range(100_000):
            heartbeats._send(sender, b"b\r\nheartbeat\n\r\n")
            if _is_shut(receiver):
                break
        else:
            raise AssertionError("still open")


def _is_shut(receiver: socket.socket) -> bool:
    """True if the other side has ended the connection, behind what it has sent."""
    poll = select.poll()
    poll.register(receiver, select.POLLRDHUP)
    return bool(poll.poll(0))


async def test_the_thread_ends_with_the_server() -> None:
    """Nothing is left of a server that was closed under its watchers."""
    routes, limits = http.authenticated(Scope.INSTANCE), ConnectionLimits(100, 100)
    heartbeats.add_heartbeats(routes)
    port = http.inner_server(routes, limits, shutdown_timeout_s=0.5, names=(), keys=[KEY])
    await port.open("127.0.0.1", 0)
    assert _is_running()
    async with (
        _session(port.port) as session,
        session.get("/kvrs/v1/heartbeat?watch=0.05") as response,
    ):
        await response.content.readline()

        await port.close()

        with pytest.raises(aiohttp.ClientError):
            await response.content.read()
    assert not _is_running()


def _is_running() -> bool:
    return any(thread.name == "heartbeats" for thread in threading.enumerate())
