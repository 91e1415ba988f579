"""Heartbeats of a server from a thread of its own: they go on while its event loop stalls, and end
with the process, also with one that is stopped.

`GET /kvrs/v1/heartbeat?watch=SECONDS` is accepted and authenticated like any other request. Then
its connection is the thread's: the event loop writes nothing to it any more.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from aiohttp import web

from kvrs.http import watch_interval_s, watching
from kvrs.protocol.instance import Heartbeat

PATH = "/kvrs/v1/heartbeat"
_TICK_S = 0.05  # How often the event loop shows that it runs, and the thread looks.


def add_heartbeats(app: web.Application) -> None:
    """Add the route; the thread runs as long as the application."""
    heartbeats = _Heartbeats()
    app.router.add_get(PATH, heartbeats.watch)
    app.cleanup_ctx.append(heartbeats.run)


@dataclass(slots=True, eq=False)
class _Watch:
    connection: socket.socket
    interval_s: float
    next_s: float = 0.0


class _Heartbeats:
    def __init__(self) -> None:
        self._ticked_s = time.monotonic()
        self._lock = threading.Lock()  # For `_watches`.
        self._watches: set[_Watch] = set()
        self._stopped = threading.Event()

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """The thread and the ticks that it reports, until the application is cleaned up."""
        ticking = asyncio.create_task(self._tick())
        thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        thread.start()
        yield
        ticking.cancel()
        self._stopped.set()
        await asyncio.to_thread(thread.join)

    async def watch(self, request: web.Request) -> web.StreamResponse:
        """Hand the connection to the thread until the watcher leaves."""
        interval_s = watch_interval_s(request)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.enable_chunked_encoding()
        with watching(request):
            await response.prepare(request)
            await response.write(self._line(time.monotonic()))
            transport = request.transport
            if transport is None or transport.get_extra_info("ssl_object") is not None:
                return response  # The thread cannot encrypt: one heartbeat, and no more.
            while transport.get_write_buffer_size():
                await asyncio.sleep(_TICK_S)
            number = os.dup(transport.get_extra_info("socket").fileno())
            watch = _Watch(socket.socket(fileno=number), interval_s)
            with self._lock:
                self._watches.add(watch)
            try:
                await asyncio.Event().wait()  # The end of the connection cancels this.
            finally:
                self._end(watch)
        raise AssertionError("unreachable")

    async def _tick(self) -> None:
        while True:
            self._ticked_s = time.monotonic()
            await asyncio.sleep(_TICK_S)

    def _line(self, now_s: float) -> bytes:
        age_s = max(0.0, now_s - self._ticked_s)
        return msgspec.json.encode(Heartbeat(loop_age_s=age_s)) + b"\n"

    def _beat(self) -> None:
        while not self._stopped.wait(_TICK_S):
            now_s = time.monotonic()
            line = self._line(now_s)
            chunk = b"%x\r\n%s\r\n" % (len(line), line)
            with self._lock:
                for watch in self._watches:
                    if now_s >= watch.next_s:
                        watch.next_s = now_s + watch.interval_s
                        _send(watch.connection, chunk)

    def _end(self, watch: _Watch) -> None:
        with self._lock:
            self._watches.discard(watch)
            watch.connection.close()


def _send(connection: socket.socket, chunk: bytes) -> None:
    """Send a chunk whole or end the connection: a watcher that does not read is not waited for."""
    try:
        if connection.send(chunk, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(chunk):
            return
    except OSError:
        pass
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # It has ended already.
