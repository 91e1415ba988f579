"""Sockets of the row port: in a directory of this host, and over TCP between nodes.

The directory belongs to the agent and holds only the socket. Processes of its group may connect:
the group of `backup.directory` if the agent's user is in it, else the agent's own. Neither end uses
a directory that others may write to or enter.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvrs.errors import ConfigError
from kvrs.transfer.shared_memory.passing import bind_at, connect_at, opened
from kvrs.transfer.store.directory import not_ours, open_to_others
from kvrs.transfer.stream import SEND_BUFFER_BYTES, page_socket, tune

_BACKLOG = 1024
# Pause before another try to connect to a socket whose queue is full.
_FULL_S = 0.005
# Seconds for which sent bytes may stay unacknowledged before TCP gives the connection up.
_GONE_S = 10.0
# Mode of the socket's directory, and bits that its mode must not have.
_MODE, _OTHERS = 0o750, 0o027
_SOCKET, _SOCKET_MODE = "rows", 0o660


def listen_unix(directory: Path) -> socket.socket:
    """Make the directory, if missing, and listen in it.

    Raises:
        ConfigError: the directory cannot be made, belongs to another user, or others may use it.
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
        # An OSError shows that this user is not in the group; then the own group is tried.
        with suppress(OSError):
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
    """Connect to the agent that listens in one of these directories: their names depend on the
    cluster's first secret, which may differ between the ends while secrets are rotated.

    Raises:
        OSError: as in `dial_unix`, for the last directory.
    """
    *others, last = directories
    for directory in others:
        with suppress(OSError):
            return dial_unix(directory, timeout_s)
    return dial_unix(last, timeout_s)


def dial_unix(directory: Path, timeout_s: float) -> socket.socket:
    """Connect to the agent that listens in a directory. Raises OSError: no agent listens there,
    this user may not enter the directory, or users outside the directory's group may.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        with opened(directory) as inside:
            # The kernel admits only root, the directory's owner and members of its group.
            if reason := open_to_others(os.fstat(inside), _OTHERS):
                raise PermissionError(reason)
            _connect_in_time(inside, connection, timeout_s)
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


def _connect_in_time(directory: int, connection: socket.socket, timeout_s: float) -> None:
    """Connect, also if the agent's queue is full for a moment: a UNIX socket with a time limit does
    not wait for room by itself. Raises OSError.
    """
    give_up_s = time.monotonic() + timeout_s
    while True:
        try:
            return connect_at(directory, _SOCKET, connection)
        except BlockingIOError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(_FULL_S)


def dial_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect over TCP. Raises OSError: no agent listens there, or its name did not resolve in
    time.
    """
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # The name is looked up in a thread, because the resolver may take longer than the caller can
    # wait.
    threading.Thread(
        target=lambda: found.put(_looked_up(host, port)), name="kvrs-names", daemon=True
    ).start()
    try:
        address = found.get(timeout=max(0.0, timeout_s))
    except queue.Empty:
        raise TimeoutError(f"no address of {host} in time") from None
    if isinstance(address, OSError):
        raise address
    connection = socket.create_connection(address[:2], max(0.001, timeout_s))
    tune(connection, _GONE_S)
    return connection


def _looked_up(host: str, port: int) -> Any:
    """Return the first address of a host, or the look-up's error instead of raising it."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4]
    except OSError as error:
        return error


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address. Raises OSError: it cannot be bound."""
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
