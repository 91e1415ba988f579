"""Digests of the files that an engine has read, if they are unchanged since."""

import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from kvrs.errors import KvrsError


def _process_start_ns() -> int:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age_s * 1e9)


# Start of this process in nanoseconds since 1970. The engine's workers are its children, so no
# worker has read a file earlier.
STARTED_NS = _process_start_ns()

Signature = tuple[tuple[int, int, int, int, int], ...]


def on_the_way(directory: Path) -> list[Path]:
    """Return a directory, and before it the symbolic links among its parents."""
    return [*(each for each in directory.absolute().parents if each.is_symlink()), directory]


def signature_of(paths: Iterable[Path]) -> Signature:
    """Return a value that changes with any change of these files, directories and links.

    Raises:
        KvrsError: a file has changed since this server started, and the server may have read
            another version.
        OSError: a file cannot be found.
    """
    found = []
    for path in paths:
        of = os.lstat(path)
        if stat.S_ISLNK(of.st_mode):
            found.append(_identity(path, of))
            of = os.stat(path)
        found.append(_identity(path, of))
    return tuple(found)


def _identity(path: Path, of: os.stat_result) -> tuple[int, int, int, int, int]:
    if of.st_ctime_ns > STARTED_NS:
        raise KvrsError(f"{path} has changed since this server started; allowed: earlier")
    return of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns


def digest_of(files: Iterable[Path]) -> bytes:
    """Compute a digest of the files' names and bytes, with a thread per processor: files that a
    server has just read are in the page cache, so reading them again is fast.

    Raises:
        OSError: a file cannot be read.
    """
    digest = blake3()
    for path in files:
        content = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
        digest.update(f"{path.name}\0".encode() + content)
    return digest.digest()
