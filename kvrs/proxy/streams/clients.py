"""The client's side of a stream: events written as they come."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from kvrs.errors import KvrsError
from kvrs.ids import StreamId
from kvrs.protocol.mirror import StreamEvent
from kvrs.protocol.openai.chunks import DONE, sse
from kvrs.proxy.wire.downstream import ClientRequest, StreamedResponse

_COMMENT = b": keep-alive\n\n"


# The token, its event, the time.
TakeToken = Callable[[int, bytes, float], None]


class ClientGoneError(KvrsError):
    """The client closed its connection, or did not read for too long."""


class Client(Protocol):
    """The destination of a stream's events."""

    @property
    def blocked(self) -> bool:
        """The client has to read before it is given more, which excuses the engine's silence."""

    @property
    def direct(self) -> "SseClient | None":
        """The client on whose connection an event may lie as it is, in a chunk of its own."""

    @property
    def take_token(self) -> "TakeToken | None":
        """Takes an event of one token, which is in the journal, as `send` would."""

    def send(self, events: Sequence[bytes]) -> None:
        """Send JSON payloads; raises ClientGoneError."""

    def when_free(self, resume: Callable[[], None]) -> None:
        """Call this once, when a client that is blocked is so no more."""


class SseClient:
    """A client that gets a stream. Headers are sent with the first event, or with a comment that
    keeps the connection open, so that earlier errors have a status.
    """

    __slots__ = (
        *("_gone", "_headers", "_is_over", "_patience", "_request", "_waiting"),
        *("_write_timeout_s", "blocked", "response", "was_silent"),
    )

    take_token = None

    def __init__(
        self, request: ClientRequest, write_timeout_s: float, headers: Mapping[str, str]
    ) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._headers = headers
        self._waiting: tuple[Callable[[], None], ...] = ()
        self._patience: asyncio.TimerHandle | None = None
        self._gone: str | None = None
        self._is_over = False
        self.blocked = False
        self.was_silent = False  # Since the last look at it.
        self.response: StreamedResponse | None = None

    @property
    def direct(self) -> "SseClient | None":
        return None if self.chunked_to is None else self

    @property
    def chunked_to(self) -> asyncio.Transport | None:
        """Where the chunks of its response go; None: it has none, or has not begun."""
        return None if self.response is None else self.response.chunked_to

    def send(self, events: Sequence[bytes]) -> None:
        self._write(b"".join(map(sse, events)))

    def send_numbered(self, stream: StreamId, events: Sequence[StreamEvent]) -> None:
        """Send events as `send` does, with event ids, which a client that resumes sends back."""
        name = stream.encode()
        self._write(
            b"".join([b"id: %b:%d\ndata: %b\n\n" % (name, each.seq, each.data) for each in events])
        )

    @property
    def is_open(self) -> bool:
        """The response has begun, and its connection stands."""
        return self.response is not None and self.response.is_open

    def send_framed(self, data: bytes) -> None:
        """Send events that are framed already."""
        self._write(data)

    def when_free(self, resume: Callable[[], None]) -> None:
        self._waiting = (*self._waiting, resume)

    def break_silence(self) -> None:
        """Send a comment, which clients ignore, if nothing was sent since the last call."""
        if self.was_silent and not self.blocked and not self._is_over:
            with suppress(ClientGoneError):  # The end of its connection ends its stream.
                self._write(_COMMENT)
        self.was_silent = True

    async def end(self, missing: Sequence[bytes]) -> StreamedResponse:
        """Send the events that are missing and the end of a complete stream."""
        return await self._finish(b"".join(map(sse, missing)) + DONE)

    async def end_framed(self, data: bytes) -> StreamedResponse:
        """End a complete stream with events that are framed already, and no [DONE]."""
        return await self._finish(data or _COMMENT)

    async def fail(self, error: bytes) -> StreamedResponse:
        """Send an error, without the [DONE] of a complete stream."""
        return await self._finish(sse(error))

    async def _finish(self, data: bytes) -> StreamedResponse:
        self._is_over = True
        self._write(data, is_last=True)
        assert self.response is not None
        if self.blocked:
            read = asyncio.Event()
            self.when_free(read.set)
            await read.wait()
        return self.response

    def _write(self, data: bytes, *, is_last: bool = False) -> None:
        response = self.response or self._open()
        if not response.is_open:
            raise ClientGoneError(self._gone or "the client closed its connection")
        self.was_silent = False
        response.send(data, is_last=is_last)

    def _open(self) -> StreamedResponse:
        try:
            self.response = StreamedResponse(self._request, self._headers, self._room_changed)
        except ConnectionError as error:
            raise ClientGoneError(str(error)) from None
        return self.response

    def _room_changed(self, has_room: bool) -> None:
        self.blocked = not has_room
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if not has_room:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(self._write_timeout_s, self._give_up)
            return
        waiting, self._waiting = self._waiting, ()
        for resume in waiting:
            resume()

    def _give_up(self) -> None:
        # The loss of its connection cancels the request, and with it the stream.
        assert self.response is not None
        self._gone = f"the client did not read for {self._write_timeout_s} s"
        self.response.abort()
