"""Memory that processes of a host share: files, and descriptors of them.

UNIX sockets in a directory, over which processes of a host pass descriptors.

Memory shared between processes: files that are allocated before writing, mapped by each process
with a descriptor, and locked while in use.
"""

import array
import asyncio
import errno
import fcntl
import mmap
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvrs.errors import KvrsError
from kvrs.process.memory import free_bytes, free_in_groups

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


# Work on at most this many bytes runs in the calling thread: it takes less time than a switch of
# threads.
_SMALL_BYTES = 1 << 20
_LOCK_POLL_S = 0.002


class Region:
    """An open, fully mapped file of memory. Its descriptor is closed by `close` or with the object;
    its bytes exist while a process has them mapped or open, or while they have a name.
    """

    def __init__(self, descriptor: int, memory: mmap.mmap | None = None) -> None:
        """Take over a writable descriptor. `memory`: an existing mapping of the whole file; None:
        it is mapped now.
        """
        self.descriptor = descriptor
        # A finalizer closes the descriptor only once, although `close` may be called again, or
        # never.
        self.close = weakref.finalize(self, os.close, descriptor)
        self.close.atexit = False
        self.memory = mmap.mmap(descriptor, 0) if memory is None else memory
        self.size_bytes = len(self.memory)

    @classmethod
    def anonymous(cls, name: str, size_bytes: int) -> "Region":
        """Make memory without a file name, which is released with the last process that has it open
        or mapped.

        Raises:
            KvrsError: not enough memory.
        """
        refused = f"no room for {size_bytes} bytes of shared memory ({name})"
        # Without this check the kernel would kill processes, this one or others, to find memory.
        if size_bytes > (free := free_bytes()):
            raise KvrsError(f"{refused}: {free} are free")
        descriptor = os.memfd_create(name)
        try:
            os.posix_fallocate(descriptor, 0, max(size_bytes, mmap.PAGESIZE))
        except OSError as error:
            os.close(descriptor)
            raise KvrsError(f"{refused}: {error.strerror}") from None
        return cls(descriptor)

    def open(self) -> int:
        """Return a new read-only descriptor of the file, which does not share this descriptor's
        lock.
        """
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def shared(self) -> "Region":
        """Return a second object for the same memory, which its owner closes separately."""
        return Region(os.dup(self.descriptor), self.memory)

    def drop(self, first: int = 0, stop: int | None = None) -> None:
        """Release the memory of all whole pages between these offsets; they then read as zeros,
        also in other processes. `stop` None: the end of the file.
        """
        first = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = self.size_bytes if stop is None else stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < stop:
            self.memory.madvise(mmap.MADV_REMOVE, first, stop - first)


def reserve(descriptor: int, first: int, size_bytes: int) -> None:
    """Allocate memory for a range of a file, which may extend the file.

    Raises:
        OSError: there is not enough memory. Without allocation a write into the mapped file would
            then kill the process.
    """
    found = os.fstat(descriptor)
    missing = max(0, max(found.st_size, first + size_bytes) - found.st_blocks * 512)
    # Beyond a control group's limit the kernel would kill this process.
    if min(size_bytes, missing) > free_in_groups():
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    os.posix_fallocate(descriptor, first, size_bytes)


def map_file(
    descriptor: int, size_bytes: int = 0, *, writable: bool = True, populated: bool = False
) -> mmap.mmap:
    """Map a file, or its first bytes, and close the descriptor. The mapping keeps the file open,
    and its lock held. `populated`: the kernel prepares all pages now, so that their first use costs
    no page fault.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populated else 0)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        return mmap.mmap(descriptor, size_bytes, flags, access)
    finally:
        os.close(descriptor)


def lock(descriptor: int, wait_s: float = 0.0) -> bool:
    """Lock a file description, which all processes with copies of the descriptor share; the kernel
    releases the lock with the last of their descriptors and mappings. Returns False if another
    description has held the lock for `wait_s`.
    """
    give_up_s = time.monotonic() + wait_s
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= give_up_s:
            return False
        time.sleep(_LOCK_POLL_S)


async def in_threads(
    size_bytes: int,
    parts: Sequence[Callable[[], object]],
    stop: Callable[[], object] = lambda: None,
) -> None:
    """Run the parts of work on `size_bytes`: each in a thread, or here if there are few bytes. A
    cancelled call calls `stop`, and returns once all parts have ended.
    """
    if size_bytes <= _SMALL_BYTES:
        for part in parts:
            part()
        return
    work = asyncio.gather(*(asyncio.to_thread(part) for part in parts))
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        stop()
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait({work})
        raise
