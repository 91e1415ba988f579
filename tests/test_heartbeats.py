"""Heartbeats of a server whose event loop may stall."""

import asyncio
import select
import socket
import threading
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvrs import heartbeats, http
from kvrs.connections import ConnectionLimits
from kvrs.http import HttpPort
from kvrs.protocol.instance import Heartbeat
from kvrs.protocol.secrets import Door, door_key
from kvrs.proving import ProvingConnector

pytestmark = pytest.mark.network

KEY = door_key(b"a secret of the tests, long enough", Door.INSTANCE, "e0")


async def _stall(request: web.Request) -> web.Response:
    time.sleep(1.0)
    return web.Response()


@pytest.fixture
async def port() -> AsyncIterator[HttpPort]:
    app = http.new_app(Door.INSTANCE)
    heartbeats.add_heartbeats(app)
    app.router.add_get("/stall", _stall)
    port = HttpPort(app, ConnectionLimits(100, 100), shutdown_timeout_s=0.5, names=(), keys=[KEY])
    await port.open("127.0.0.1", 0)
    yield port
    await port.close()


def _session(port: int) -> aiohttp.ClientSession:
    connector = ProvingConnector({("127.0.0.1", port): KEY})
    return aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector)


def _beats(raw: bytes) -> list[float]:
    return [msgspec.json.decode(line, type=Heartbeat).loop_age_s for line in raw.splitlines()]


async def _read(port: int, query: str) -> bytes:
    """What a client in a thread of its own reads of heartbeats while it makes the loop stall."""

    async def read() -> bytes:
        async with (
            _session(port) as session,
            session.get(f"/kvrs/v1/heartbeat{query}") as response,
        ):
            assert response.status == 200
            first = await response.content.readline()
            stalling = asyncio.create_task(session.get("/stall"))
            await asyncio.sleep(0.8)
            raw = first + await response.content.readany()
            await stalling
            return raw

    return await asyncio.to_thread(asyncio.run, read())


async def test_heartbeats_go_on_while_the_event_loop_stalls(port: HttpPort) -> None:
    """And say for how long it has."""
    ages_s = _beats(await _read(port.port, "?watch=0.05"))

    assert len(ages_s) > 5
    assert ages_s[0] < 0.3 < max(ages_s)


async def test_heartbeats_need_the_key_and_a_time(port: HttpPort) -> None:
    """As every request to an instance or agent; nothing but a number of seconds is taken."""
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
    """Whether the other side has ended the connection, behind what it has sent."""
    poll = select.poll()
    poll.register(receiver, select.POLLRDHUP)
    return bool(poll.poll(0))


async def test_the_thread_ends_with_the_server() -> None:
    """Nothing is left of a server that was closed under its watchers."""
    app = http.new_app(Door.INSTANCE)
    heartbeats.add_heartbeats(app)
    port = HttpPort(app, ConnectionLimits(100, 100), shutdown_timeout_s=0.5, names=(), keys=[KEY])
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
