"""Arrival times of a socket's bytes, by the kernel's account. A reader that had no CPU for a while
finds many bytes at once, as if the link had brought them in no time.
"""

import socket
import struct
import time
from math import inf
from typing import NamedTuple

# Fields of Linux' struct tcp_info: milliseconds since the last data arrived, and number of bytes
# received in order.
_LAST_DATA_MS = struct.Struct("=52xI")
_BYTES_RECEIVED = struct.Struct("=128xQ")
_INFO_BYTES = _BYTES_RECEIVED.size
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)


# Longest tick of a kernel's clock of 250 Hz or more: bytes that are not older count as just
# arrived.
_TICK_S = 0.004

# Below this number of unread bytes the socket's buffer has room, so that no sender waits.
_LEAST_BUFFER_BYTES = 1 << 15


class Arrived(NamedTuple):
    bytes: int  # Bytes that arrived since the last call of `look`.
    at_s: float  # Arrival time of the last byte.
    waited_s: float  # Time before these bytes in which the sender waited for the reader.


class Arrivals:
    """Counts the bytes that have arrived at a connected TCP socket, whether or not they were read,
    and tells when. Times are those of `time.monotonic`.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._seen = 0
        self._waited_s = 0.0  # Waiting time of the sender that `look` has not returned yet.
        self._waited_until_s = -inf  # End of the sender's last waiting time.
        self.look()

    def reading(self, read_bytes: int) -> None:
        """Note that the owner has read `read_bytes` and is about to read more. If the sender has
        waited for this room in the buffer, the time since the last arrival counts as waiting, not
        as the link's.
        """
        try:
            now_s, info = time.monotonic(), self._info()
            if info is None or info[0] - read_bytes < _LEAST_BUFFER_BYTES:
                return
            buffer_bytes = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        except OSError:
            return
        total, silent_s = info
        if total - read_bytes >= buffer_bytes // 2:
            self._waited_s += now_s - max(self._waited_until_s, now_s - silent_s)
            self._waited_until_s = now_s

    def look(self) -> Arrived | None:
        """Return the bytes that arrived since the last call; None: not reported by the system.

        The kernel counts the silence since the last bytes in ticks of its clock (1 to 10 ms). After
        a silence of at most one tick, the bytes are taken to have arrived at this call.
        """
        try:
            now_s, info = time.monotonic(), self._info()
        except OSError:
            return None
        if info is None:
            return None
        total, silent_s = info
        new, self._seen = total - self._seen, total
        at_s = now_s if silent_s <= _TICK_S else now_s - silent_s
        waited_s = 0.0
        # Bytes that arrived right after the sender's wait may seem a tick older than the wait's
        # end.
        if new and at_s + _TICK_S >= self._waited_until_s:
            waited_s, self._waited_s = self._waited_s, 0.0
        return Arrived(new, at_s, waited_s)

    def _info(self) -> tuple[int, float] | None:
        """Return the number of bytes that ever arrived, and the seconds since the last of them;
        None: the kernel does not report them.
        """
        if _TCP_INFO is None:
            return None
        info = self._sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        if len(info) < _INFO_BYTES:
            return None
        (total,), (silent_ms,) = _BYTES_RECEIVED.unpack_from(info), _LAST_DATA_MS.unpack_from(info)
        return total, silent_ms / 1000
