"""UNIX sockets in a directory, over which processes of a host pass descriptors."""

import array
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # The kernel's report of the other end: pid, uid, gid.
_DESCRIPTOR_BYTES = array.array("i").itemsize
# Flags of `recvmsg` as plain numbers, because an operation on the enum's members takes longer than
# the system call.
_CLOEXEC, _NO_ROOM, _CUT = map(int, (socket.MSG_CMSG_CLOEXEC, socket.MSG_CTRUNC, socket.MSG_TRUNC))


def listen_in(directory: Path, name: str, kind: socket.SocketKind) -> socket.socket:
    """Make a listening UNIX socket in a directory. Raises OSError: it cannot be made."""
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        with opened(directory) as inside:
            bind_at(inside, name, listener)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def bind_at(directory: int, name: str, listener: socket.socket) -> None:
    """Bind a socket in an open directory, in the place of one that was left there.

    Raises:
        OSError: the socket cannot be made.
    """
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    listener.bind(_path(directory, name))


def remove_in(directory: Path, name: str) -> None:
    """Unlink the socket of this name in a directory, if there is one."""
    with suppress(FileNotFoundError), opened(directory) as inside:
        os.unlink(name, dir_fd=inside)


def connect_in(directory: Path, name: str, connection: socket.socket) -> None:
    """Connect to the UNIX socket of this name in a directory. Raises OSError: there is no such
    directory, or no process listens there.
    """
    with opened(directory) as inside:
        connect_at(inside, name, connection)


def connect_at(directory: int, name: str, connection: socket.socket) -> None:
    """Connect to the UNIX socket of this name in an open directory. Raises OSError: no process
    listens there.
    """
    connection.connect(_path(directory, name))


def foreign_user(connection: socket.socket) -> str | None:
    """Return the reason why the process at the other end may not be served; None: it runs as this
    process's user.
    """
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(packed)
    if uid == os.geteuid():
        return None
    return f"it is of user {uid}; allowed: user {os.geteuid()}"


def rights(descriptors: Sequence[int]) -> "list[tuple[int, int, array.array[int]]]":
    """Return the control data by which `sendmsg` sends copies of descriptors with a message's first
    byte.
    """
    if not descriptors:
        return []
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]


def receive(
    connection: socket.socket, view: "memoryview | bytearray", found: list[int], most: int
) -> int:
    """Receive into `view` like `recv_into`, and add received descriptors to `found`, which the
    caller closes even after an error. Processes forked meanwhile do not inherit them.

    Raises:
        OSError: there are more than `most` in `found`, or a message is longer than `view`.
    """
    room = socket.CMSG_SPACE(most * _DESCRIPTOR_BYTES)
    size, others, flags, _ = connection.recvmsg_into([view], room, _CLOEXEC)
    for level, kind, packed in others:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found += array.array("i", packed)
    if flags & _NO_ROOM or len(found) > most:
        raise OSError(f"more than {most} descriptors")
    if flags & _CUT:
        raise OSError(f"a message of more than {len(view)} bytes")
    return size


def close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    """Open a directory, which must not be a link, for the block. Raises OSError: it cannot be
    opened.
    """
    inside = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield inside
    finally:
        os.close(inside)


def _path(directory_fd: int, name: str) -> str:
    """Return a path of the name in an open directory that is short enough for a socket's
    address.
    """
    return str(Path("/proc/self/fd") / str(directory_fd) / name)
