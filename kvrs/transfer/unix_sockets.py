"""UNIX sockets in an agent's directory, over which processes of its host get descriptors."""

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from kvrs.transfer.store.directory import StoreDirectory

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def listen_in(directory: StoreDirectory, name: str, kind: socket.SocketKind) -> socket.socket:
    """Raises OSError: the socket cannot be made."""
    with suppress(FileNotFoundError):
        directory.unlink(name)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(_path(directory.fd, name))
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_in(directory: Path, name: str, connection: socket.socket) -> None:
    """Raises OSError: there is no such directory, or no process listens in it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        connection.connect(_path(fd, name))
    finally:
        os.close(fd)


def foreign_user(connection: socket.socket) -> str | None:
    """Why the process at the other end may not be served; None: it is of this user, by the
    kernel's word.
    """
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(packed)
    if uid == os.geteuid():
        return None
    return f"it is of user {uid}; allowed: user {os.geteuid()}"


def _path(directory_fd: int, name: str) -> str:
    """Short enough for the kernel, however long the path of the directory is."""
    return str(Path("/proc/self/fd") / str(directory_fd) / name)
