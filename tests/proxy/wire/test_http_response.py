"""Responses of instances, cut anywhere: the same bytes count, and the verdict is the same."""

import asyncio
import re
from collections.abc import Iterator

import pytest
from aiohttp.http_parser import HttpResponseParser
from hypothesis import given
from hypothesis import strategies as st

from kvrs.proxy.wire import upstream
from kvrs.proxy.wire.upstream import BrokenBody, Fault, HttpResponse, NotHttp
from kvrs_testkit.examples import examples

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDS = [
    b"0\r\n\r\n",
    b"",
    b"0\r\n",
    b"0\r\nX: y\r\n\r\n",
    b"0;x\r\n\r\n",
    b"5;x=1\r\nhello\r\n",
    b"0\r\n\r\nHTTP/1.1 500",
    b"zz\r\n",
    b"1_0\r\n",
    b"3\r\nabcX\r\n",
    b"fffffffff\r\n",
    b"3\r\nabc\n0\r\n\r\n",
    b"-1\r\n",
    b"0x3\r\nabc\r\n",
    b" 3\r\nabc\r\n",
]
HEADS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.1 200 OK\n\n",
    b"\r\n\r\n",
    b"HTTP/1.1 204 No\r\n\r\n",
    b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
    b"SSH-2\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n",
    b"HTTP/1.1 101 X\r\nUpgrade: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"a" * 9000 + b"\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    *(b"HTTP/1.1 100 Continue\r\n\r\n" * count + CHUNKED + b"0\r\n\r\n" for count in (8, 9, 40)),
    *(b"HTTP/1.1 103 A\n\n" * count + b"HTTP/1.1 200 OK\n\n" for count in (8, 9)),
    b"HTTP/1.1 103 A\r\n\r\n" + b"HTTP/1.1 200 OK\r\n" + b"X: %b\r\n" % (b"a" * 8000) * 9 + b"\r\n",
]
BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=4)
Seen = tuple[int | None, bytes, bool, bool, Fault | None]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def seen(
    loop: asyncio.AbstractEventLoop, raw: bytes, cuts: list[int], *, ends: bool = False
) -> Seen:
    response, body, at = HttpResponse(loop), b"", 0
    for cut in [*sorted(cut for cut in cuts if cut < len(raw)), len(raw)]:
        body += response.feed(raw[at:cut])
        at = cut
    if ends:
        response.feed_eof()
    allows_reuse = response.is_complete and response.keeps_open
    return response.status, body, response.is_complete, allows_reuse, response.fault


EARLY = b"HTTP/1.1 100 Continue\r\n\r\n"


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


