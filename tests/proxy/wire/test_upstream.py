"""Connections to an instance: when one is used again, and what its faults become."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvrs.core.fleet.silence import LOST_TOGETHER_S
from kvrs.errors import UpstreamError
from kvrs.net.proving import address_of
from kvrs.protocol.openai.requests import decode_ids, encode_with_ids, packed
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.proxy.backends import pd
from kvrs.proxy.backends.backend import RefusedError
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.backends.pd import PdBackend
from kvrs.proxy.wire import upstream as pools
from kvrs.proxy.wire.errors import (
    BusyError,
    ConnectionLostError,
    NotConnectedError,
    UnusableError,
)
from kvrs.proxy.wire.upstream import (
    CONNECT_TIMEOUT_S,
    Access,
    EngineLinks,
    Need,
    Shortcut,
    Upstream,
)
from kvrs_testkit.memory_loop import MemoryLoop
from kvrs_testkit.proxy_cluster import WITHIN_S

pytestmark = pytest.mark.network

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"3\r\nabc\r\n"
WHOLE = HEAD + CHUNK + b"0\r\n\r\n"
CALL = "/v1/completions"


class Instance:
    """Answers every request with the next of the given bytes; None: it closes the connection."""

    def __init__(self, answers: list[bytes | None], *, holds: bool = False) -> None:
        self.answers = answers
        self.holds = holds  # Whether connections stay open after the last answer.
        self.connections: list[asyncio.StreamWriter] = []
        self.requests: list[bytes] = []
        self.closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0) if self.answers else None
                if answer is None:
                    break
                writer.write(answer)
                if not self.answers and not self.holds:
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed += 1
            writer.close()


class Gathering:
    """A reader that needs so much of the response as it is told."""

    shortcut: Shortcut | None = None

    def __init__(self, need: Need = Need.MORE) -> None:
        self.need = need
        self.pauses = False
        self.fault: Exception | None = None
        self.data = b""
        self.flow: Upstream | None = None
        self.begun = asyncio.Event()

    def feed(self, data: bytes) -> Need:
        if self.fault is not None:
            raise self.fault
        self.data += data
        self.begun.set()
        if self.pauses and self.flow is not None:
            self.flow.pause()
        return self.need


@asynccontextmanager
async def serving(instance: Instance) -> AsyncIterator[PdBackend]:
    server = await asyncio.start_server(instance.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, EngineLinks(Access(token="token")) as links:
        yield PdBackend(links, f"http://127.0.0.1:{port}")
        for writer in instance.connections:
            writer.transport.abort()
        await until_closed(instance, len(instance.connections))


async def until_closed(instance: Instance, count: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while instance.closed < count:
            await asyncio.sleep(0.005)


def call() -> Call:
    return Call(CALL, {"prompt": [1]})


async def test_calls_one_after_another_share_a_connection() -> None:
    """Each gets its own response; a refusal leaves the connection as it was."""
    refusal = b"HTTP/1.1 400 No\r\nContent-Length: 2\r\n\r\n{}"
    busy = b"HTTP/1.1 503 No\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\n{}"
    broken = b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\n{}"
    early = b"HTTP/1.1 100 Continue\r\n\r\n"
    instance = Instance([WHOLE, refusal, busy, broken, early + WHOLE], holds=True)

    async with serving(instance) as backend:
        first, last = Gathering(), Gathering()
        await backend.decode(call(), first)
        with pytest.raises(RefusedError):
            await backend.decode(call(), Gathering())
        with pytest.raises(BusyError) as raised:
            await backend.decode(call(), Gathering())
        with pytest.raises(UpstreamError, match="HTTP 500"):
            await backend.decode(call(), Gathering())
        await backend.decode(call(), last)

    assert first.data == last.data == b"abc"
    assert raised.value.retry_after_s == 7.0
    assert len(instance.connections) == 1
    assert instance.requests[0].endswith(b'\r\n\r\n{"prompt":[1]}')
    assert b"\r\nAuthorization: Bearer token\r\n" in instance.requests[0]


@pytest.mark.parametrize(
    "answer",
    [
        WHOLE + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcevil",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc",
        HEAD + b"3;x=y\r\nabc\r\n0\r\n\r\n",
    ],
)
async def test_a_connection_is_not_used_again_after_an_unusual_end(answer: bytes) -> None:
    """Bytes sent behind a response are never taken for the next one."""
    instance = Instance([answer, WHOLE], holds=True)

    async with serving(instance) as backend:
        first, second = Gathering(), Gathering()
        await backend.decode(call(), first)
        await backend.decode(call(), second)

    assert first.data == second.data == b"abc"
    assert len(instance.connections) == 2


async def test_bytes_that_no_call_asked_for_close_the_connection() -> None:
    """They would be taken for the next response."""
    instance = Instance([WHOLE, WHOLE], holds=True)

    async with serving(instance) as backend:
        await backend.decode(call(), Gathering())
        instance.connections[0].write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")
        await until_closed(instance, 1)
        second = Gathering()
        await backend.decode(call(), second)

    assert second.data == b"abc"


@pytest.mark.parametrize(
    ("answer", "error", "cause", "arrived"),
    [
        (None, ConnectionLostError, "closed without an answer", b""),
        (b"HTTP/1.1 200", ConnectionLostError, "closed without an answer", b""),
        (HEAD + CHUNK, ConnectionLostError, "closed in the middle", b"abc"),
        (HEAD + CHUNK + b"xyz\r\n", ConnectionLostError, "closed in the middle", b"abc"),
        (b"SSH-2.0\r\n", UnusableError, "is not HTTP", b""),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 9000, UnusableError, "is not HTTP", b""),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200, UnusableError, "is not HTTP", b""),
    ],
)
async def test_a_response_that_breaks_has_a_named_cause(
    answer: bytes | None, error: type[UpstreamError], cause: str, arrived: bytes
) -> None:
    """And what came before the break counts."""
    reader = Gathering()

    async with serving(Instance([answer])) as backend:
        with pytest.raises(error, match=cause):
            await backend.decode(call(), reader)

    assert reader.data == arrived


async def test_calls_that_are_lost_have_waited_for_the_loss_of_their_instance() -> None:
    """Most of them are ended by that, all together, before any fails by itself."""
    instance = Instance([HEAD + CHUNK] * 3, holds=True)
    async with serving(instance) as backend:
        readers = [Gathering() for _ in range(3)]
        calls = [asyncio.create_task(backend.decode(call(), reader)) for reader in readers]
        for reader in readers:
            await reader.begun.wait()
        for writer in instance.connections:
            writer.transport.abort()
        calls[0].cancel()
        left, *lost = await asyncio.gather(*calls, return_exceptions=True)

    assert isinstance(left, asyncio.CancelledError)
    assert all(isinstance(each, ConnectionLostError) and each.has_waited for each in lost)


def test_calls_that_are_lost_one_after_the_other_fail_together() -> None:
    """The sockets of a process are closed in some order, and its watch may be the last of them."""
    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        failed_s = runner.run(_lost_one_after_the_other())

    assert max(failed_s) - min(failed_s) < 0.0001


async def _lost_one_after_the_other() -> list[float]:
    """When each call failed."""
    instance, failed_s = Instance([HEAD + CHUNK] * 3, holds=True), list[float]()

    async def fail(reader: Gathering) -> None:
        with pytest.raises(ConnectionLostError):
            await backend.decode(call(), reader)
        failed_s.append(asyncio.get_running_loop().time())

    async with serving(instance) as backend:
        readers = [Gathering() for _ in range(3)]
        calls = [asyncio.create_task(fail(reader)) for reader in readers]
        for reader in readers:
            await reader.begun.wait()
        for writer in instance.connections:
            writer.transport.abort()
            await asyncio.sleep(0.75 * LOST_TOGETHER_S)
        await asyncio.gather(*calls)
    return failed_s


async def test_an_instance_that_takes_no_connection_has_seen_no_request() -> None:
    """So the request is safe to send elsewhere."""
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()

    async with EngineLinks(Access()) as links:
        with pytest.raises(NotConnectedError, match="Connection refused"):
            await PdBackend(links, f"http://127.0.0.1:{port}").decode(call(), Gathering())


async def test_a_connection_notices_a_peer_that_vanished() -> None:
    """Its host may be gone without a reset, while nothing is sent."""
    async with serving(Instance([WHOLE], holds=True)) as backend:
        await backend.decode(call(), Gathering())
        upstream = await backend.pool.take()
        sock = upstream.transport.get_extra_info("socket")

        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        upstream.close()


async def test_a_name_is_connected_to_at_the_first_address_that_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its look-up is no part of connecting, which is bounded in time."""
    looked_up = list[str]()

    async def hosts(pool: pools.Pool, _: asyncio.AbstractEventLoop) -> list[str]:
        looked_up.append(pool._host)
        await asyncio.sleep(1.2 * CONNECT_TIMEOUT_S)
        return [f"127.0.0.{n}" for n in (2, 1)]

    monkeypatch.setattr(pools.Pool, "_hosts", hosts)
    instance = Instance([])
    async with serving(instance) as backend:
        port = address_of(backend.url)[1]
        upstream = await backend._links.pool(f"http://engine:{port}").take()
        address = upstream.transport.get_extra_info("peername")
        upstream.close()
        await until_closed(instance, 1)

    assert looked_up == ["engine"]
    assert address == ("127.0.0.1", port)


