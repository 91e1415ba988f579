"""Connections to instances that bring much take turns, and lose no byte by it."""

import asyncio
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import UpstreamError
from kvrs.net.server import ReadingTurns, TakesTurns
from kvrs.proxy.wire.errors import ConnectionLostError
from kvrs.proxy.wire.upstream import (
    _MUCH_BYTES,
    _TURN_BYTES,
    Access,
    EngineLinks,
    Need,
    Pool,
    Upstream,
)
from kvrs_testkit.examples import examples

pytestmark = pytest.mark.network

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
WITHIN_S = 30


class Steps(ReadingTurns):
    """Turns that are taken by hand."""

    def __init__(self) -> None:
        super().__init__(1)
        self.line = deque[TakesTurns]()

    @property
    def is_taken(self) -> bool:
        return bool(self.line)

    def wait(self, connection: TakesTurns) -> None:
        self.line.append(connection)

    def next(self) -> None:
        self.line.popleft().has_turn()


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.reads = True
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Accept any."""

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def abort(self) -> None:
        self.is_closed = True


class Gathering:
    shortcut = None

    def __init__(self) -> None:
        self.flow: Upstream | None = None
        self.pieces = list[bytes]()

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    def feed(self, data: bytes) -> Need:
        self.pieces.append(data)
        return Need.MORE


async def calling(turns: ReadingTurns, size: int) -> tuple[Upstream, Wire, Gathering]:
    """A call whose answer has a body of this size, and whose head has come."""
    upstream = Upstream(asyncio.get_running_loop(), lambda *_: None, turns=turns)
    upstream.connection_made(wire := Wire())
    await upstream.send(b"request", b"", reader := Gathering())
    upstream.data_received(HEAD % size)
    return upstream, wire, reader


async def test_of_connections_that_bring_much_one_takes_a_part_in_each_turn() -> None:
    """And each of them waits for its turn before it reads on."""
    turns, size = Steps(), 2 * _TURN_BYTES
    (a, wire, first), (b, _, second) = [await calling(turns, 2 * size) for _ in range(2)]
    a.data_received(b"a" * size)
    b.data_received(b"b" * size)
    taken = [(len(first.data), len(second.data))]
    while turns.line:
        turns.next()
        taken.append((len(first.data), len(second.data)))

    assert taken[:5] == [
        (_TURN_BYTES, 0),
        (size, 0),
        (size, _TURN_BYTES),
        (size, _TURN_BYTES),  # The first one reads on.
        (size, size),
    ]
    assert wire.reads


async def test_small_reads_wait_for_no_turn() -> None:
    """Tokens come at once, whatever another connection brings."""
    turns = Steps()
    (a, _, _), (b, wire, second) = [await calling(turns, 1 << 20) for _ in range(2)]
    a.data_received(b"a" * _TURN_BYTES)

    b.data_received(b"b" * (_MUCH_BYTES - 1))

    assert len(second.data) == _MUCH_BYTES - 1
    assert wire.reads


@examples(200)
@given(
    sizes=st.lists(st.sampled_from([1, 900, _MUCH_BYTES, 100_000, 250_000]), max_size=6),
    acts=st.lists(st.sampled_from(["read", "turn", "pause", "resume"]), max_size=40),
    is_lost=st.booleans(),
)
def test_every_byte_comes_once_and_in_order(
    sizes: list[int], acts: list[str], is_lost: bool
) -> None:
    """Whatever pauses the connection in between, and also if it is lost while it waits."""

    async def run() -> None:
        turns, body = Steps(), b"".join(b"%c" % n * size for n, size in enumerate(sizes))
        upstream, wire, reader = await calling(turns, len(body) + 1)
        turns.wait(other := Other())
        left = deque(b"%c" % n * size for n, size in enumerate(sizes))
        is_paused = False
        for act in acts:
            if act == "read" and left and wire.reads:
                upstream.data_received(left.popleft())
            elif act == "turn" and turns.line:
                turns.next()
            elif act == "pause":
                upstream.pause()
                is_paused = True
            elif act == "resume":
                upstream.resume()
                is_paused = False
            assert not (wire.reads and (is_paused or upstream in turns.line))
            assert body.startswith(reader.data)
        received = len(body) - sum(map(len, left))
        if is_lost:
            upstream.connection_lost(None)
        else:
            upstream.resume()
            while turns.line:
                turns.next()
            assert wire.reads
        assert reader.data == body[:received]
        assert other.turns <= 1

    asyncio.run(run())


class Other:
    turns = 0

    def has_turn(self) -> None:
        self.turns += 1


async def test_a_pause_that_ends_is_no_turn() -> None:
    """The connection reads on in its turn only."""
    upstream, wire, _ = await calling(turns := Steps(), 1 << 20)
    upstream.data_received(b"a" * _TURN_BYTES)
    upstream.pause()
    upstream.resume()
    read_early = wire.reads
    turns.next()

    assert not read_early
    assert wire.reads


async def test_bytes_behind_a_response_that_are_held_close_its_connection() -> None:
    """They would be taken for the next response."""
    for more in (0, 1):
        upstream, wire, reader = await calling(turns := Steps(), _TURN_BYTES)
        upstream.data_received(b"a" * (_TURN_BYTES + more))
        is_kept = upstream.leave()
        while turns.line:
            turns.next()

        assert len(reader.data) == _TURN_BYTES
        assert (is_kept, wire.is_closed) == (not more, bool(more))
        assert wire.reads == (not more)


async def test_a_call_that_fails_takes_nothing_of_what_is_held() -> None:
    """Its connection is closed."""
    upstream, wire, reader = await calling(turns := Steps(), 1 << 20)
    upstream.data_received(b"a" * 3 * _TURN_BYTES)
    upstream.close()
    while turns.line:
        turns.next()

    assert len(reader.data) == _TURN_BYTES
    assert wire.is_closed


@asynccontextmanager
async def flooding(size: int, *, ends: bool = True) -> AsyncIterator[Pool]:
    """The pool of an instance that answers as fast as it can, and closes each connection."""

    def send(wire: socket.socket) -> None:
        with wire:
            wire.recv(1 << 16)
            wire.sendall(HEAD % size + b"x" * (size if ends else size - 1))

    def serve() -> None:
        while True:
            try:
                wire, _ = listening.accept()
            except OSError:
                return
            loop.run_in_executor(None, send, wire)

    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = loop.run_in_executor(None, serve)
        async with EngineLinks(Access()) as links:
            yield links.pool(f"http://127.0.0.1:{listening.getsockname()[1]}")
        listening.shutdown(socket.SHUT_RDWR)
        await serving


@pytest.mark.parametrize("ends", [True, False])
async def test_floods_together_take_a_bounded_part_of_each_turn_of_the_loop(ends: bool) -> None:
    """So that tokens of others come in between, and the end of each flood is told behind it."""
    turn, is_over, by_turn, size = 0, False, Counter[int](), 8 << 20

    class Counting(Gathering):
        def feed(self, data: bytes) -> Need:
            by_turn[turn] += len(data)
            return super().feed(data)

    async def count() -> None:
        nonlocal turn
        while not is_over:
            turn += 1
            await asyncio.sleep(0)

    async def call(pool: Pool) -> int:
        reader = Counting()
        upstream = await pool.take()
        try:
            await (await upstream.send(pool.head("/", 0), b"", reader))
        except ConnectionLostError:
            assert not ends
        finally:
            pool.give_back(upstream)
        return len(reader.data)

    async with flooding(size, ends=ends) as pool, asyncio.timeout(WITHIN_S):
        counting = asyncio.create_task(count())
        try:
            got = await asyncio.gather(*(call(pool) for _ in range(4)))
        finally:
            is_over = True
            await counting

    assert got == [size if ends else size - 1] * 4
    assert max(by_turn.values()) <= 2 * _TURN_BYTES + 4 * _MUCH_BYTES


async def test_an_upstream_error_is_no_bug() -> None:
    """The reader's error in a turn ends the call as one in a read does."""

    class Failing(Gathering):
        def feed(self, data: bytes) -> Need:
            if data.startswith(b"b"):
                raise UpstreamError("odd")
            return super().feed(data)

    turns = Steps()
    upstream = Upstream(asyncio.get_running_loop(), lambda *_: None, turns=turns)
    upstream.connection_made(wire := Wire())
    ended = await upstream.send(b"request", b"", reader := Failing())
    upstream.data_received(HEAD % (1 << 20))
    upstream.data_received(b"a" * _TURN_BYTES + b"b" * _TURN_BYTES)
    assert not wire.is_closed
    while turns.line:
        turns.next()

    with pytest.raises(UpstreamError, match="odd"):
        await ended
    assert wire.is_closed
    assert len(reader.data) == _TURN_BYTES
