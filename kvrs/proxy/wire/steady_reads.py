"""Reads of many streams in one turn of the event loop, so that their tokens share its wake-up.

Connections over which tokens come steadily lie in an epoll of their own, below that of the event
loop, as `proxy.coalesce_ms` says. While tokens are far apart it wakes the loop as any connection
does. Once two wake-ups follow each other closely, the loop looks at it once a tick instead: a token
waits for half a tick on average, and so does the end of its stream. Requests and first tokens never
wait.
"""

import asyncio
import select
from contextlib import suppress
from typing import Protocol

_MOST_AT_ONCE = 1024
# So few streams share no wake-up, and each read costs a little more here than on the loop itself.
LEAST_STREAMS = 16


class SteadySource(Protocol):
    def read(self) -> None:
        """Take the next bytes, or the end, which have come."""

    def end_steady(self) -> None:
        """Call `SteadyReads.end`, and be read by the event loop from then on."""


class SteadyReads:
    """The steady connections of one event loop."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._sources: dict[int, SteadySource] = {}  # By descriptor.
        self._streams = 0  # Steady ones, of which the first few are left to the loop.
        self._woken_s = 0.0
        self._timer: asyncio.TimerHandle | None = None  # None: the epoll wakes the loop.
        self._loop.add_reader(self._epoll.fileno(), self._woken)

    def begin(self, transport: asyncio.Transport, source: SteadySource) -> int | None:
        """A stream is steady: read its connection here, and the loop no more. Return its
        descriptor; None: the loop is to go on, with one of the first few streams, a connection
        with TLS, or one for which the system has no room in the epoll.
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
        """The stream of `begin` is over, or not steady any more, or its client has to read first:
        its connection stays as it is, paused if it has a descriptor.
        """
        self._streams -= 1
        if descriptor is not None and self._sources.get(descriptor) is source:
            del self._sources[descriptor]
            with suppress(OSError):  # It is closed.
                self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Leave all connections to the loop: calls that run go on to their end."""
        if self._epoll.closed:
            return
        for source in [*self._sources.values()]:
            source.end_steady()
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _woken(self) -> None:
        """Bytes have come, and no tick runs."""
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
        """Read what has come; return how many streams had something to read."""
        found = self._epoll.poll(0, _MOST_AT_ONCE)
        for descriptor, _ in found:
            # One before it may have ended this one.
            if (source := self._sources.get(descriptor)) is None:
                continue
            try:
                source.read()
            except Exception as bug:  # The loop is to treat it, without the other streams.
                context = {"message": "a steady stream was not read", "exception": bug}
                self._loop.call_exception_handler(context)
                source.end_steady()
        return len(found)
