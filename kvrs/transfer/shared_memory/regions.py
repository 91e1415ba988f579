"""Memory shared between processes: files that are allocated before writing, mapped by each process
with a descriptor, and locked while in use.
"""

import asyncio
import errno
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvrs.errors import KvrsError
from kvrs.process.memory import free_bytes, free_in_groups

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
