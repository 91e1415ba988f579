"""Limits of this process: memory and file descriptors that it can still have, and the collection of
garbage.

File descriptors of this process: their limit, and the number of connections that fit into it.

Memory that this process can still allocate: the kernel's free memory, within the limits of
control groups (cgroups), such as a container's.

Beyond such a limit the kernel kills a process of the group without warning.

Control of Python's garbage collection in a process that runs for long.
"""

import atexit
import ctypes
import errno
import gc
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Number of descriptors that a process has besides its connections: for libraries, listening
# sockets, logs and operators.
_ALWAYS_OPEN = 56
_FEWEST = 8


def raise_descriptor_limit() -> None:
    """Raise the soft limit on descriptors to the hard limit: the usual 1,024 is meant for
    select().
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return  # Kept as it is: some systems name a hard limit that no process can reach.


def descriptors_left(reserved: int) -> int:
    """Return how many connections fit into the limit on descriptors, beside `reserved`
    descriptors.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 20 if soft == resource.RLIM_INFINITY else soft
    return max(4 * _FEWEST, limit - _ALWAYS_OPEN - reserved)


def is_exhausted(error: OSError) -> bool:
    """Return whether an error means that the process or the machine has no free descriptor."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    # A resolver without a descriptor reads no file and asks no server, so it reports an unknown
    # name: by a negative error code, or by EBUSY where it also asks by multicast (mDNS).
    is_look_up = error.errno is not None and (error.errno < 0 or error.errno == errno.EBUSY)
    return is_look_up and not _can_open()


def _can_open() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
# By version of control groups: the files that hold a group's limit and its usage.
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
# By version of control groups: the fields of memory.stat that count cached files, which the kernel
# frees first. Files of tmpfs are not among them, since the kernel cannot free their memory.
_CACHED = {
    1: ("total_inactive_file", "total_active_file"),
    2: ("inactive_file", "active_file"),
}


_MMAP_THRESHOLD = -3  # Number of the option in glibc's malloc.h.
_LARGE_BLOCK_BYTES = 1 << 20


def return_large_blocks() -> None:
    """Have the C library return large blocks to the kernel as soon as they are freed. By default it
    learns to keep them, so that responses which many clients did not read would stay in the
    process's memory.
    """
    # musl, the other C library, has no such option.
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        set_option(_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)


def free_bytes() -> int:
    """Return the memory that the kernel can give to this process without swapping."""
    return min(_free_of_machine(), free_in_groups())


def free_in_groups(own: Path = _OWN_GROUPS, groups: Path = _GROUPS) -> int:
    """Return the memory left to this process within the limits of its control groups;
    `sys.maxsize`: no limit.
    """
    return min(
        (_free(folder, version) for folder, version in _folders(own, groups)), default=sys.maxsize
    )


def _free_of_machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return sys.maxsize  # No limit is known: the kernel reports no control group of this process.


def _folders(own: Path, groups: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of the control groups that may limit this process: its own and each above
    it.
    """
    for line in _read(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        root = groups / "memory" if controllers else groups
        # In a container the path may be the host's, and the root is the container's group.
        inner = root if ".." in path else root / path.lstrip("/")
        while inner != root:
            yield inner, version
            inner = inner.parent
        yield root, version


def _free(folder: Path, version: int) -> int:
    try:
        limit, used = (int(_read(folder / name)) for name in _FILES[version])
    except ValueError:  # The group has no limit ("max"), or does not exist.
        return sys.maxsize
    cached = 0
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        cached += int(value) if name in _CACHED[version] else 0
    return max(0, limit - used + cached)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


_SELDOM = 100_000


def collect_nothing_yet() -> None:
    """Disable collections until `keep_what_is_there`: the modules and models that a start loads are
    no garbage, and collecting among them takes a tenth of the start. They are not collected at exit
    either, which would take a sixth of a second without torch and half a second with it.
    """
    gc.disable()
    atexit.register(gc.freeze)


def keep_what_is_there() -> None:
    """Exempt the objects that exist now, after the start, from later collections, which would spend
    tens of milliseconds on them.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # Collect once now, because that resets Python's count of old objects to zero.
    gc.enable()


@contextmanager
def collect_seldom() -> Iterator[None]:
    """Raise, within this block, the number of new objects that starts a collection from some
    hundred to 100,000, for work that makes many objects and few cycles.
    """
    usual = gc.get_threshold()
    gc.set_threshold(_SELDOM, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