@examples(200)
@given(
    pieces=BODIES,
    end=st.sampled_from(ENDS),
    early=st.sampled_from(
        [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 \r\nA: b\r\n\r\n"]
    ),
    cuts=st.lists(st.integers(0, 300), max_size=8),
    ends=st.booleans(),
)
def test_a_response_in_chunks_reads_alike_wherever_it_is_cut(
    loop: asyncio.AbstractEventLoop,
    pieces: list[bytes],
    end: bytes,
    early: bytes,
    cuts: list[int],
    ends: bool,
) -> None:
    """Where reads end is chance, which no stream may notice."""
    raw = early + CHUNKED + chunked(pieces) + end

    whole, cut = seen(loop, raw, [], ends=ends), seen(loop, raw, cuts, ends=ends)

    assert cut == whole
    assert whole[0] == 200
    assert whole[1].startswith(b"".join(pieces))
    if end == b"0\r\n\r\n":
        assert whole[1:] == (b"".join(pieces), True, True, None)


def test_heads_are_known_by_their_bytes_and_few_are_kept(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser reads a head once, and no sender can fill the memory with them."""
    parsed, new_parser = list[int](), upstream._new_parser

    def counting(of: asyncio.AbstractEventLoop) -> HttpResponseParser:
        parsed.append(1)
        return new_parser(of)

    monkeypatch.setattr(upstream, "_KNOWN_HEADS", {})
    monkeypatch.setattr(upstream, "_new_parser", counting)
    head = b"HTTP/1.1 %d X\r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n"

    for status, size in ((200, 3), (429, 3), (429, 4)) * 3:
        response = HttpResponse(loop)
        assert response.feed(head % (status, size) + b"abcd"[:size]) == b"abcd"[:size]
        assert (response.status, response.is_complete, response.keeps_open) == (status, True, True)
        assert response.headers.get("Retry-After") == (None if status == 200 else "7")
    of_three = len(parsed)
    for size in range(1000):
        HttpResponse(loop).feed(head % (200, size))
    kept = len(upstream._KNOWN_HEADS)
    HttpResponse(loop).feed((head % (200, 5)).replace(b"X", b"X" * 1000))

    assert of_three == 3
    assert 0 < kept <= 256
    assert max(map(len, upstream._KNOWN_HEADS)) < 512


@examples(200)
@given(
    head=st.sampled_from(HEADS),
    body=st.binary(max_size=8),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    ends=st.booleans(),
)
def test_every_other_response_reads_alike_wherever_it_is_cut(
    loop: asyncio.AbstractEventLoop, head: bytes, body: bytes, cuts: list[int], ends: bool
) -> None:
    """The same for other framings, and for what is no response."""
    raw = head + body

    whole, cut = seen(loop, raw, [], ends=ends), seen(loop, raw, cuts, ends=ends)

    assert cut[1:] == whole[1:]
    assert cut[0] == whole[0]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", (200, b"abc", True, True, None)),
        (CHUNKED + b"3\r\nabc\r\n", (200, b"abc", False, False, BrokenBody())),
        (CHUNKED + b"3;x=y\r\nabc\r\n0\r\n\r\n", (200, b"abc", True, False, None)),
        (CHUNKED + b"0\r\n\r\nHTTP/1.1 200 OK\r\n", (200, b"", True, False, None)),
        (b"HTTP/1.1 429 No\r\nContent-Length: 2\r\n\r\nabX", (429, b"ab", True, False, None)),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", (200, b"abc", True, False, None)),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc",
            (200, b"abc", False, False, BrokenBody()),
        ),
        (b"SSH-2.0\r\n", (None, b"", False, False, NotHttp("Bad status line:"))),
    ],
)
def test_what_a_response_says_and_whether_its_connection_may_go_on(
    loop: asyncio.AbstractEventLoop, raw: bytes, expected: Seen
) -> None:
    """Only a usual response that has ended exactly leaves a connection for the next call."""
    assert seen(loop, raw, [], ends=True) == expected


def test_a_response_that_changes_the_protocol_ends_with_its_head(
    loop: asyncio.AbstractEventLoop,
) -> None:
    """An engine may leave the connection open, and the call must not wait for its end."""
    response = HttpResponse(loop)

    body = response.feed(b"HTTP/1.1 101 X\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc")

    assert (body, response.status) == (b"", 101)
    assert response.is_complete
    assert not response.keeps_open


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (EARLY * 8 + CHUNKED, None),
        (EARLY * 9 + CHUNKED, "more than 8 responses 1xx"),
        (EARLY.replace(b"\r", b"") * 9 + CHUNKED, "more than 8 responses 1xx"),
        (
            b"HTTP/1.1 200 OK\r\n" + b"X: %b\r\n" % (b"a" * 8000) * 9 + b"\r\n",
            "heads of more than 65536 bytes",
        ),
    ],
)
@pytest.mark.parametrize("read_bytes", [1, 100, 1 << 20])
def test_few_informational_responses_are_skipped_and_heads_have_a_limit(
    loop: asyncio.AbstractEventLoop, raw: bytes, cause: str | None, read_bytes: int
) -> None:
    """An engine that sends them without end has no answer; each costs a call of the parser."""
    status, _, _, _, fault = seen(loop, raw, [*range(read_bytes, len(raw), read_bytes)])

    assert fault == (None if cause is None else NotHttp(cause))
    assert status == (200 if cause is None else None)


class Counting:
    """A pattern that counts its matches."""

    def __init__(self, pattern: re.Pattern[bytes]) -> None:
        self.pattern, self.count = pattern, 0

    def match(self, data: bytes, at: int = 0) -> re.Match[bytes] | None:
        self.count += 1
        return self.pattern.match(data, at)


def test_many_tiny_chunks_of_one_read_are_split_at_once(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body in chunks of one byte has six times its bytes, and no more steps than any other."""
    counting = Counting(upstream._CHUNK)
    monkeypatch.setattr(upstream, "_CHUNK", counting)
    pieces = [b"%c" % (n % 256) * (n % 15 + 1) for n in range(10_000)]

    found = seen(loop, CHUNKED + chunked(pieces) + b"0\r\n\r\n", [])

    assert found == (200, b"".join(pieces), True, True, None)
    assert counting.count < 10
