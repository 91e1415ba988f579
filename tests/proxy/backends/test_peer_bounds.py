"""Bounds on what an instance may send, and on what clients learn of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvrs.errors import UpstreamError
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.backends.pd import PdBackend
from kvrs.proxy.wire.upstream import Access, EngineLinks
from tests.proxy.conftest import ProxyClusterBuilder

ENDLESS = 1 << 40
PIECE = b" " * (1 << 16)


class EndlessServer:
    """Answers any request with a body that never ends, and counts what is taken of it."""

    def __init__(self, status: str) -> None:
        self.status = status
        self.taken_bytes = 0
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 {self.status}\r\nContent-Length: {ENDLESS}\r\n\r\n"
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head.encode())
            while True:
                writer.write(PIECE)
                await writer.drain()
                self.taken_bytes += len(PIECE)
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()


@asynccontextmanager
async def endless(status: str) -> AsyncIterator[tuple[EndlessServer, PdBackend]]:
    served = EndlessServer(status)
    server = await asyncio.start_server(served.answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, EngineLinks(Access(token="token")) as links:
        yield served, PdBackend(links, f"http://127.0.0.1:{port}")


CALL = Call("/v1/completions", {"prompt": [1]})


@pytest.mark.parametrize(
    ("status", "ask", "max_bytes"),
    [
        ("200 OK", lambda backend: backend.info(), 8 << 20),
        ("200 OK", lambda backend: backend.prefill(CALL), 32 << 20),
        ("400 Bad Request", lambda backend: backend.prefill(CALL), 8 << 20),
        ("500 Internal Server Error", lambda backend: backend.prefill(CALL), 8 << 20),
    ],
)
async def test_an_answer_that_does_not_end_is_not_kept(
    status: str, ask: Callable[[PdBackend], Any], max_bytes: int
) -> None:
    """Neither of a small call nor of a prefill: a proxy has the memory of all streams."""
    async with endless(status) as (served, backend):
        with pytest.raises(UpstreamError, match=f"more than {max_bytes} bytes"):
            async with asyncio.timeout(60):
                await ask(backend)

    assert served.taken_bytes < max_bytes + (16 << 20)  # What was on its way.


async def test_clients_learn_no_address(build: ProxyClusterBuilder) -> None:
    """Neither of an instance that takes no connection, nor of the proxy's end of it."""
    system = await build(pairs=1, policy={"recovery": {"max_attempts": 1, "wait_s": 0.5}})
    p0 = system.instances["p0"]
    assert p0._port is not None
    await p0._port.stop_listening()  # Its watch goes on.
    p0.cut_streams()

    status, body = await system.complete(prompt=[1, 2], max_tokens=3, temperature=0)

    assert status in (502, 503)
    assert b"127.0.0.1" not in body
    assert str(p0.port).encode() not in body
