"""An event loop in virtual time whose connections are memory: whole proxies and scripted instances
run on it without a socket, and hours of silence pass in a moment.
"""

import asyncio
import errno
import itertools
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvrs_testkit.virtual_time import VirtualLoop

_Factory = Callable[[], asyncio.Protocol]
_TURN_S = 1e-6  # A turn of the loop takes time: what looks again until it is due comes to its end.


class _Options:
    """A socket as far as options are set on it; none changes a connection in memory."""

    family = socket.AF_UNIX

    def setsockopt(self, *_: Any) -> None:
        """Accept any."""


class MemoryTransport(asyncio.Transport):
    """One end of a connection; `peer` is the other one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, own: Any, other: Any) -> None:
        super().__init__({"sockname": own, "peername": other, "socket": _Options()})
        self.peer: MemoryTransport
        self._loop = loop
        self._protocol: asyncio.BaseProtocol
        self._unread: list[bytes] = []
        self._is_paused = self._is_closing = self._has_ended = False

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._is_closing:
            self._loop.call_soon(self.peer._receive, bytes(data))

    def _receive(self, data: bytes) -> None:
        if self._is_paused:
            self._unread.append(data)
        elif not self._is_closing:
            assert isinstance(self._protocol, asyncio.Protocol)
            self._protocol.data_received(data)

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused, unread, self._unread = False, self._unread, []
        for data in unread:
            self._loop.call_soon(self._receive, data)

    def close(self) -> None:
        """End the connection; the data written so far arrives before the end."""
        self._end(None, None)

    def abort(self) -> None:
        self._end(None, ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def _end(self, own: Exception | None, others: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._lose, own)
            self._loop.call_soon(self.peer._lose, others)

    def _lose(self, error: Exception | None) -> None:
        self._is_closing = True
        if not self._has_ended:
            self._has_ended = True
            if error is None and isinstance(self._protocol, asyncio.Protocol):
                self._protocol.eof_received()
            self._protocol.connection_lost(error)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return not self._is_paused

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is buffered: the peer has it in the next turn."""

    def can_write_eof(self) -> bool:
        return False


class MemoryLoop(VirtualLoop):
    def __init__(self) -> None:
        super().__init__()
        self._ports = itertools.count(20_000)
        self._listening: dict[int, _Factory] = {}
        self._reached: dict[int, int] = {}  # The port, by the descriptor of what connected.

    def _run_once(self) -> None:
        self.stall(_TURN_S)
        super()._run_once()  # type: ignore[misc]

    async def create_server(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = 0, **_: Any
    ) -> Any:
        port = port or next(self._ports)
        if port in self._listening:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self._listening[port] = factory
        bound = SimpleNamespace(getsockname=lambda: (host, port))
        closed = asyncio.get_running_loop().create_future()

        def close() -> None:
            self._listening.pop(port, None)
            if not closed.done():
                closed.set_result(None)

        async def wait_closed() -> None:
            await closed

        return SimpleNamespace(sockets=[bound], close=close, wait_closed=wait_closed)

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        if address[1] not in self._listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        self._reached[sock.fileno()] = address[1]

    async def create_connection(  # type: ignore[override]
        self, factory: Any, _: Any = None, port: Any = None, *, sock: Any = None, **__: Any
    ) -> Any:
        if sock is not None:
            port = self._reached.pop(sock.fileno())
            sock.close()
        if port not in self._listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        near, far = ("127.0.0.1", next(self._ports)), ("127.0.0.1", port)
        client, server = MemoryTransport(self, near, far), MemoryTransport(self, far, near)
        client.peer, server.peer = server, client
        protocol = factory()
        server.begin(self._listening[port]())
        client.begin(protocol)
        return client, protocol
