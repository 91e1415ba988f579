"""Shared reads of many streams in one turn of the event loop, so that their tokens share its
wake-up.

With `proxy.coalesce_ms`, connections with steady tokens are registered in an epoll of their own,
nested in the event loop's. While tokens are far apart the epoll wakes the loop like any connection.
Once two wake-ups are close together, the loop reads it once per tick instead: a token, or a
stream's end, waits half a tick on average. Requests and first tokens never wait.
"""

import asyncio
import select
from contextlib import suppress
from typing import Protocol

_MOST_AT_ONCE = 1024
# Least number of steady streams for reads here: fewer streams share no wake-up, and each read costs
# a little more here than on the event loop.
LEAST_STREAMS = 16


class SteadySource(Protocol):
    def read(self) -> None:
        """Read the received bytes of the connection, or its end."""

    def end_steady(self) -> None:
        """Call `SteadyReads.end`, and let the event loop read the connection from then on."""


class SteadyReads:
    """Reads the connections of one event loop whose streams have steady tokens."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        # Connections that are read here, by descriptor.
        self._sources: dict[int, SteadySource] = {}
        # Number of steady streams; the first LEAST_STREAMS - 1 stay on the event loop.
        self._streams = 0
        self._woken_s = 0.0
        # Timer of the next tick; None: no ticks, because the epoll wakes the loop.
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._epoll.fileno(), self._woken)

    def begin(self, transport: asyncio.Transport, source: SteadySource) -> int | None:
        """Begin to read a steady stream's connection here instead of on the event loop. Return the
        connection's descriptor; None: the loop reads on, for one of the first few streams, for TLS,
        or if the epoll has no room.
        """
        self._streams += 1
        sock = transport.get_extra_info("socket")
        if (
            self._streams < LEAST_STREAMS
            or self._epoll.closed
            or sock is None
            or transport.get_extra_info("sslcontext") is not None
        ):
            return None
        descriptor: int = sock.fileno()
        try:
            self._epoll.register(descriptor, select.EPOLLIN)
        except OSError:
            return None
        transport.pause_reading()
        self._sources[descriptor] = source
        return descriptor

    def end(self, descriptor: int | None, source: SteadySource) -> None:
        """Stop reading a stream that is over, no longer steady, or whose client must read first.
        The event loop's own reading of the connection stays paused if there is a descriptor.
        """
        self._streams -= 1
        if descriptor is not None and self._sources.get(descriptor) is source:
            del self._sources[descriptor]
            with suppress(OSError):  # The descriptor may be closed already.
                self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Return all connections to the event loop; running calls go on."""
        if self._epoll.closed:
            return
        for source in [*self._sources.values()]:
            source.end_steady()
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _woken(self) -> None:
        """Read the streams when the epoll wakes the loop; begin ticks if two wake-ups are close
        together.
        """
        before_s, self._woken_s = self._woken_s, self._loop.time()
        self._read()
        if self._woken_s - before_s < 2 * self._tick_s:
            self._loop.remove_reader(self._epoll.fileno())
            self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _tick(self) -> None:
        if self._read() > 1:
            self._timer = self._loop.call_later(self._tick_s, self._tick)
            return
        self._timer = None
        self._loop.add_reader(self._epoll.fileno(), self._woken)

    def _read(self) -> int:
        """Read all received bytes; return the number of streams that had some."""
        found = self._epoll.poll(0, _MOST_AT_ONCE)
        for descriptor, _ in found:
            # The read of an earlier source may have ended this source.
            if (source := self._sources.get(descriptor)) is None:
                continue
            try:
                source.read()
            # Pass the bug to the loop's handler: it must not affect other streams.
            except Exception as bug:
                context = {"message": "a steady stream was not read", "exception": bug}
                self._loop.call_exception_handler(context)
                source.end_steady()
        return len(found)
