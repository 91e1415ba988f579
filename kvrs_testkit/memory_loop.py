"""An event loop in virtual time whose connections are memory: whole proxies and scripted instances
run on it without a socket, and hours of silence pass in a moment.
"""

import asyncio
import errno
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvrs_testkit.virtual_time import VirtualLoop

_Factory = Callable[[], asyncio.Protocol]
_Address = tuple[str, int]
ANY = ""  # A server at all addresses.
_TURN_S = 1e-6  # A turn of the loop takes time: what looks again until it is due comes to its end.
_KERNEL_BYTES = 256 << 10  # What a connection takes although its reader does not read.
_HIGH_BYTES, _LOW_BYTES = 64 << 10, 16 << 10  # Marks of a writer's buffer, as asyncio's.


class _Socket:
    """A socket as far as addresses and options are concerned; no option changes anything."""

    family = socket.AF_INET

    def __init__(self, own: Any, other: Any = None) -> None:
        self._own, self._other = own, other

    def setsockopt(self, *_: Any) -> None:
        """Accept any."""

    def getsockname(self) -> Any:
        return self._own

    def getpeername(self) -> Any:
        return self._other

    def fileno(self) -> int:
        """The number of a closed socket: no data are waited for at it."""
        return -1


class _Server:
    """A server that listens at a port of the loop until it is closed."""

    def __init__(self, address: _Address, listening: dict[_Address, _Factory]) -> None:
        self.sockets = [_Socket(address)]
        self._address, self._listening = address, listening
        self._closed = asyncio.Event()

    def close(self) -> None:
        if not self._closed.is_set():
            del self._listening[self._address]
            self._closed.set()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def __aenter__(self) -> "_Server":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class MemoryTransport(asyncio.Transport):
    """One end of a connection; `peer` is the other one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, own: Any, other: Any) -> None:
        super().__init__({"sockname": own, "peername": other, "socket": _Socket(own, other)})
        self.peer: MemoryTransport
        self._loop = loop
        self._protocol: asyncio.BaseProtocol
        self._unread = deque[bytes]()
        self._due_bytes = 0  # Written by the peer, and not read.
        self._is_paused = self._is_closing = self._has_ended = False
        self._is_full = self._ends_behind_unread = False

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if data and not self._is_closing:
            self.peer._due_bytes += len(data)
            self._loop.call_soon(self.peer._receive, bytes(data))
            self._look_at_buffer()

    def _receive(self, data: bytes) -> None:
        self._unread.append(data)
        self._deliver()

    def _deliver(self) -> None:
        while self._unread and not self._is_paused:
            data = self._unread.popleft()
            self._due_bytes -= len(data)
            self.peer._look_at_buffer()
            if not self._is_closing:
                assert isinstance(self._protocol, asyncio.Protocol)
                self._protocol.data_received(data)
        if self._ends_behind_unread and not self._unread:
            self._ends_behind_unread = False
            self._lose(None)

    def _look_at_buffer(self) -> None:
        size = self.get_write_buffer_size()
        if size > _HIGH_BYTES and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()
        elif size <= _LOW_BYTES and self._is_full:
            self._is_full = False
            self._protocol.resume_writing()

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self._deliver)

    def close(self) -> None:
        """End the connection; the data written so far arrives before the end."""
        self._end(None, None)

    def abort(self) -> None:
        self._end(None, ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def _end(self, own: Exception | None, others: Exception | None) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._lose, own)
            self._loop.call_soon(self.peer._reach_end, others)

    def _reach_end(self, error: Exception | None) -> None:
        if self._unread and error is None:
            self._ends_behind_unread = True
        else:
            self._lose(error)

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
        return max(0, self.peer._due_bytes - _KERNEL_BYTES)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The marks stay: what is behind them is the same."""

    def can_write_eof(self) -> bool:
        return False


class MemoryLoop(VirtualLoop):
    def __init__(self) -> None:
        super().__init__()
        self._ports = itertools.count(20_000)
        self._listening: dict[_Address, _Factory] = {}
        self._reached: dict[int, _Address] = {}  # By the descriptor of what connected.

    def run_forever(self) -> None:
        """The clock of the process is that of the loop meanwhile."""
        real, time.monotonic = time.monotonic, self.time
        try:
            super().run_forever()
        finally:
            time.monotonic = real

    def _run_once(self) -> None:
        self.stall(_TURN_S)
        super()._run_once()  # type: ignore[misc]

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *args: Any
    ) -> Any:
        """No thread works beside the loop: hours could pass there until it is done."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    async def create_server(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = 0, **_: Any
    ) -> Any:
        address = (_name(host), port or next(self._ports))
        if address in self._listening:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self._listening[address] = factory
        return _Server(address, self._listening)

    def free_ports(self, count: int) -> list[int]:
        """Ports that follow each other, at which nothing listens."""
        return [next(self._ports) for _ in range(count)]

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        self._at(reached := (_name(address[0]), address[1]))
        self._reached[sock.fileno()] = reached

    def _at(self, address: _Address) -> _Factory:
        for each in (address, (ANY, address[1])):
            if each in self._listening:
                return self._listening[each]
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    async def create_connection(  # type: ignore[override]
        self, factory: Any, host: Any = None, port: Any = None, *, sock: Any = None, **__: Any
    ) -> Any:
        far = (_name(host), port)
        if sock is not None:
            far = self._reached.pop(sock.fileno())
            sock.close()
        accept, near = self._at(far), ("127.0.0.1", next(self._ports))
        client, server = MemoryTransport(self, near, far), MemoryTransport(self, far, near)
        client.peer, server.peer = server, client
        protocol = factory()
        server.begin(accept())
        client.begin(protocol)
        return client, protocol


def _name(host: Any) -> str:
    name: str = {None: ANY, "localhost": "127.0.0.1"}.get(host, host)
    return name
