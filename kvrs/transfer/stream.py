"""Bytes over a non-blocking socket, as fast as the kernel copies them.

Data is copied once, between page and socket, and only by the coroutine that asked for it: once it
has ended, cancelled or not, nothing touches its buffers. Works on any event loop that can watch a
socket. One task uses a stream at a time.

Arrival times of a socket's bytes, by the kernel's account. A reader that had no CPU for a while
finds many bytes at once, as if the link had brought them in no time.
"""

import asyncio
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from kvrs.errors import TransferError
from kvrs.protocol.frames import (
    ANSWER_BYTES,
    HEADER_BYTES,
    SEALED_ANSWER_BYTES,
    SESSION_MAC_BYTES,
    AnswerHeader,
    Bytes,
    FrameType,
    Session,
    decode_answer,
    decode_header,
)
from kvrs.transfer.shared_memory import close_all, receive, rights

# Fields of Linux' struct tcp_info: milliseconds since the last data arrived, and number of bytes
# received in order.
_LAST_DATA_MS = struct.Struct("=52xI")
_BYTES_RECEIVED = struct.Struct("=128xQ")
_INFO_BYTES = _BYTES_RECEIVED.size
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)


# Longest tick of a kernel's clock of 250 Hz or more: bytes that are not older count as just
# arrived.
_TICK_S = 0.004

# Below this number of unread bytes the socket's buffer has room, so that no sender waits.
_LEAST_BUFFER_BYTES = 1 << 15


class Arrived(NamedTuple):
    bytes: int  # Bytes that arrived since the last call of `look`.
    at_s: float  # Arrival time of the last byte.
    waited_s: float  # Time before these bytes in which the sender waited for the reader.


class Arrivals:
    """Counts the bytes that have arrived at a connected TCP socket, whether or not they were read,
    and tells when. Times are those of `time.monotonic`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._seen = 0
        self._waited_s = 0.0  # Waiting time of the sender that `look` has not returned yet.
        self._waited_until_s = -inf  # End of the sender's last waiting time.
        self.look()

    def reading(self, read_bytes: int) -> None:
        """Note that the owner has read `read_bytes` and is about to read more. If the sender has
        waited for this room in the buffer, the time since the last arrival counts as waiting, not
        as the link's.
        """
        try:
            now_s, info = time.monotonic(), self._info()
            if info is None or info[0] - read_bytes < _LEAST_BUFFER_BYTES:
                return
            buffer_bytes = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        except OSError:
            return
        total, silent_s = info
        if total - read_bytes >= buffer_bytes // 2:
            self._waited_s += now_s - max(self._waited_until_s, now_s - silent_s)
            self._waited_until_s = now_s

    def look(self) -> Arrived | None:
        """Return the bytes that arrived since the last call; None: not reported by the system.

        The kernel counts the silence since the last bytes in ticks of its clock (1 to 10 ms). After
        a silence of at most one tick, the bytes are taken to have arrived at this call.
        """
        try:
            now_s, info = time.monotonic(), self._info()
        except OSError:
            return None
        if info is None:
            return None
        total, silent_s = info
        new, self._seen = total - self._seen, total
        at_s = now_s if silent_s <= _TICK_S else now_s - silent_s
        waited_s = 0.0
        # Bytes that arrived right after the sender's wait may seem a tick older than the wait's
        # end.
        if new and at_s + _TICK_S >= self._waited_until_s:
            waited_s, self._waited_s = self._waited_s, 0.0
        return Arrived(new, at_s, waited_s)

    def _info(self) -> tuple[int, float] | None:
        """Return the number of bytes that ever arrived, and the seconds since the last of them;
        None: the kernel does not report them.
        """
        if _TCP_INFO is None:
            return None
        info = self._sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        if len(info) < _INFO_BYTES:
            return None
        (total,), (silent_ms,) = _BYTES_RECEIVED.unpack_from(info), _LAST_DATA_MS.unpack_from(info)
        return total, silent_ms / 1000


# Bytes after which a transfer yields, because a transfer that never waits would block the event
# loop.
_BYTES_PER_TURN = 1 << 20

# Most bytes that one call reads, including those read ahead.
_BYTES_PER_CALL = 1 << 20
_MAX_VIEWS_PER_CALL = 256

# Most descriptors that come with a message: one, of the peer's file with its pages.
_DESCRIPTORS = 1

# Bytes of a piece in which bodies are read: memory is allocated for received bytes, never for
# announced ones.
_PIECE_BYTES = 1 << 16

# Size of a socket's send buffer, which should fit in a CPU's cache: with the kernel's own, larger
# choice copies go through memory and take half as long again. A link of 25 Gbit/s with a round trip
# of 0.2 ms needs no larger one.
SEND_BUFFER_BYTES = 1 << 19

_KEEPALIVE_IDLE_S = 5
_KEEPALIVE_INTERVAL_S = 2
_KEEPALIVE_PROBES = 3


class StalledError(TransferError):
    """The peer neither sends nor receives for the stall timeout, although the connection is
    open.
    """


def page_socket(host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def tune(sock: socket.socket, stall_timeout_s: float) -> None:
    """Set the socket to send without delay, and to detect a lost peer within the stall timeout.
    Raises OSError: an option cannot be set.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
    sock.setsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(stall_timeout_s * 1000))
    )


