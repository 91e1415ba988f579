"""Messages between a supervisor and one worker, over a pair of sockets that the worker inherits.

A frame is its length (4 bytes), then MessagePack: what it is, its number, a name and a body. Either
side asks and answers; the end of the connection is the end of the other process.
"""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import cast

import msgspec

from kvrs.errors import KvrsError

_LENGTH = struct.Struct("!I")


class ChannelError(KvrsError):
    """The other side is gone, does not answer in time, or failed to answer."""


class _Frame(msgspec.Struct, array_like=True):
    kind: int
    number: int  # Of the question; an answer has that of its question.
    name: str
    body: bytes


_TOLD, _ASKED, _ANSWER, _FAILED = range(4)
_decoder = msgspec.msgpack.Decoder(_Frame)

Handler = Callable[[bytes], bytes | Awaitable[bytes]]


class Channel(asyncio.Protocol):
    """One end. `handlers` answer what the other side asks or tells, by name; one that returns bytes
    answers before the next message is read.
    """

    def __init__(self, handlers: dict[str, Handler], lost: Callable[[], None]) -> None:
        self._handlers = handlers
        self._lost = lost
        self._numbers = count()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        end.setblocking(False)
        await loop.create_connection(lambda: self, sock=end)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def tell(self, name: str, body: bytes = b"") -> None:
        self._send(_Frame(_TOLD, 0, name, body))

    async def ask(self, name: str, body: bytes = b"", timeout_s: float | None = None) -> bytes:
        """The answer.

        Raises:
            ChannelError: there is none.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await self.question(name, body)
        except TimeoutError:
            raise ChannelError(f"no answer to {name!r} within {timeout_s} s") from None

    def question(self, name: str, body: bytes) -> asyncio.Future[bytes]:
        """What becomes the answer, or ChannelError.

        Raises:
            ChannelError: the other process is gone.
        """
        if self._transport is None or self._transport.is_closing():
            raise ChannelError("the other process is gone")
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        answer.add_done_callback(lambda _: self._asked.pop(number, None))
        self._send(_Frame(_ASKED, number, name, body))
        return answer

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for answer in list(self._asked.values()):
            if not answer.done():
                answer.set_exception(ChannelError("the other process is gone"))
        for task in self._answering:
            task.cancel()
        self._lost()

    def data_received(self, data: bytes) -> None:
        self._received += data
        at = 0
        while len(self._received) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, at)
            end = at + _LENGTH.size + length
            if end > len(self._received):
                break
            self._take(_decoder.decode(self._received[at + _LENGTH.size : end]))
            at = end
        if at:
            del self._received[:at]

    def _take(self, frame: _Frame) -> None:
        match frame.kind:
            case 2 | 3:
                answer = self._asked.get(frame.number)
                if answer is None or answer.done():
                    return
                if frame.kind == _ANSWER:
                    answer.set_result(frame.body)
                else:
                    answer.set_exception(ChannelError(frame.body.decode()))
            case _:
                found = self._handlers[frame.name](frame.body)
                if not isinstance(found, bytes):
                    task = asyncio.ensure_future(self._finish(frame, found))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                elif frame.kind == _ASKED:
                    self._send(_Frame(_ANSWER, frame.number, "", found))

    async def _finish(self, frame: _Frame, work: Awaitable[bytes]) -> None:
        with suppress(asyncio.CancelledError):
            try:
                answer = _Frame(_ANSWER, frame.number, "", await work)
            except KvrsError as error:
                answer = _Frame(_FAILED, frame.number, "", str(error).encode())
            if frame.kind == _ASKED:
                self._send(answer)

    def _send(self, frame: _Frame) -> None:
        if self._transport is not None and not self._transport.is_closing():
            body = msgspec.msgpack.encode(frame)
            self._transport.write(_LENGTH.pack(len(body)) + body)
