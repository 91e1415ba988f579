"""Digests of all bytes of files that vLLM has read, where these are still what it has read."""

import os
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


def signature_of(directory: Path, files: Iterable[Path]) -> Signature:
    """Return what changes with any change of these files, of the directory, or of a link on the
    way to them.

    Raises:
        KvrsError: one has changed since this server started, which may have read another one.
        OSError: one cannot be found.
    """
    ways = [each for each in directory.absolute().parents if each.is_symlink()]
    found = []
    for path in (*ways, directory, *files):
        for of in (path.lstat(), path.stat()) if path.is_symlink() else (path.lstat(),):
            if of.st_ctime_ns > STARTED_NS:
                raise KvrsError(f"{path} has changed since this server started; allowed: earlier")
            found.append((of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns))
    return tuple(found)


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
