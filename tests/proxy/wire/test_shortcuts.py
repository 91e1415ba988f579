"""The shortcut that a reader offers a connection for the usual chunks."""

import asyncio

import pytest

from kvrs.errors import UpstreamError
from kvrs.proxy.wire.upstream import Need, Upstream
from tests.proxy.wire.test_upstream import HEAD, Gathering


class Usual(Gathering):
    """Chunks of 70 bytes are usual ones."""

    def __init__(self) -> None:
        super().__init__()
        self.short = b""
        self.fed = 0

    def take(self, data: bytes) -> bytes:
        while data.startswith(b"46\r\n"):
            self.short += data[4:5]
            data = data[76:]
        return data

    def feed(self, data: bytes) -> Need:
        self.fed += 1
        return super().feed(data)


class Wire(asyncio.Transport):
    is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = True


def chunk(name: bytes, size: int = 70) -> bytes:
    return b"%x\r\n%b\r\n" % (size, name * size)


async def test_the_shortcut_goes_on_behind_a_chunk_that_it_leaves() -> None:
    """In one read; a fault in that chunk ends the call, and what follows is not taken."""
    for fault in (None, UpstreamError("odd")):
        reader, loop = Usual(), asyncio.get_running_loop()
        upstream = Upstream(loop, lambda *_: None)
        upstream.connection_made(wire := Wire())
        ended = await upstream.send(b"request", b"", reader)
        reader.shortcut = reader.take
        upstream.data_received(HEAD + b"1\r\na\r\n")
        reader.fault = fault

        upstream.data_received(chunk(b"b") + b"1\r\n-\r\n" + chunk(b"c") + chunk(b"d"))

        assert reader.short == (b"bcd" if fault is None else b"b")
        assert reader.data == (b"a-" if fault is None else b"a")
        assert wire.is_closed == (fault is not None)
        if fault is not None:
            with pytest.raises(UpstreamError, match="odd"):
                await ended


async def test_a_read_of_unusual_chunks_is_not_taken_one_by_one() -> None:
    """A stream with log probabilities has them, and each would cost a write to the client."""
    reader = Usual()
    upstream = Upstream(asyncio.get_running_loop(), lambda *_: None)
    upstream.connection_made(Wire())
    await upstream.send(b"request", b"", reader)
    reader.shortcut = reader.take
    upstream.data_received(HEAD + b"1\r\na\r\n")

    upstream.data_received(b"".join(chunk(b"%d" % n, 80) for n in range(10)))

    assert reader.data[1:] == b"".join(b"%d" % n * 80 for n in range(10))
    assert reader.fed == 1 + 2
