"""The shortcut that a reader offers a connection for the usual chunks."""

import asyncio

import pytest

from kvrs.errors import UpstreamError
from kvrs.proxy.wire.upstream import Upstream
from tests.proxy.wire.test_upstream import HEAD, Gathering


async def test_the_shortcut_goes_on_behind_a_chunk_that_it_leaves() -> None:
    """In one read; a fault in that chunk ends the call, and what follows is not taken."""

    class Usual(Gathering):
        def __init__(self) -> None:
            super().__init__()
            self.short = b""

        def take(self, data: bytes) -> bytes:
            while data.startswith(b"46\r\n"):
                self.short += data[4:5]
                data = data[76:]
            return data

    class Wire(asyncio.Transport):
        is_closed = False

        def write(self, data: bytes | bytearray | memoryview) -> None:
            pass

        def is_closing(self) -> bool:
            return self.is_closed

        def abort(self) -> None:
            self.is_closed = True

    def usual(name: bytes) -> bytes:
        return b"46\r\n%b\r\n" % (name * 70)

    for fault in (None, UpstreamError("odd")):
        reader, loop = Usual(), asyncio.get_running_loop()
        upstream = Upstream(loop, lambda *_: None)
        upstream.connection_made(wire := Wire())
        ended = await upstream.send(b"request", b"", reader)
        reader.shortcut = reader.take
        upstream.data_received(HEAD + b"1\r\na\r\n")
        reader.fault = fault

        upstream.data_received(usual(b"b") + b"1\r\n-\r\n" + usual(b"c") + usual(b"d"))

        assert reader.short == (b"bcd" if fault is None else b"b")
        assert reader.data == (b"a-" if fault is None else b"a")
        assert wire.is_closed == (fault is not None)
        if fault is not None:
            with pytest.raises(UpstreamError, match="odd"):
                await ended