async def test_a_process_without_the_key_gets_no_request() -> None:
    """The first bytes of a connection prove both ends."""
    requests = list[bytes]()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    key = scoped_key(b"s" * 32, Scope.INSTANCE, "d0")

    async with server:
        async with EngineLinks(Access({address_of(url): key})) as links:
            with pytest.raises(UpstreamError):
                await PdBackend(links, url).decode(call(), Gathering())
        async with EngineLinks(Access({})) as links:
            with pytest.raises(UnusableError, match="no process of the cluster"):
                await PdBackend(links, url).decode(call(), Gathering())

    assert len(requests) == 1
    assert not requests[0].startswith(b"POST")


@pytest.mark.parametrize("leaves", ["cancelled", "satisfied", "failed"])
async def test_leaving_a_call_ends_the_request_in_the_engine(leaves: str) -> None:
    """The end of its connection tells the engine that it computes for nothing."""
    instance = Instance([HEAD + CHUNK], holds=True)
    reader = Gathering(Need.NOTHING if leaves == "satisfied" else Need.MORE)

    async with serving(instance) as backend:
        calling = asyncio.ensure_future(backend.decode(call(), reader))
        await reader.begun.wait()
        if leaves == "cancelled":
            calling.cancel()
        elif leaves == "failed":
            reader.fault = ZeroDivisionError()
            instance.connections[0].write(CHUNK)
        await until_closed(instance, 1)
        (outcome,) = await asyncio.gather(calling, return_exceptions=True)

    match leaves:
        case "cancelled":
            assert isinstance(outcome, asyncio.CancelledError)
        case "failed":
            assert isinstance(outcome, ZeroDivisionError)
        case _:
            assert outcome is None


