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
    return _listen(directory.fd, name, kind)


def listen_at(directory: Path, name: str, kind: socket.SocketKind) -> socket.socket:
    """The same, of a process beside the agent whose directory it is."""
    fd = _opened(directory)
    try:
        return _listen(fd, name, kind)
    finally:
        os.close(fd)


def _listen(directory_fd: int, name: str, kind: socket.SocketKind) -> socket.socket:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory_fd)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        listener.bind(_path(directory_fd, name))
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_in(directory: Path, name: str, connection: socket.socket) -> None:
    """Raises OSError: there is no such directory, or no process listens in it."""
    fd = _opened(directory)
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


def _opened(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _path(directory_fd: int, name: str) -> str:
    """Short enough for the kernel, however long the path of the directory is."""
    return str(Path("/proc/self/fd") / str(directory_fd) / name)
