"""When bytes arrived at a socket, by the kernel's account. A reader that got no CPU for a while
finds much at once, as if the link had brought it in no time.
"""

import socket
import struct

# struct tcp_info of Linux: milliseconds since the last data came, and bytes received in order.
_LAST_DATA_MS = struct.Struct("=52xI")
_BYTES_RECEIVED = struct.Struct("=128xQ")
_INFO_BYTES = _BYTES_RECEIVED.size
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)


class Arrivals:
    """Bytes that have arrived at a connected TCP socket, whether they were read or not."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._seen = 0
        self.look(0.0)

    def look(self, now_s: float) -> tuple[int, float] | None:
        """The bytes that arrived since the last look, and when the last of all bytes arrived, on
        the clock of `now_s`, to a tick of the kernel (1 to 10 ms); None: the system does not tell.
        """
        if _TCP_INFO is None:
            return None
        try:
            info = self._sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
        except OSError:
            return None
        if len(info) < _INFO_BYTES:
            return None
        (total,), (silent_ms,) = _BYTES_RECEIVED.unpack_from(info), _LAST_DATA_MS.unpack_from(info)
        new, self._seen = total - self._seen, total
        return new, now_s - silent_ms / 1000

    @property
    def buffer_bytes(self) -> int:
        """How much can arrive before it is read."""
        return self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
