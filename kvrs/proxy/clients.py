"""The client's side of a stream: events written as they come, or gathered into one answer."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from kvrs.errors import KvrsError
from kvrs.protocol.openai import DONE, Choice, Completion, sse
from kvrs.proxy.journal import Journal

# More than this unsent: wait for the client to read before asking the engine's stream for more.
_UNSENT_BYTES = 64 << 10
# Above anything that one write can add to it, so that aiohttp itself never waits: its wait does not survive the
# cancellation of an attempt, ours does.
_TRANSPORT_LIMIT_BYTES = 16 << 20
_LOOK_AGAIN_S = 0.02


class ClientGoneError(KvrsError):
    """The client closed its connection, or did not read for too long."""


class Client(Protocol):
    """Where a stream's events go."""

    @property
    def blocked(self) -> bool:
        """Whether a write is waiting for the client to read; the engine's silence is not its fault then."""

    async def send(self, events: Sequence[bytes]) -> None:
        """Pass JSON payloads on; raises ClientGoneError."""


class SseClient:
    """A client that asked for a stream. Headers go out with the first event, so that earlier errors have a status."""

    def __init__(self, request: web.Request, write_timeout_s: float, clock: Callable[[], float]) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._clock = clock
        self.blocked = False
        self.response: web.StreamResponse | None = None

    async def send(self, events: Sequence[bytes]) -> None:
        await self._write(b"".join(map(sse, events)))

    async def end(self, missing: Sequence[bytes]) -> web.StreamResponse:
        """The regular end of a complete stream, after the events that it still lacks."""
        await self._write(b"".join(map(sse, missing)) + DONE)
        assert self.response is not None
        await self.response.write_eof()
        return self.response

    async def fail(self, error: bytes) -> web.StreamResponse:
        """An explicit error, then the end of the connection; no [DONE], for the stream is not complete."""
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
        # Only after the write: the journal already counts these tokens, and this wait may be cancelled.
        if transport.get_write_buffer_size() > _UNSENT_BYTES:
            await self._wait_for_reader(transport)

    async def _open(self) -> web.StreamResponse:
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        if self._request.transport is not None:
            self._request.transport.set_write_buffer_limits(high=_TRANSPORT_LIMIT_BYTES)
        await self.response.prepare(self._request)
        return self.response

    async def _wait_for_reader(self, transport: asyncio.WriteTransport) -> None:
        deadline_s = self._clock() + self._write_timeout_s
        self.blocked = True
        try:
            while transport.get_write_buffer_size() > _UNSENT_BYTES and not transport.is_closing():
                if self._clock() > deadline_s:
                    transport.abort()
                    raise ClientGoneError(f"the client did not read for {self._write_timeout_s} s")
                await asyncio.sleep(_LOOK_AGAIN_S)
        finally:
            self.blocked = False


class _TextChoice(msgspec.Struct):
    text: str = ""


class _TextEvent(msgspec.Struct):
    choices: list[_TextChoice] = []


class _Head(msgspec.Struct):
    id: str
    created: int
    model: str


_TEXT = msgspec.json.Decoder(_TextEvent)
_HEAD = msgspec.json.Decoder(_Head)


class WholeClient:
    """A client that asked for one answer: the proxy streams all the same, so that this request can recover too."""

    blocked = False

    def __init__(self) -> None:
        self._texts: list[str] = []

    async def send(self, events: Sequence[bytes]) -> None:
        for event in events:
            self._texts += [choice.text for choice in _TEXT.decode(event).choices]

    def answer(self, journal: Journal) -> bytes:
        """The body for a complete stream."""
        assert journal.head is not None
        head = _HEAD.decode(journal.head + b"}")
        choice = Choice(text="".join(self._texts), finish_reason=journal.finish_reason, stop_reason=journal.stop_reason)
        if journal.request.return_token_ids:
            choice.prompt_token_ids = journal.prompt_ids or []
            choice.token_ids = journal.output_ids
        return msgspec.json.encode(Completion(head.id, head.created, head.model, [choice], usage=journal.usage))
