"""Digests of all bytes of files that an engine has read, where these are still what it has read."""

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


# Before an engine has read anything: its workers are its children.
STARTED_NS = _process_start_ns()

Signature = tuple[tuple[int, int, int, int, int], ...]


def on_the_way(directory: Path) -> list[Path]:
    """Return the directory, and the links that lead to it."""
    return [*(each for each in directory.absolute().parents if each.is_symlink()), directory]


def signature_of(paths: Iterable[Path]) -> Signature:
    """Return what changes with any change of these files, directories and links.

    Raises:
        KvrsError: one has changed since this server started, which may have read another one.
        OSError: one cannot be found.
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
    """Digest of names and of all bytes, by as many threads as there are processors: what a server
    has just read is in the memory of its host.

    Raises:
        OSError: one cannot be read.
    """
    digest = blake3()
    for path in files:
        content = blake3(max_threads=blake3.AUTO).update_mmap(path).digest()
        digest.update(f"{path.name}\0".encode() + content)
    return digest.digest()
