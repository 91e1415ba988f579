"""Calls within a trunk: used where an instance has one, and no worse than connections of their
own whatever becomes of it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from struct import pack, unpack

import pytest

from kvrs.errors import UpstreamError
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.backends.pd import PdBackend
from kvrs.proxy.wire import pool as pools
from kvrs.proxy.wire.pool import MOST_BYTES_IN_TRUNK, Access, EngineLinks
from kvrs.proxy.wire.upstream import Flow, Need, Shortcut
from kvrs.trunk import PREFACE, TrunkConnection
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.cuts import ask, cases
from tests.proxy.proxy_cluster import WITHIN_S, ProxyCluster
from tests.proxy.scripted import without_trunk

pytestmark = pytest.mark.network

BODY = b"data: one\n\ndata: two\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ANSWER = HEAD + b"b\r\ndata: one\n\n\r\nb\r\ndata: two\n\n\r\n"
WHOLE = ANSWER + b"0\r\n\r\n"


def in_trunks(system: ProxyCluster) -> dict[str, int]:
    """Connections within trunks that each instance has served."""
    return {
        name: sum(isinstance(each, TrunkConnection) for each in instance._connections)
        for name, instance in system.instances.items()
    }


async def test_clients_get_the_same_bytes_with_and_without_a_trunk(
    build: ProxyClusterBuilder, model: str
) -> None:
    """Every kind of stream, byte by byte; and what has the capability is served within one."""
    with_it = await build(model=model)
    without = await build(model=model, prepare=without_trunk)

    for case in cases():
        got = await ask(with_it.http, with_it.url, case)
        assert got == await ask(without.http, without.url, case), case.name

    assert all(in_trunks(with_it).values())
    assert not any(in_trunks(without).values())


async def test_a_death_ends_all_streams_of_a_trunk_and_each_goes_on(
    build: ProxyClusterBuilder,
) -> None:
    """No token is lost or repeated, and the new process gets calls within a trunk again."""
    system = await build()
    expected = await system.complete(prompt=[1, 2], max_tokens=60, temperature=0)
    asked = [
        asyncio.create_task(
            system.complete(prompt=[1, 2], max_tokens=60, temperature=0, stream=True)
        )
        for _ in range(8)
    ]
    await system.until_streams_hold(3, count=1)
    victim = system.instances["d0"]
    await victim.kill()
    answers = await asyncio.gather(*asked)
    before = in_trunks(system)["d0"]
    await victim.restart()
    await system.until_health(d0="up")
    for _ in range(4):
        await system.complete(prompt=[1, 2], max_tokens=3)

    assert expected[0] == 200
    assert all(status == 200 and b"data: [DONE]" in body for status, body in answers)
    assert in_trunks(system)["d0"] > before


class Instance:
    """Serves info over connections of their own, and a trunk as `serve` does."""

    def __init__(self, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], object]):
        self.serve = serve
        self.own = 0  # Calls over connections of their own.
        self.trunks = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            first = await reader.readuntil(b"\r\n\r\n")
            if first == PREFACE:
                self.trunks += 1
                await self.serve(reader, writer)  # type: ignore[misc]
                return
            length = int(first.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            self.own += 1
            writer.write(WHOLE)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(instance: Instance) -> AsyncIterator[PdBackend]:
    server = await asyncio.start_server(instance.connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, EngineLinks(Access(token="token")) as links:
        backend = PdBackend(links, f"http://127.0.0.1:{port}")
        await backend._pool.use_trunk()
        yield backend
        for writer in instance.writers:
            writer.transport.abort()


class Gathering:
    shortcut: Shortcut | None = None

    def __init__(self) -> None:
        self.data = b""

    def begin(self, flow: Flow) -> None:
        pass

    def feed(self, data: bytes) -> Need:
        self.data += data
        return Need.MORE


async def called(backend: PdBackend, prompt: str = "x") -> tuple[bytes, str | None]:
    """What came of a call, and how it failed."""
    reader = Gathering()
    try:
        async with asyncio.timeout(WITHIN_S):
            await backend.decode(Call("/v1/completions", {"prompt": prompt}), reader)
    except UpstreamError as error:
        return reader.data, str(error)
    return reader.data, None


async def next_call(reader: asyncio.StreamReader) -> int:
    """The number of the connection on which the next whole request comes."""
    number, size = unpack(">II", await reader.readexactly(8))
    await reader.readexactly(size)
    return int(number)


def entry(number: int, data: bytes) -> bytes:
    return pack(">II", number, len(data)) + data


async def test_a_trunk_cut_at_any_byte_fails_its_calls_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What came before stays delivered, and later calls have connections of their own."""
    monkeypatch.setattr(pools, "_TRUNK_PAUSE_S", 3600.0)  # It is not opened again meanwhile.
    answer = entry(1, ANSWER[:60]) + entry(1, WHOLE[60:])

    async def cut(at: int) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(PREFACE)
            await next_call(reader)
            writer.write(answer[:at])
            await writer.drain()
            writer.transport.abort() if at % 2 else writer.close()

        instance = Instance(serve)
        async with serving(instance) as backend:
            got, fault = await called(backend)
            assert BODY.startswith(got)
            assert (fault is None) == (at == len(answer))
            assert fault is None or "connection lost" in fault
            if fault is not None:
                assert await called(backend) == (BODY, None)
                assert (instance.trunks, instance.own) == (1, 1)

    await asyncio.gather(*(cut(at) for at in range(len(answer) + 1)))


