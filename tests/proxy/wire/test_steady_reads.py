"""Many steady streams are read together, at a tick."""

import asyncio
import select
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest

from kvrs.errors import UpstreamError
from kvrs.proxy.wire.steady_reads import LEAST_STREAMS, SteadyReads
from kvrs.proxy.wire.upstream import Access, EngineLinks, Need, Pool, Upstream

pytestmark = pytest.mark.network

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
STREAMS = LEAST_STREAMS + 8
WITHIN_S = 20


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Tokens:
    """A reader whose shortcut takes every chunk but the first and the last."""

    def __init__(self) -> None:
        self.data = b""
        self.flow: Upstream | None = None
        self.short = 0  # Reads that took the shortcut.
        self.pauses_at: int | None = None

    def shortcut(self, data: bytes) -> bytes:
        if data.endswith(LAST) or data.startswith(b"HTTP"):
            return data
        self.data += b"".join(data.split(b"\r\n")[1::2])
        self.short += 1
        if self.short == self.pauses_at and self.flow is not None:
            self.flow.pause()
        return b""

    def feed(self, data: bytes) -> Need:
        self.data += data
        return Need.MORE


class Engine:
    def __init__(self) -> None:
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(HEAD + chunk(b"[first]"))
                self.writers.append(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def an_engine() -> AsyncIterator[tuple[Engine, Pool, SteadyReads]]:
    engine = Engine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, EngineLinks(Access(token="token"), 0.001) as links:
        assert links._steady is not None
        pool = links.pool(f"http://127.0.0.1:{port}")
        try:
            yield engine, pool, links._steady
        finally:
            for writer in engine.writers:
                writer.transport.abort()


async def opened(
    engine: Engine, pool: Pool, count: int
) -> list[tuple[Upstream, Tokens, Awaitable[Need]]]:
    """Streams that have had their first event, in the order of the engine's writers."""
    made, before = [], len(engine.writers)
    for _ in range(count):
        upstream, reader = await pool.take(), Tokens()
        ended = await upstream.send(pool.head("/", 0), b"", reader)
        made.append((upstream, reader, ended))
        await until(lambda: len(engine.writers) == before + len(made))
    await until(lambda: all(reader.data == b"[first]" for _, reader, _ in made))
    return made


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not holds():
            await asyncio.sleep(0.002)


async def test_steady_streams_get_every_byte_in_order_and_end_as_others_do() -> None:
    async with an_engine() as (engine, pool, steady):
        made = await opened(engine, pool, STREAMS)
        assert len(steady._sources) == STREAMS - LEAST_STREAMS + 1

        for n in range(50):
            for writer in engine.writers:
                writer.write(chunk(b"<%d>" % n))
            await asyncio.sleep(0.001 if n % 2 else 0)
        for writer in engine.writers:
            writer.write(LAST)
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*(ended for _, _, ended in made))

        wanted = b"[first]" + b"".join(b"<%d>" % n for n in range(50))
        assert {reader.data for _, reader, _ in made} == {wanted}
        assert all(reader.short for _, reader, _ in made)
        for upstream, _, _ in made:
            pool.give_back(upstream)
        assert (steady._streams, steady._sources) == (0, {})
        # The same connections serve others, which the loop reads from the beginning.
        again = await opened(engine, pool, 1)
        assert len({*engine.writers}) == STREAMS
        pool.give_back(again[0][0])


async def test_the_end_of_an_engine_ends_its_steady_streams_alone() -> None:
    async with an_engine() as (engine, pool, _):
        made = await opened(engine, pool, STREAMS)
        *_, (_, other, _), (dying, _, ended) = made

        engine.writers[-1].transport.abort()
        with pytest.raises(UpstreamError, match="connection lost"):
            async with asyncio.timeout(WITHIN_S):
                await ended
        engine.writers[-2].write(chunk(b"on"))
        await until(lambda: other.data.endswith(b"on"))

        pool.give_back(dying)
        for upstream, _, _ in made[:-1]:
            pool.give_back(upstream)


async def test_a_steady_stream_is_paused_and_goes_on() -> None:
    """Its client has to read first; nothing of the engine's is taken meanwhile, or lost."""
    async with an_engine() as (engine, pool, steady):
        made = await opened(engine, pool, STREAMS)
        upstream, reader, _ = made[-1]
        reader.pauses_at = 1

        engine.writers[-1].write(chunk(b"one"))
        await until(lambda: reader.short == 1)
        engine.writers[-1].write(chunk(b"two"))
        engine.writers[-2].write(chunk(b"other"))
        await until(lambda: made[-2][1].short == 1)
        assert reader.data == b"[first]one"
        upstream.resume()
        await until(lambda: reader.data == b"[first]onetwo")

        for each, _, _ in made:
            pool.give_back(each)
        assert (steady._streams, steady._sources) == (0, {})


async def test_a_closed_connection_does_not_end_the_one_that_has_its_descriptor() -> None:
    async with an_engine() as (engine, pool, steady):
        made = await opened(engine, pool, STREAMS)
        descriptor = made[-1][0]._descriptor
        assert descriptor is not None
        other = made[-2][0]

        steady.end(descriptor, other)

        assert steady._sources[descriptor] is made[-1][0]
        for each, _, _ in made:
            pool.give_back(each)


async def test_streams_that_are_open_when_all_links_are_closed_go_on_to_their_end() -> None:
    """The loop reads them from then on, and steady ones that begin later."""
    async with an_engine() as (engine, pool, steady):
        made = await opened(engine, pool, STREAMS)

        steady.close()
        for writer in engine.writers:
            writer.write(chunk(b"one"))
        await until(lambda: all(reader.data == b"[first]one" for _, reader, _ in made))
        made += await opened(engine, pool, 1)
        for writer in engine.writers:
            writer.write(LAST)
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*(ended for _, _, ended in made))

        for each, _, _ in made:
            pool.give_back(each)
        assert (steady._streams, steady._sources) == (0, {})


async def test_a_fault_in_one_read_stops_no_other_stream() -> None:
    class Broken:
        def read(self) -> None:
            raise RuntimeError("a bug")

        def end_steady(self) -> None:
            assert descriptor is not None
            steady._sources[descriptor] = source
            source.end_steady()

    async with an_engine() as (engine, pool, steady):
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: faults.append(told))
        made = await opened(engine, pool, STREAMS)
        source, descriptor = made[-1][0], made[-1][0]._descriptor
        assert descriptor is not None
        steady._sources[descriptor] = Broken()

        for n in range(20):
            for writer in engine.writers:
                writer.write(chunk(b"<%d>" % n))
            await asyncio.sleep(0.001)
        await until(lambda: all(reader.data.endswith(b"<19>") for _, reader, _ in made))

        assert len(faults) == 1
        assert descriptor not in steady._sources
        for each, _, _ in made:
            pool.give_back(each)


async def test_a_stream_without_room_in_the_epoll_is_read_by_the_loop() -> None:
    class Full:
        closed = False

        def register(self, *_: object) -> None:
            raise OSError("no space left")

    async with an_engine() as (engine, pool, steady):
        epoll, steady._epoll = steady._epoll, cast(select.epoll, Full())
        made = await opened(engine, pool, STREAMS)
        steady._epoll = epoll

        engine.writers[-1].write(chunk(b"on"))
        await until(lambda: made[-1][1].data == b"[first]on")

        assert steady._sources == {}
        for each, _, _ in made:
            pool.give_back(each)
        assert steady._streams == 0
