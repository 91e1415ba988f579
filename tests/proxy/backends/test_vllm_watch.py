"""The watch of a vLLM instance, at its end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest

from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId
from kvrs.proxy.backends.idle_connection import IdleConnection
from kvrs.proxy.backends.vllm import VllmBackend
from kvrs.proxy.backends.vllm_server import VllmServer
from kvrs.proxy.wire.pool import Access, EngineLinks
from kvrs_testkit.vllm_cluster import Builder


@pytest.mark.network
async def test_a_watch_that_is_cancelled_as_its_process_dies_is_cancelled() -> None:
    """Else the watcher would go on for ever, and the proxy with it."""
    idle = IdleConnection("http://127.0.0.1:1")

    async def watch() -> None:
        async with idle:
            await idle.wait(0.0)
            await asyncio.sleep(60)

    watching = asyncio.create_task(watch())
    while idle._gone is None or not idle._gone.done():
        await asyncio.sleep(0.01)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


@pytest.mark.parametrize("are_produced", [True, False])
async def test_an_instance_is_asked_less_while_its_tokens_come(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch, are_produced: bool
) -> None:
    """A token is a sign of life; without one a dead engine is found as soon as ever."""
    system = await vllms()
    backend = system.proxy.parts.driver.backends[InstanceId("d0")]
    assert isinstance(backend, VllmBackend)
    asked: list[str] = []
    read = VllmServer._read

    async def noted(server: VllmServer, path: str) -> bytes:
        if server is backend:
            asked.append(path)
        return await read(server, path)

    monkeypatch.setattr(VllmServer, "_read", noted)
    await backend.info()
    tokens = count()
    asked.clear()

    reports = 0
    async with backend.watch_load(0.001, lambda: next(tokens) if are_produced else 0) as watched:
        async for _ in watched:
            reports += 1
            if reports == 20:
                break

    # The instance is watched by the proxy itself, too.
    few = asked.count("/health") <= asked.count("/metrics") + 10
    assert few == are_produced
    assert reports == 20


@asynccontextmanager
async def closing_after(answers: int) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that closes each connection at the request behind so many answers, as one does whose
    idle connections have had their time.
    """
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(answers):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", heads


@pytest.mark.network
async def test_a_small_call_is_made_again_where_a_kept_connection_was_closed() -> None:
    """No death is seen in it: a new connection answers. A call that may have had an effect is not
    made again.
    """
    async with closing_after(1) as (url, heads), EngineLinks(Access(token="x")) as links:
        pool = links.pool(url)

        for _ in range(3):
            assert await pool.ask("/health", None) == (200, b"ok")
        with pytest.raises(UpstreamError, match="closed without an answer"):
            await pool.ask("/orders", b"{}")

    assert len(heads) == 3
    assert b"Authorization: Bearer x\r\n" in heads[0]
    assert heads[0].startswith(b"GET /health HTTP/1.1\r\n")