async def readable(sock: socket.socket, timeout_s: float | None) -> None:
    """Wait until the socket has bytes to read, or a connection to accept. Raises StalledError: it
    has none within `timeout_s`; None: wait without limit.
    """
    loop = asyncio.get_running_loop()
    await _ready(sock, loop.add_reader, loop.remove_reader, timeout_s)


class SocketStream:
    """A connected socket. Every failure is a `TransferError`."""

    def __init__(self, sock: socket.socket, stall_timeout_s: float) -> None:
        self._sock = sock
        self._stall_timeout_s = stall_timeout_s
        self._bytes_this_turn = 0
        self._session: Session | None = None
        self._arrivals: Arrivals | None = None
        self._received_bytes = 0
        # Descriptors received over a UNIX socket, closed with the stream.
        self.descriptors: list[int] = []
        sock.setblocking(False)
        self._is_local = sock.family == socket.AF_UNIX
        if self._is_local:
            return
        tune(sock, stall_timeout_s)

    @property
    def session(self) -> Session:
        assert self._session is not None, "before the hand-shake"
        return self._session

    @property
    def arrivals(self) -> Arrivals:
        """Arrival times of the socket's bytes, for a single reader."""
        if self._arrivals is None:
            self._arrivals = Arrivals(self._sock)
        return self._arrivals

    def begin(self, session: Session) -> None:
        """Set the session, which the hand-shake has made, for all later frames."""
        self._session = session

    async def send(self, *buffers: Bytes) -> None:
        """Send all buffers, gathered into as few calls as the kernel takes."""
        left: Sequence[Bytes] = buffers
        while left:
            sent = await self._attempt(partial(self._sock.sendmsg, left), self._writable)
            left = _after(left, sent)

    async def send_with(self, descriptors: Sequence[int], message: bytes) -> None:
        """Send copies of descriptors over a UNIX socket, with the message's first byte."""
        first = partial(self._sock.sendmsg, [message], rights(descriptors))
        sent = await self._attempt(first, self._writable)
        await self.send(memoryview(message)[sent:])

    async def receive_into(self, view: memoryview) -> None:
        """Receive bytes until `view` is full."""
        await Filling(self, [view]).next()

    async def receive(self, size: int) -> bytes:
        """Receive `size` bytes; the caller has checked the size."""
        piece = memoryview(bytearray(min(size, _PIECE_BYTES)))
        body = bytearray()
        while len(body) < size:
            part = piece[: size - len(body)]
            received = await self._attempt(partial(self._read, part), self._readable)
            body += part[: _or_closed(received)]
        return bytes(body)

    async def receive_question(self, *expected: FrameType) -> tuple[FrameType, bytes]:
        """Receive the next frame and check its MAC; return its type and body."""
        header = await self.receive(HEADER_BYTES)
        frame_type, length = decode_header(header, *expected)
        body = await self.receive(length)
        self.session.check(await self.receive(SESSION_MAC_BYTES), header + body)
        return frame_type, body

    async def receive_answer(self, *expected: FrameType) -> tuple[AnswerHeader, bytes]:
        """Receive the header of the next answer, and its MAC, which the caller checks once it has
        the payload.
        """
        start = await self.receive(SEALED_ANSWER_BYTES)
        return decode_answer(start[:ANSWER_BYTES], *expected), start[ANSWER_BYTES:]

    async def wait_for_data(self) -> None:
        """Wait without limit until bytes arrive: a connection may be idle while both ends live."""
        await self._readable(None)

    def shut(self) -> None:
        """Shut the connection down while a task uses it; the task's call fails, and the task closes
        the connection.
        """
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # The socket is no longer connected.
            return

    def close(self) -> None:
        self._sock.close()
        close_all(self.descriptors)

    async def receive_some(self, views: Sequence[memoryview]) -> int:
        """Wait for bytes and scatter them over `views`; return their number."""
        return await self._attempt(partial(self._scatter, views), self._readable)

    def _scatter(self, views: Sequence[memoryview]) -> int:
        if self._arrivals is not None:
            self._arrivals.reading(self._received_bytes)
        received = self._sock.recvmsg_into(views)[0]
        self._received_bytes += received
        return _or_closed(received)

    def _read(self, part: memoryview) -> int:
        if not self._is_local:
            received = self._sock.recv_into(part)
            self._received_bytes += received
            return received
        return receive(self._sock, part, self.descriptors, _DESCRIPTORS)

    async def _attempt(
        self, call: Callable[[], int], ready: Callable[[float | None], Awaitable[None]]
    ) -> int:
        """Call `call`, which sends or receives bytes and returns their number, again and again
        until the socket is ready for it; `ready` waits for that.
        """
        while True:
            if self._bytes_this_turn >= _BYTES_PER_TURN:
                self._bytes_this_turn = 0
                await asyncio.sleep(0)
            try:
                moved = call()
            except BlockingIOError:
                await ready(self._stall_timeout_s)
            except OSError as error:
                raise TransferError(f"connection lost: {error.strerror or error}") from None
            else:
                self._bytes_this_turn += moved
                return moved

    async def _readable(self, timeout_s: float | None) -> None:
        await readable(self._sock, timeout_s)
        self._bytes_this_turn = 0

    async def _writable(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        await _ready(self._sock, loop.add_writer, loop.remove_writer, timeout_s)
        self._bytes_this_turn = 0


class Filling:
    """Fills views in order with arriving bytes.

    It reads on into later views as far as bytes are available, so that small views cost no calls of
    their own.
    """

    def __init__(self, stream: SocketStream, views: Sequence[memoryview]) -> None:
        self._stream = stream
        self._views = views
        self._taken = 0
        self._whole = 0  # Number of completely filled views.
        self._offset = 0  # Number of received bytes of the view behind those.

    async def next(self) -> memoryview:
        """Wait until the next view is filled, and return it."""
        while self._whole <= self._taken:
            self._offset += await self._stream.receive_some(self._ahead())
            while self._whole < len(self._views) and self._offset >= len(self._views[self._whole]):
                self._offset -= len(self._views[self._whole])
                self._whole += 1
        self._taken += 1
        return self._views[self._taken - 1]

    def _ahead(self) -> list[memoryview]:
        """Return the memory that one call may fill: the rest of the next view, and some later
        views.
        """
        ahead = [self._views[self._whole][self._offset :]]
        size = len(ahead[0])
        for view in self._views[self._whole + 1 : self._whole + _MAX_VIEWS_PER_CALL]:
            if size >= _BYTES_PER_CALL:
                break
            ahead.append(view)
            size += len(view)
        return ahead


async def _ready(
    sock: socket.socket,
    watch: Callable[..., object],
    unwatch: Callable[..., object],
    timeout_s: float | None,
) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    watch(sock, _wake, ready)
    try:
        async with asyncio.timeout(timeout_s):
            await ready
    except TimeoutError:
        raise StalledError(f"the peer stalled for {timeout_s} s") from None
    finally:
        unwatch(sock)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _or_closed(received: int) -> int:
    if received == 0:
        raise TransferError("connection closed by the peer")
    return received


def _after(buffers: Sequence[Bytes], moved: int) -> Sequence[Bytes]:
    """Return the part of `buffers` behind their first `moved` bytes."""
    for index, buffer in enumerate(buffers):
        size = len(buffer)
        if moved < size:
            return [memoryview(buffer)[moved:], *buffers[index + 1 :]]
        moved -= size
    return []
