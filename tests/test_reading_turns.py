"""Connections that bring much at once read one after the other."""

import asyncio
from typing import cast

import pytest
from aiohttp import web

from kvrs.net.connections import ConnectionLimits
from kvrs.net.http import HttpPort
from kvrs.net.http_connection import HttpConnection, ReadingTurns

pytestmark = pytest.mark.network


async def test_few_connections_that_bring_much_read_in_one_turn() -> None:
    """In the order in which they came, so that together they keep no other one from the loop."""
    turns, read = ReadingTurns(), list[int]()

    class Noting:
        def __init__(self, number: int) -> None:
            self.number = number

        def read_on(self) -> None:
            read.append(self.number)

    for number in range(9):
        turns.wait(cast(HttpConnection, Noting(number)))
    counts = []
    for _ in range(3):
        await asyncio.sleep(0)
        counts.append(len(read))

    assert (counts, read) == ([4, 8, 9], [*range(9)])


async def test_a_stranger_that_has_brought_much_waits_for_its_turn() -> None:
    """Also where aiohttp would have it read on; and all of its body comes in the end."""
    waited: list[HttpConnection] = []

    class Holding(ReadingTurns):
        def wait(self, connection: HttpConnection) -> None:
            waited.append(connection)

    async def serve(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/", serve)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kvrs.net.http.ReadingTurns", Holding)
        port = HttpPort(app, ConnectionLimits(4, 4), shutdown_timeout_s=0.1, names=None)
        number = await port.open("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", number)
    body = b" " * (1 << 22)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    turns = 0
    async with asyncio.timeout(30):
        while not answer.done():
            await asyncio.sleep(0.001)
            for connection in waited:
                assert connection.transport is None or not connection.transport.is_reading()
                connection.read_on()
                turns += 1
            waited.clear()
        rest = await reader.readexactly(len(str(len(body))))
    writer.close()
    await port.close()

    assert rest == str(len(body)).encode()
    assert turns > 4
