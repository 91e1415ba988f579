"""The watch of a vLLM instance, at its end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvrs.config.proxy import ProxySettings
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.proxy.backends.stock_peer import IdleConnection
from kvrs.proxy.backends.vllm import VllmBackend, VllmServer
from kvrs.proxy.watch.fleet import Watcher
from kvrs.proxy.watch.gossip_view import GossipView
from kvrs.proxy.wire.upstream import Access, EngineLinks, Pool
from kvrs_testkit.vllm_cluster import Builder


@pytest.mark.network
async def test_a_watch_that_is_cancelled_as_its_process_dies_is_cancelled() -> None:
    """Else the watcher would go on for ever, and the proxy with it."""
    idle = IdleConnection(Pool(Access(), "http://127.0.0.1:1"))

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


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_an_instance_is_asked_less_while_no_stream_waits_for_it(
    vllms: Builder, monkeypatch: pytest.MonkeyPatch, is_awaited: bool
) -> None:
    """A dead engine is found as soon as ever where a stream waits for it."""
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
    asked.clear()

    def asks() -> bool:
        asked.append("is_awaited")
        return is_awaited

    reports = 0
    async with backend.watch_load(0.001, asks) as watched:
        async for _ in watched:
            reports += 1
            if reports == 20:
                break

    # The instance is watched by the proxy itself, too.
    few = asked.count("/health") <= asked.count("/metrics") + 10
    assert few != is_awaited
    # At every look: tokens before one that was due anyway say nothing of the time behind it.
    assert reports == asked.count("is_awaited") == 20


async def test_an_instance_is_awaited_while_streams_run_there_and_no_token_comes(
    vllms: Builder,
) -> None:
    driver = (await vllms()).proxy.parts.driver
    name = InstanceId("d0")
    known, delivered = driver.control.instances.known[name], driver.control.progress.delivered[name]
    gossip_view = GossipView(driver.control, driver.clock)
    watcher = Watcher(known, driver, ProxySettings(id="p"), gossip_view)
    assert not watcher._is_awaited()

    known.running.add(StreamId("s"))
    assert watcher._is_awaited()
    delivered.tokens += 1
    assert not watcher._is_awaited()
    assert watcher._is_awaited()


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
