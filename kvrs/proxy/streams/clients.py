"""The client's side of a stream: events written as they come."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from aiohttp import web

from kvrs.errors import KvrsError
from kvrs.ids import StreamId
from kvrs.protocol.mirror import StreamEvent
from kvrs.protocol.openai.chunks import DONE, sse

# More than this unsent: wait for the client to read before asking the engine's stream for more.
_UNSENT_BYTES = 64 << 10
# Above anything that one write can add to it, so that aiohttp never waits by itself: its wait does
# not survive the cancellation of an attempt, `_wait_for_reader` does.
_TRANSPORT_LIMIT_BYTES = 16 << 20
_LOOK_AGAIN_S = 0.02

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientGoneError(KvrsError):
    """The client closed its connection, or did not read for too long."""


class Client(Protocol):
    """The destination of a stream's events."""

    @property
    def blocked(self) -> bool:
        """Whether a write waits for the client to read, which excuses the silence of the engine."""

    async def send(self, events: Sequence[bytes]) -> None:
        """Send JSON payloads; raises ClientGoneError."""


class SseClient:
    """A client that gets a stream. Headers are sent with the first event, so that earlier errors
    have a status.
    """

    def __init__(
        self,
        request: web.Request,
        write_timeout_s: float,
        clock: Callable[[], float],
        headers: Mapping[str, str],
    ) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._clock = clock
        self._headers = headers
        self._waiting = 0  # Writers that wait; each choice has one.
        self.response: web.StreamResponse | None = None

    @property
    def blocked(self) -> bool:
        return self._waiting > 0

    async def send(self, events: Sequence[bytes]) -> None:
        await self._write(b"".join(map(sse, events)))

    async def send_numbered(self, stream: StreamId, events: Sequence[StreamEvent]) -> None:
        """As `send`, with event ids, which a client that resumes sends back."""
        await self._write(
            b"".join(
                b"id: %s:%d\n" % (stream.encode(), event.seq) + sse(event.data) for event in events
            )
        )

    async def end(self, missing: Sequence[bytes]) -> web.StreamResponse:
        """Send the events that are missing and the end of a complete stream."""
        await self._write(b"".join(map(sse, missing)) + DONE)
        assert self.response is not None
        await self.response.write_eof()
        return self.response

    async def fail(self, error: bytes) -> web.StreamResponse:
        """Send an error and close the connection, without the [DONE] of a complete stream."""
        assert self.response is not None
        await self._write(sse(error))
        self.response.force_close()
        await self.response.write_eof()
        return self.response

    async def _write(self, data: bytes) -> None:
        response = self.response or await self._open()
        transport = self._request.transport
        if transport is None:
            raise ClientGoneError("the client closed its connection")
        try:
            await response.write(data)
        except ConnectionError:
            raise ClientGoneError("the client closed its connection") from None
        # Only after the write: the journal already counts these tokens, and this wait may be
        # cancelled.
        if transport.get_write_buffer_size() > _UNSENT_BYTES:
            await self._wait_for_reader(transport)

    async def _open(self) -> web.StreamResponse:
        self.response = web.StreamResponse(headers=_HEADERS | dict(self._headers))
        if self._request.transport is not None:
            self._request.transport.set_write_buffer_limits(high=_TRANSPORT_LIMIT_BYTES)
        await self.response.prepare(self._request)
        return self.response

    async def _wait_for_reader(self, transport: asyncio.WriteTransport) -> None:
        deadline_s = self._clock() + self._write_timeout_s
        self._waiting += 1
        try:
            while transport.get_write_buffer_size() > _UNSENT_BYTES and not transport.is_closing():
                if self._clock() > deadline_s:
                    transport.abort()
                    raise ClientGoneError(f"the client did not read for {self._write_timeout_s} s")
                await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            self._waiting -= 1
