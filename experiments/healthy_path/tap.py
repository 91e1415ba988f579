"""A thin TCP tap in front of an instance: forwards bytes, and records requests and the times of
responses.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable

_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_EVENT = re.compile(rb"data: (.*?)\n\n")

Piece = tuple[float, bytes]  # When some bytes went by, and the bytes.


class Requests:
    """Counts the requests of one connection by taking its bytes apart: heads, and bodies of a given
    length.
    """

    def __init__(self, counted: Callable[[str], None]) -> None:
        self._counted = counted
        self._rest = b""
        self._body_bytes = 0  # Still to come of the body of the last request.
        self.last = ""

    def feed(self, data: bytes) -> None:
        skipped = min(self._body_bytes, len(data))
        self._body_bytes -= skipped
        self._rest += data[skipped:]
        while not self._body_bytes and (end := self._rest.find(b"\r\n\r\n")) >= 0:
            head, self._rest = self._rest[:end], self._rest[end + 4 :]
            assert b"transfer-encoding" not in head.lower(), (
                "bodies of unknown length are not understood"
            )
            length = _CONTENT_LENGTH.search(head)
            body_bytes = int(length[1]) if length else 0
            self._body_bytes = body_bytes - min(body_bytes, len(self._rest))
            self._rest = self._rest[body_bytes:]
            line = head.split(b"\r\n", 1)[0].decode()
            if "HTTP/1" not in line:
                continue  # The proof, before the first request.
            method, target, _ = line.split(" ")
            self.last = f"{method} {target.partition('?')[0]}"
            self._counted(self.last)


class Tap:
    """Listens on a port of its own, in front of one port of this machine."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.requests: Counter[str] = Counter()
        # What was answered to completions, in the order in which it went by: that of one stream,
        # while there is only one.
        self.answers: list[Piece] = []

    async def start(self) -> int:
        """The port to connect to."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Caller(self), "127.0.0.1", 0
        )
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        self._server.close()

    def counted(self, request: str) -> None:
        self.requests[request] += 1


class _Caller(asyncio.Protocol):
    """The client's side of a connection."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._requests = Requests(tap.counted)
        self._early: list[bytes] = []  # Received before the instance's side was open.
        self._instance: asyncio.Transport | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: _Instance(self), "127.0.0.1", self._tap.target_port
        )
        self._instance = transport
        transport.write(b"".join(self._early))

    def data_received(self, data: bytes) -> None:
        self._requests.feed(data)
        if self._instance is None:
            self._early.append(data)
        else:
            self._instance.write(data)

    def answered(self, data: bytes) -> None:
        assert self.transport is not None
        now_s = time.perf_counter()
        if self._requests.last == "POST /v1/completions":
            self._tap.answers.append((now_s, data))
        self.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._opening.cancel()
        if self._instance is not None:
            self._instance.close()


class _Instance(asyncio.Protocol):
    """The side of a connection that answers."""

    def __init__(self, caller: _Caller) -> None:
        self._caller = caller

    def data_received(self, data: bytes) -> None:
        self._caller.answered(data)

    def connection_lost(self, error: Exception | None) -> None:
        assert self._caller.transport is not None
        self._caller.transport.close()


def token_events(pieces: list[Piece]) -> list[Piece]:
    """The events with a token in some pieces of an answer, each with the time at which it was
    whole.
    """
    whole = b"".join(data for _, data in pieces)
    ends: list[int] = []
    for _, data in pieces:
        ends.append((ends[-1] if ends else 0) + len(data))
    events, piece = [], 0
    for match in _EVENT.finditer(whole):
        while ends[piece] < match.end():
            piece += 1
        if b'"choices":[{' in match[1]:
            events.append((pieces[piece][0], match[1]))
    return events
