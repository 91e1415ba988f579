"""Digest of a model's weights: rows are shared only between servers with equal digests.

Digests of the files that an engine has read, if they are unchanged since.
"""

import hashlib
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3
from huggingface_hub import snapshot_download

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


def weights_of(model: str, revision: str | None = None, cache: str | None = None) -> str:
    """Return the digest of the weights, code and configuration of a model: of its directory, or of
    the snapshot with the model's name in the cache of Hugging Face. Files in the cache are named by
    digests of their contents, so only their names are hashed.

    Raises:
        KvrsError: no files, or files that have changed since this server started.
    """
    directory = Path(model)
    if not directory.is_dir():
        try:
            directory = Path(
                snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
            )
        except (OSError, ValueError) as error:
            raise KvrsError(f"{model}: neither a directory nor in the cache: {error}") from None
    weights = _weights_in(directory)
    small = sorted([*directory.glob("*.json"), *directory.glob("*.py")])
    digest = hashlib.blake2b(digest_size=16)
    plain = []
    for path in [*small, *weights]:
        if path.is_symlink() and path.resolve().parent.name == "blobs":
            digest.update(f"{path.name} {path.resolve().name}".encode())
        else:
            plain.append(path)
    if plain:
        read = [*on_the_way(directory), *plain]
        signature = signature_of(read)
        digest.update(digest_of(plain))
        if signature_of(read) != signature:
            raise KvrsError(f"{directory} changes")
    return digest.hexdigest()


def _weights_in(directory: Path) -> list[Path]:
    found = sorted([*directory.glob("*.safetensors"), *directory.glob("*.bin")])
    if not found:
        raise KvrsError(
            f"{directory}: no *.safetensors or *.bin; allowed: a directory with weights"
        )
    return found
