"""Reports of a process, line by line."""

import asyncio
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import UpstreamError
from kvrs.proxy.wire import upstream as module
from kvrs.proxy.wire.errors import ConnectionLostError
from kvrs.proxy.wire.upstream import Access, EngineLinks, Lines, Upstream
from kvrs_testkit.allocations import allocated_bytes
from kvrs_testkit.examples import examples

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSAL = b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\n{}"


async def read(*pieces: bytes, ends: bool = False) -> tuple[list[bytes], UpstreamError, float]:
    """The lines of an answer that comes in these pieces, what they ended by, and how long that took
    after the connection broke; `ends`: it is closed.
    """
    loop, broken_s = asyncio.get_running_loop(), 0.0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal broken_s
        try:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.1)
            broken_s = loop.time()
            if not ends:
                writer.transport.abort()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    found = list[bytes]()
    async with server, EngineLinks(Access()) as links:
        try:
            async with links.pool(url).lines("/load?watch=1") as lines:
                async for line in lines:
                    found.append(line)
        except UpstreamError as error:
            return found, error, loop.time() - broken_s
    raise AssertionError("it never ends by itself")


@pytest.mark.parametrize("ends", [True, False])
async def test_lines_come_whole_and_their_end_is_told_at_once(ends: bool) -> None:
    """That of a watch is the first sign of a death: it waits for no other one."""
    lines, error, took_s = await read(HEAD + b"4\r\na\nbc\r\n", b"2\r\nd\n\r\n", ends=ends)

    assert lines == [b"a", b"bcd"]
    assert isinstance(error, ConnectionLostError)
    assert took_s < 0.0001


async def test_a_watch_that_is_refused_is_not_lost() -> None:
    """A process without heartbeats refuses them, and is not asked again."""
    lines, error, _ = await read(REFUSAL)

    assert lines == []
    assert not isinstance(error, ConnectionLostError)
    assert str(error) == "HTTP 404 for /load?watch=1"


def divided(data: bytes, cuts: list[int]) -> tuple[list[bytes], str | None]:
    """The lines of an answer in pieces that end at `cuts`, and the error behind them."""
    lines = Lines(cast(Upstream, None), "/load")
    error = None
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    try:
        for start, end in pairwise(edges):
            lines.feed(data[start:end])
    except UpstreamError as fault:
        error = str(fault)
    return [*lines._lines], error


@examples(200)
@given(
    data=st.lists(st.sampled_from([b"\n", b"a", b"bcd\n", b"e" * 30]), max_size=12).map(b"".join),
    cuts=st.lists(st.integers(1, 100), max_size=12),
    limit=st.integers(1, 60),
)
def test_any_division_brings_the_same_lines_and_the_same_error(
    data: bytes, cuts: list[int], limit: int
) -> None:
    """The limit of a line is one of the line, not of a read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MAX_LINE_BYTES", limit)

        assert divided(data, cuts) == divided(data, [])


def test_a_byte_of_a_long_line_costs_no_more_than_one_of_a_short_line() -> None:
    """A read costs its own bytes."""
    lines = Lines(cast(Upstream, None), "/load")
    lines.feed(b"x" * 4_000_000)

    moved_bytes = allocated_bytes(lines.feed, [b"x"] * 1000)
    lines.feed(b"\n")

    assert moved_bytes < 8_000_000  # The buffer may have grown once.
    assert [*lines._lines] == [b"x" * 4_001_000]
