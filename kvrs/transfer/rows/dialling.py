"""Sockets of the row port: in a directory of the own host, and over TCP between nodes."""

import queue
import socket
import threading
from pathlib import Path
from typing import Any

from kvrs.transfer.peers import ROWS_SOCKET
from kvrs.transfer.shared_memory.passing import connect_in
from kvrs.transfer.stream import page_socket, tune

_BACKLOG = 128
# Bytes that are sent may stay unacknowledged so long before the other end counts as gone.
_GONE_S = 10.0


def dial_unix(directory: Path, timeout_s: float) -> socket.socket:
    """Raises OSError: no agent listens in the directory."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connect_in(directory, ROWS_SOCKET, connection)
    except BaseException:
        connection.close()
        raise
    return connection


def dial_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    """Raises OSError: no agent listens there, or its name is not known in time."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # A resolver may take far longer than the caller has.
    threading.Thread(
        target=lambda: found.put(_looked_up(host, port)), name="kvrs-names", daemon=True
    ).start()
    try:
        address = found.get(timeout=max(0.0, timeout_s))
    except queue.Empty:
        raise TimeoutError(f"{host} is not looked up in time") from None
    if isinstance(address, OSError):
        raise address
    connection = socket.create_connection(address[:2], max(0.001, timeout_s))
    tune(connection, _GONE_S)
    return connection


def _looked_up(host: str, port: int) -> Any:
    """The first address of a host, or the error."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        return error


def listen_tcp(host: str, port: int) -> socket.socket:
    """Raises OSError: the address cannot be had."""
    listener = page_socket(host)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(True)
    except BaseException:
        listener.close()
        raise
    return listener