async def test_a_response_is_read_to_its_end_behind_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connection is used again, though its reader needed no more."""
    monkeypatch.setattr(pd, "_END_TIMEOUT_S", WITHIN_S)
    instance = Instance([HEAD + CHUNK, WHOLE], holds=True)

    async with serving(instance) as backend:
        reader = Gathering(Need.END)
        calling = asyncio.ensure_future(backend.decode(call(), reader))
        await reader.begun.wait()
        assert reader.flow is not None
        reader.flow.pause()
        instance.connections[0].write(CHUNK + b"0\r\n\r\n")
        await calling
        await backend.decode(call(), Gathering())

    assert reader.data == b"abc"
    assert len(instance.connections) == 1


async def test_an_end_that_does_not_come_closes_the_connection() -> None:
    """A second is waited for it."""
    instance = Instance([HEAD + CHUNK, WHOLE], holds=True)

    async with serving(instance) as backend:
        await backend.decode(call(), Gathering(Need.END))
        await backend.decode(call(), Gathering())

    assert len(instance.connections) == 2


async def test_a_paused_response_does_not_flow() -> None:
    """Its bytes wait at the instance until the reader resumes."""
    instance = Instance([HEAD + CHUNK], holds=True)

    async with serving(instance) as backend:
        reader = Gathering()
        calling = asyncio.ensure_future(backend.decode(call(), reader))
        await reader.begun.wait()
        assert reader.flow is not None
        reader.flow.pause()
        instance.connections[0].write(CHUNK + b"0\r\n\r\n")
        await asyncio.sleep(0.05)
        assert not calling.done()
        paused = reader.data
        reader.flow.resume()
        await calling

    assert paused == b"abc"
    assert reader.data == b"abcabc"


async def test_a_pause_ends_with_its_response() -> None:
    """The next call on the connection flows."""
    instance = Instance([WHOLE, WHOLE], holds=True)

    async with serving(instance) as backend:
        paused, second = Gathering(), Gathering()
        paused.pauses = True
        await backend.decode(call(), paused)
        async with asyncio.timeout(WITHIN_S):
            await backend.decode(call(), second)

    assert second.data == b"abc"
    assert len(instance.connections) == 1


async def test_a_large_body_ends_with_an_early_answer() -> None:
    """An instance that refuses it at once takes no more of it, and its connection ends."""
    taken, connections = 0, 0

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken, connections
        connections += 1
        taken += len(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 413 No\r\nContent-Length: 2\r\n\r\n{}")
        while data := await reader.read(1 << 16):
            taken += len(data)
            await asyncio.sleep(0.001)
        writer.close()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    size_bytes = 64 << 20
    async with server, EngineLinks(Access()) as links:
        large = Call(CALL, {"prompt": "x" * size_bytes})
        with pytest.raises(RefusedError):
            await (backend := PdBackend(links, url)).decode(large, Gathering())
        await ended.wait()
        ended.clear()
        with pytest.raises(RefusedError):
            await backend.decode(call(), Gathering())
    await ended.wait()

    assert taken < size_bytes
    assert connections == 2


async def test_kept_connections_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it the one is closed that has been idle for longest."""
    monkeypatch.setattr(pools, "MOST_KEPT", 2)
    instance = Instance([WHOLE] * 7, holds=True)

    async with serving(instance) as backend:
        await asyncio.gather(*(backend.decode(call(), Gathering()) for _ in range(5)))
        await until_closed(instance, 3)
        await asyncio.gather(*(backend.decode(call(), Gathering()) for _ in range(2)))

    assert len(instance.connections) == 5


