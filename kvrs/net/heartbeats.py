"""Heartbeats of a server, sent by a thread: they go on while the event loop stalls, and end when
the process ends or is stopped.

`GET /kvrs/v1/heartbeat?watch=SECONDS` is accepted and authenticated like any other request. Then
the thread owns the connection, and the event loop no longer writes to it; over TLS it does not read
either, because two threads may not use one TLS connection.
"""

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import msgspec

from kvrs.net.http import PieceWriter, error, watch_interval_s, watching
from kvrs.net.routes import Request, Response, Routes
from kvrs.net.tls import ServerSide
from kvrs.protocol.instance import Heartbeat

PATH = "/kvrs/v1/heartbeat"
# Interval at which the event loop notes that it runs, and at which the thread looks for due
# heartbeats.
_TICK_S = 0.05
# Most heartbeat streams over TLS, which the limits on connections no longer count; a further one is
# refused.
_MAX_OVER_TLS = 256


def add_heartbeats(routes: Routes) -> None:
    """Add the heartbeat route; the thread that sends heartbeats runs while the port is open."""
    heartbeats = _Heartbeats()
    routes.add("GET", PATH, heartbeats.watch)
    routes.beside.append(heartbeats.run())


@dataclass(slots=True, eq=False)
class _Watch:
    connection: socket.socket
    interval_s: float
    tls: ServerSide | None = None
    next_s: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, data: bytes) -> bool:
        """Send data, over TLS if the connection has it; return False if the connection has
        ended.
        """
        if self.tls is not None:
            if _has_left(self.connection):
                return False
            self.tls.write(data)
            data = self.tls.outgoing.read()
        return _send(self.connection, data)


class _Heartbeats:
    def __init__(self) -> None:
        self._ticked_s = time.monotonic()
        self._lock = threading.Lock()  # Guards `_watches`.
        self._watches: set[_Watch] = set()
        self._over_tls: set[asyncio.Task[None]] = set()
        self._stopped = threading.Event()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Run the thread during the block, and the event loop's ticks, whose age the heartbeats
        report.
        """
        ticking = asyncio.create_task(self._tick())
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=self._beat, args=[loop], name="heartbeats", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ticking.cancel()
            self._stopped.set()
            await asyncio.to_thread(thread.join)

    async def watch(self, request: Request) -> Response:
        """Pass the request's connection to the thread, until the watcher leaves."""
        interval_s = watch_interval_s(request)
        if len(self._over_tls) >= _MAX_OVER_TLS:
            return error(503, "too many watches are open", kind="server_error")
        with watching(request):
            writer = PieceWriter(request, "application/x-ndjson")
            await writer.write(self._line(time.monotonic()))
            transport = writer.transport
            tls = transport.get_extra_info("ssl_object")
            if tls is not None:
                # Over TLS, some waiting data is not counted in the write buffer's size.
                await asyncio.sleep(_TICK_S)
            while transport.get_write_buffer_size():
                await asyncio.sleep(_TICK_S)
            number = os.dup(transport.get_extra_info("socket").fileno())
            watch = _Watch(socket.socket(fileno=number), interval_s, tls)
            if tls is not None:
                keeping = asyncio.create_task(self._keep_over_tls(watch, request))
                self._over_tls.add(keeping)
                keeping.add_done_callback(self._over_tls.discard)
                # The event loop drops the connection, which stays open by a second descriptor.
                transport.abort()
            else:
                with self._lock:
                    self._watches.add(watch)
            try:
                await asyncio.Event().wait()  # This wait is cancelled when the connection ends.
            finally:
                if tls is None:
                    self._end(watch)
        raise AssertionError("unreachable")

    async def _keep_over_tls(self, watch: _Watch, request: Request) -> None:
        try:
            with watching(request):
                # The event loop may use the connection while it has a transport.
                while request.connection.transport is not None:
                    await asyncio.sleep(_TICK_S)
                with self._lock:
                    self._watches.add(watch)
                await watch.ended.wait()
        finally:
            self._end(watch)

    async def _tick(self) -> None:
        while True:
            self._ticked_s = time.monotonic()
            await asyncio.sleep(_TICK_S)

    def _line(self, now_s: float) -> bytes:
        age_s = max(0.0, now_s - self._ticked_s)
        return msgspec.json.encode(Heartbeat(loop_age_s=age_s)) + b"\n"

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopped.wait(_TICK_S):
            now_s = time.monotonic()
            line = self._line(now_s)
            chunk = b"%x\r\n%s\r\n" % (len(line), line)
            with self._lock:
                for watch in list(self._watches):
                    if now_s >= watch.next_s:
                        watch.next_s = now_s + watch.interval_s
                        if not watch.send(chunk):
                            self._watches.discard(watch)
                            loop.call_soon_threadsafe(watch.ended.set)

    def _end(self, watch: _Watch) -> None:
        with self._lock:
            self._watches.discard(watch)
            watch.connection.close()


def _send(connection: socket.socket, chunk: bytes) -> bool:
    """Send a whole chunk, or end the connection and return False: the thread does not wait for slow
    watchers.
    """
    try:
        if connection.send(chunk, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(chunk):
            return True
    except OSError:
        pass
    with contextlib.suppress(OSError):  # The connection has ended already.
        connection.shutdown(socket.SHUT_RDWR)
    return False


def _has_left(connection: socket.socket) -> bool:
    """Return whether the connection has ended: a watcher sends nothing but TLS's notice of its
    end.
    """
    try:
        connection.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
