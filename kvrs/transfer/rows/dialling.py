"""Sockets of the row port: in a directory of the own host, and over TCP between nodes.

The directory is the agent's and holds the socket alone. Processes of its group may connect: that of
`backup.directory` if the agent's user is in it, else the agent's own. Neither end uses a directory
that others may write to, or enter.
"""

import os
import queue
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvrs.errors import ConfigError
from kvrs.transfer.shared_memory.passing import bind_at, connect_at, opened
from kvrs.transfer.store.directory import not_ours, open_to_others
from kvrs.transfer.stream import SEND_BUFFER_BYTES, page_socket, tune

_BACKLOG = 128
# Bytes that are sent may stay unacknowledged so long before the other end counts as gone.
_GONE_S = 10.0
_MODE, _OTHERS = 0o750, 0o027  # Of the directory, and what its mode must not have.
_SOCKET, _SOCKET_MODE = "rows", 0o660


def listen_unix(directory: Path) -> socket.socket:
    """Make the directory if there is none, and listen in it.

    Raises:
        ConfigError: it cannot be made, belongs to another user, or others may use it.
    """
    listener = socket.socket(socket.AF_UNIX)
    try:
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        with opened(directory) as inside:
            if reason := not_ours(os.fstat(inside), _OTHERS):
                raise PermissionError(reason)
            bind_at(inside, _SOCKET, listener)
            os.chmod(_SOCKET, _SOCKET_MODE, dir_fd=inside)
            _give_to_group(inside)
            os.fchmod(inside, _MODE)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"backup.directory: {directory}: {error.strerror or error}; allowed: a directory of "
            f"this user, mode {_MODE:04o}"
        ) from None
    return listener


def _give_to_group(directory: int) -> None:
    for group in (os.stat("..", dir_fd=directory).st_gid, os.getegid()):
        with suppress(OSError):  # This user is not in it.
            os.chown(_SOCKET, -1, group, dir_fd=directory, follow_symlinks=False)
            os.fchown(directory, -1, group)
            return


def remove_unix(directory: Path) -> None:
    """Remove the directory and the socket in it, if they are this user's."""
    with suppress(OSError), opened(directory) as inside:
        if not_ours(os.fstat(inside), _OTHERS) is None:
            os.unlink(_SOCKET, dir_fd=inside)
            os.rmdir(directory)


def dial_first(directories: Sequence[Path], timeout_s: float) -> socket.socket:
    """Connect to the agent that listens in one of these: the name of a directory follows the
    cluster's first secret, and while secrets are rotated both ends may have another first one.

    Raises:
        OSError: as `dial_unix`, of the last directory.
    """
    *others, last = directories
    for directory in others:
        with suppress(OSError):
            return dial_unix(directory, timeout_s)
    return dial_unix(last, timeout_s)


def dial_unix(directory: Path, timeout_s: float) -> socket.socket:
    """Raises OSError: no agent listens in the directory, this user may not enter it, or others than
    its group may.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        with opened(directory) as inside:
            # The kernel has let in root, the directory's owner or a member of its group, no other.
            if reason := open_to_others(os.fstat(inside), _OTHERS):
                raise PermissionError(reason)
            connect_at(inside, _SOCKET, connection)
    except PermissionError as error:
        connection.close()
        raise PermissionError(
            f"{directory}: {error.strerror or error}; allowed: a directory of mode {_MODE:04o} "
            f"whose owner or group this user has"
        ) from None
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
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(True)
    except BaseException:
        listener.close()
        raise
    return listener
