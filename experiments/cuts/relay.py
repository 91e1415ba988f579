"""A TCP relay that stands before an instance and cuts the response to one request at a chosen
event.
"""

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

USER = re.compile(rb'"user":"(cut-\d+)"')
_EVENT_END = b"\n\n"
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Tried:
    """One cut, and what was wrong with the stream that the client got; None: nothing."""

    case: str
    kind: str
    event: int
    wrong: str | None


@dataclass(slots=True)
class Cuts:
    """Cuts still to be made: by the `user` of a request, the number of events that pass before its
    connection ends.
    """

    pending: dict[bytes, tuple[int, str]] = field(default_factory=dict)

    def take(self, user: bytes) -> tuple[int, str] | None:
        return self.pending.pop(user, None)


class Relay:
    """Passes bytes on both ways. A cut hits the first response to its user, so that the recovery is
    left alone.
    """

    def __init__(self, host: str, port: int, cuts: Cuts) -> None:
        self._address = (host, port)
        self._cuts = cuts
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # No other task awaits this one, so its end by `close` is not raised.
        with contextlib.suppress(asyncio.CancelledError):
            await self._join(reader, writer)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._address)
        except OSError:
            writer.transport.abort()
            return
        line = _Line(self._cuts)
        ways = (_pump(reader, far_writer, line.asked), _pump(far_reader, writer, line.answered))
        try:
            await _first_to_end(*ways)
        finally:
            if line.cut_as == "reset":
                _reset(writer)
            writer.close()
            far_writer.close()


class _Line:
    """One connection: which request is on it, and how many events of its response may still
    pass.
    """

    def __init__(self, cuts: Cuts) -> None:
        self._cuts = cuts
        self._request = b""
        self._left: int | None = None
        self._kind = ""
        self._last = b""
        self.cut_as: str | None = None

    def asked(self, data: bytes) -> tuple[bytes, bool]:
        self._request = (self._request + data)[-_CHUNK_BYTES:]
        if (found := USER.search(self._request)) is not None:
            self._request = b""
            if (cut := self._cuts.take(found[1])) is not None:
                self._left, self._kind = cut
        return data, True

    def answered(self, data: bytes) -> tuple[bytes, bool]:
        """How much of the response passes, and whether the connection stays open."""
        if self._left is None:
            return data, True
        end = 0
        while self._left > 0:
            # An event's end may itself be split; JSON and chunk headers hold no two newlines in a
            # row.
            at = (self._last + data).find(_EVENT_END, end)
            if at < 0:
                self._last = data[-1:] if data.endswith(b"\n") else b""
                return data, True
            end = at + len(_EVENT_END)
            self._left -= 1
        passed = data[: max(0, end - len(self._last))]
        self.cut_as = self._kind
        return passed, False


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    look: Callable[[bytes], tuple[bytes, bool]],
) -> None:
    try:
        while data := await reader.read(_CHUNK_BYTES):
            passed, goes_on = look(data)
            writer.write(passed)
            await writer.drain()
            if not goes_on:
                return
    except ConnectionError:
        return


async def _first_to_end(*ways: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End it with a reset, as the kernel does for a process that was killed, rather than with a
    clean close.
    """
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