@pytest.mark.parametrize("greeting", [b"", b"HTTP/1.1 400 No\r\n\r\n", PREFACE + b"x", None])
async def test_calls_have_their_own_connections_where_no_trunk_opens(
    greeting: bytes | None,
) -> None:
    """Whatever the instance answers to the preface."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if greeting is None:
            await reader.read()  # Silence, until the proxy has waited long enough.
        else:
            writer.write(greeting)

    instance = Instance(serve)
    async with serving(instance) as backend:
        assert await called(backend) == (BODY, None)

    assert instance.own == 1


async def test_a_trunk_that_is_not_answered_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the instance would keep a connection that counts and is never used."""
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read()
        finally:
            closed.set()

    monkeypatch.setattr(pools, "CONNECT_TIMEOUT_S", 0.5)
    async with serving(Instance(serve)), asyncio.timeout(WITHIN_S):
        await closed.wait()


@pytest.mark.parametrize(
    "lie",
    [
        pack(">II", 1, 0xFFFFFFFF),
        pack(">II", 1, 4 << 24 | 5),
        entry(2, b"a connection that the proxy did not open"),
        entry(1, b"HTTP/9.9 nonsense\r\n\r\n"),
        entry(1, ANSWER + b"zz\r\nnonsense"),
    ],
)
async def test_a_lying_instance_fails_its_own_calls(lie: bytes) -> None:
    """As one that lies on a connection of its own."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PREFACE)
        await next_call(reader)
        writer.write(lie)
        await reader.read()

    instance = Instance(serve)
    async with serving(instance) as backend:
        got, fault = await called(backend)

    assert fault is not None
    assert BODY.startswith(got)


async def test_a_long_request_has_a_connection_of_its_own() -> None:
    """No token of another stream waits for it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PREFACE)
        while True:
            writer.write(entry(await next_call(reader), WHOLE))

    instance = Instance(serve)
    async with serving(instance) as backend:
        short = await called(backend)
        again = await called(backend)
        own_before = instance.own
        long = await called(backend, "x" * MOST_BYTES_IN_TRUNK)

    assert short == again == long == (BODY, None)
    assert (own_before, instance.own, instance.trunks) == (0, 1, 1)


async def test_a_lost_trunk_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause; at once where the instance comes up meanwhile; never once all is closed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PREFACE)
        await reader.read()

    instance = Instance(serve)
    monkeypatch.setattr(pools, "_TRUNK_PAUSE_S", 0.01)
    async with serving(instance) as backend, asyncio.timeout(WITHIN_S):
        first = backend._pool._trunk
        instance.writers[-1].transport.abort()
        while (second := backend._pool._trunk) in (None, first):
            await asyncio.sleep(0.005)

        monkeypatch.setattr(pools, "_TRUNK_PAUSE_S", 3600.0)
        instance.writers[-1].transport.abort()
        while backend._pool._trunk is second:
            await asyncio.sleep(0.005)
        await backend._pool.use_trunk()
        third = backend._pool._trunk
    async with asyncio.timeout(WITHIN_S):
        while asyncio.all_tasks() != {asyncio.current_task()}:
            await asyncio.sleep(0.005)

    assert third is not None
    assert instance.trunks == 3


async def test_an_instance_that_is_removed_has_no_trunk_once_its_calls_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that runs gets its whole answer, and no other trunk is opened."""
    asked, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PREFACE)
        number = await next_call(reader)
        asked.set()
        await go_on.wait()
        writer.write(entry(number, WHOLE))
        with suppress(ConnectionError):
            await reader.read()
        ended.set()

    instance = Instance(serve)
    monkeypatch.setattr(pools, "KEPT_S", 0.05)
    async with serving(instance) as backend, asyncio.timeout(WITHIN_S):
        call = asyncio.create_task(called(backend))
        await asked.wait()
        backend.leave()
        go_on.set()
        answer = await call
        await ended.wait()

    assert answer == (BODY, None)
    assert instance.trunks == 1
    assert not backend._links._pools
