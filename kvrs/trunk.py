"""Many connections in one: a trunk.

What an engine writes to all of them within a turn of its event loop, when it has computed a step,
leaves in one write and is read in one. What their client writes, a request now and then, leaves at
once. A connection needs no packet to begin.

After the proof of a connection its client sends PREFACE, and the server answers with it. Then both
send entries: the number of a connection, a kind and a size (4, 1 and 3 bytes), and so many bytes.
The client opens a connection with the first data of a number that is higher than all before.
"""

import asyncio
import errno
import logging
from collections.abc import Callable
from struct import Struct
from typing import Any, cast

log = logging.getLogger(__name__)

PREFACE = b"KVRS-TRUNK/1\r\n\r\n"
MOST_BYTES = 64 << 10  # Of an entry.
MOST_HELD_BYTES = 1 << 20  # Of a connection that is not read; one more ends it.
_MOST_CONNECTIONS = (1 << 32) - 1

_ENTRY = Struct(">II")
_DATA, _PAUSE, _RESUME, _CLOSE, _RESET = (kind << 24 for kind in range(5))

Accept = Callable[[], asyncio.Protocol]


class Trunk(asyncio.Protocol):
    """One end. `accept` makes the protocol of a connection that the other end has opened; None:
    it may open none. `lost` is called once the trunk has ended, before its connections hear of
    it.
    """

    def __init__(self, accept: Accept | None, lost: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._accept = accept
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._connections: dict[int, TrunkConnection] = {}
        self._last = 0  # The highest number that was used.
        self._rest = b""
        self._unsent: list[bytes] = []  # Written in this turn.
        self._is_retired = False
        self.is_full = False  # No more is to be written.

    @property
    def is_open(self) -> bool:
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._last < _MOST_CONNECTIONS
        )

    def connect(self, protocol: asyncio.Protocol) -> None:
        """Open a connection."""
        self._add(self._last + 1, protocol)

    def retire(self) -> None:
        """End with the last of the connections, of which no more are opened."""
        self._is_retired = True
        if not self._connections:
            self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def send(self, number: int, kind: int, data: bytes = b"") -> None:
        head = _ENTRY.pack(number, kind | len(data))
        if self._accept is None:
            if self._transport is not None:
                self._transport.write(head + data)
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent += (head, data)

    @property
    def unsent_bytes(self) -> int:
        waiting = 0 if self._transport is None else self._transport.get_write_buffer_size()
        return waiting + sum(map(len, self._unsent))

    def extra(self, name: str, default: Any) -> Any:
        return default if self._transport is None else self._transport.get_extra_info(name, default)

    def forget(self, number: int) -> None:
        self._connections.pop(number, None)
        if self._is_retired and not self._connections:
            self._loop.call_soon(self.abort)  # Its last entry has left by then.

    def _add(self, number: int, protocol: asyncio.Protocol) -> "TrunkConnection":
        self._last = number
        made = self._connections[number] = TrunkConnection(self, number, protocol, self._loop)
        protocol.connection_made(made)
        if self.is_full:
            made.room_changed()
        return made

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do what asyncio's do, and descend from none of them.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        at, size, connections, unpack = 0, len(data), self._connections, _ENTRY.unpack_from
        while size - at >= 8:
            number, word = unpack(data, at)
            if word > MOST_BYTES:  # Of another kind than data.
                if not self._take_rare(number, word):
                    return
                at += 8
                continue
            end = at + 8 + word
            if end > size:
                break
            found = connections.get(number)
            if found is None:
                if number <= self._last:  # It was closed here meanwhile.
                    at = end
                    continue
                if self._accept is None:
                    self._fail("it opens a connection")
                    return
                found = self._add(number, self._accept())
            found.received(data[at + 8 : end])
            at = end
        self._rest = data[at:]

    def _take_rare(self, number: int, word: int) -> bool:
        """One of the entries without data."""
        found = self._connections.get(number)
        match word:
            case _ if word not in (_PAUSE, _RESUME, _CLOSE, _RESET):
                self._fail(f"an entry of kind {word >> 24} and {word & 0xFFFFFF} bytes")
                return False
            case _ if found is None:
                pass
            case _ if word in (_PAUSE, _RESUME):
                found.peer_paused = word == _PAUSE
                found.room_changed()
            case _:
                found.ended(_reset() if word == _RESET else None)
        return True

    def _fail(self, cause: str) -> None:
        log.warning("trunk ended: %s", cause)
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._unsent.clear()
        self._lost()
        for connection in list(self._connections.values()):
            connection.ended(exc)
        self._connections.clear()

    def pause_writing(self) -> None:
        self._room_changed(is_full=True)

    def resume_writing(self) -> None:
        self._room_changed(is_full=False)

    def _room_changed(self, *, is_full: bool) -> None:
        self.is_full = is_full
        for connection in list(self._connections.values()):
            connection.room_changed()