async def test_kept_connections_are_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a call they end."""
    monkeypatch.setattr(pools, "KEPT_S", 0.1)
    instance = Instance([WHOLE] * 3, holds=True)

    async with serving(instance) as backend:
        await asyncio.gather(*(backend.decode(call(), Gathering()) for _ in range(3)))
        await until_closed(instance, 3)

    assert len(instance.connections) == 3


async def test_an_instance_that_is_removed_has_no_connection_once_its_calls_have_ended() -> None:
    """A call that runs gets its whole answer; what no call uses is closed at once."""
    instance = Instance([HEAD + CHUNK, WHOLE], holds=True)

    async with serving(instance) as backend:
        reader = Gathering()
        running = asyncio.ensure_future(backend.decode(call(), reader))
        await reader.begun.wait()
        await backend.decode(call(), Gathering())
        backend.leave()
        await until_closed(instance, 1)
        instance.connections[0].write(CHUNK + b"0\r\n\r\n")
        await running
        await until_closed(instance, 2)

    assert reader.data == b"abcabc"
    assert not backend._links._pools


@pytest.mark.parametrize(("tokens", "beside"), [(10, False), (40_000, True)])
async def test_a_long_prompt_is_written_and_read_beside_the_event_loop(
    tokens: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body of its call as well as the ids of the answer; a short one pays for no thread."""
    is_beside = []

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            is_beside.append(threading.current_thread() is not threading.main_thread())
            return work(*given)

        return run

    monkeypatch.setattr("kvrs.proxy.backends.bodies.encode_with_ids", noted(encode_with_ids))
    monkeypatch.setattr("kvrs.proxy.backends.pd.decode_ids", noted(decode_ids))
    prompt = packed(range(tokens))
    answer = encode_with_ids({"choices": [{"prompt_token_ids": prompt}]})
    instance = Instance([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer])

    async with serving(instance) as backend:
        found = await backend.prefill(Call(CALL, {"prompt": prompt}, size_bytes=6 * tokens))

    assert found.prompt_ids == prompt
    assert is_beside == [beside, beside]
    assert instance.requests[0].endswith(encode_with_ids({"prompt": prompt}))