class TrunkConnection(asyncio.Transport):
    """One end of a connection within a trunk, as its protocol sees it."""

    __slots__ = (
        *("_trunk", "_has_ended", "_held", "_is_closing", "_is_full", "_loop"),
        *("_number", "_protocol", "_reads", "peer_paused"),
    )

    def __init__(
        self,
        trunk: Trunk,
        number: int,
        protocol: asyncio.Protocol,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._trunk = trunk
        self._number = number
        self._protocol = protocol
        self._loop = loop
        self._reads = True
        self._held: bytearray | None = None  # What came while it was not read.
        self._has_ended = False  # By the other end, behind what is held.
        self._is_closing = False
        self._is_full = False  # As the protocol was told.
        self.peer_paused = False

    # What the trunk tells.

    def received(self, data: bytes) -> None:
        if not self._reads or self._held is not None:
            if not self._is_closing:
                self._hold(data)
            return
        try:
            self._protocol.data_received(data)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": "a connection of a trunk", "exception": error, "transport": self}
            )
            self.abort()

    def _hold(self, data: bytes) -> None:
        if self._held is None:
            self._held = bytearray()
        self._held += data
        if len(self._held) > MOST_HELD_BYTES:
            self.abort()

    def ended(self, exc: Exception | None) -> None:
        """By the other end, or with the trunk."""
        if self._is_closing:
            return
        if self._held is not None and exc is None and self._trunk.is_open:
            self._has_ended = True
            return
        self._is_closing = True
        self._trunk.forget(self._number)
        self._protocol.connection_lost(exc)

    def room_changed(self) -> None:
        is_full = self._trunk.is_full or self.peer_paused
        if is_full is not self._is_full and not self._is_closing:
            self._is_full = is_full
            (self._protocol.pause_writing if is_full else self._protocol.resume_writing)()

    # What the protocol calls.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or not data:
            return
        if len(data) <= MOST_BYTES:
            self._trunk.send(self._number, _DATA, bytes(data))
            return
        for at in range(0, len(data), MOST_BYTES):
            self._trunk.send(self._number, _DATA, bytes(data[at : at + MOST_BYTES]))

    def close(self) -> None:
        self._close(_CLOSE)

    def abort(self) -> None:
        self._close(_RESET)

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        if self._reads and not self._is_closing:
            self._reads = False
            self._trunk.send(self._number, _PAUSE)

    def resume_reading(self) -> None:
        if not self._reads and not self._is_closing:
            self._reads = True
            self._trunk.send(self._number, _RESUME)
            if self._held is not None:
                self._loop.call_soon(self._deliver_held)

    def is_reading(self) -> bool:
        return self._reads and not self._is_closing

    def get_write_buffer_size(self) -> int:
        return self._trunk.unsent_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Those of the trunk count."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._trunk.extra(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def _close(self, kind: int) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._reads = False
        self._held = None
        self._trunk.send(self._number, kind)
        self._trunk.forget(self._number)
        self._loop.call_soon(self._protocol.connection_lost, None)

    def _deliver_held(self) -> None:
        while self._reads and self._held is not None and not self._is_closing:
            held, self._held = bytes(self._held), None
            self.received(held)
        if self._has_ended and self._held is None:
            self.ended(None)


def _reset() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
