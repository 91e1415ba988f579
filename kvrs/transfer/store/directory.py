"""The directory in the file system with the pages of a node's store. The pages survive a restart of
the agent.
"""

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from kvrs.errors import ConfigError
from kvrs.ids import NodeId
from kvrs.process.memory import free_in_groups
from kvrs.protocol.secrets import derive

SLAB = "slab"  # Name of the file with the pages.
_NAME_BYTES = 8


def store_directory(base: str, secret: bytes, node: NodeId) -> Path:
    """Path of a node's store. The name differs between clusters on one host, and reveals nothing of
    their secrets.
    """
    return Path(base) / f"kvrs-{_name(secret, node)}"


def row_directory(base: str, secret: bytes, node: NodeId) -> Path:
    """Path of the directory with the socket of the node's rows, beside that of its store."""
    return Path(base) / f"kvrs-rows-{_name(secret, node)}"


def _name(secret: bytes, node: NodeId) -> str:
    return f"{derive(secret, b'kvrs-store')[:_NAME_BYTES].hex()}-{quote(node, safe='')}"


class PrivateDirectory:
    """A directory that only this user may use, and its files."""

    def __init__(self, path: Path) -> None:
        """Open the directory. Raises OSError: it is missing, or others may use it."""
        self.path = path
        self.fd = self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.fd)

    def _open(self) -> int:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        if reason := not_ours(os.fstat(fd)):
            os.close(fd)
            raise PermissionError(reason)
        return fd

    def open_own(self, name: str, flags: int) -> int:
        """Open a file in the directory. Raises OSError: it is missing, is a link, or others may use
        it.
        """
        fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        if reason := not_ours(os.fstat(fd)):
            os.close(fd)
            raise PermissionError(reason)
        return fd

    def names(self) -> list[str]:
        return os.listdir(self.fd)

    def unlink(self, name: str) -> None:
        os.unlink(name, dir_fd=self.fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def free_bytes(self) -> int:
        """Bytes that this process can still write: free in the file system, and within its control
        groups' limits.
        """
        space = os.fstatvfs(self.fd)
        return min(space.f_bavail * space.f_frsize, free_in_groups())

    def used_bytes(self) -> int:
        """Bytes used by the pages of the store."""
        return sum(
            os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_blocks * 512
            for name in self.names()
            if name.startswith(SLAB)
        )


class StoreDirectory(PrivateDirectory):
    """The directory of an agent, which makes it. It is locked while open, and removed at the end if
    empty.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The path still names this locked directory: another agent that made a new one would have
        # needed the lock.
        if _is_at(self.fd, self.path):
            with suppress(OSError):  # The directory is not empty.
                os.rmdir(self.path)
        super().__exit__(kind, error, trace)

    def _open(self) -> int:
        """Open or create the directory.

        Raises:
            ConfigError: it cannot be made or opened, belongs to another user, is open to others, or
                is in use.
        """
        try:
            while True:
                with suppress(FileExistsError):
                    os.mkdir(self.path, 0o700)
                fd = super()._open()
                try:
                    self._claim(fd)
                    if _is_at(fd, self.path):
                        return fd
                except BaseException:
                    os.close(fd)
                    raise
                # The agent before this one removed the directory just before it was locked here.
                os.close(fd)
        except PermissionError as error:
            raise ConfigError(
                f"backup.directory: {self.path}: {error.strerror or error}; allowed: a "
                f"directory of this user, mode 0700"
            ) from None
        except OSError as error:
            raise ConfigError(f"backup.directory: {self.path}: {error.strerror}") from None

    def _claim(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"backup.directory: {self.path}: in use; allowed: one agent per node and cluster"
            ) from None

    def clear(self) -> None:
        """Unlink all files of a store. An empty directory is removed when it is closed."""
        for name in self.names():
            if name.startswith(SLAB):
                self.unlink(name)


def not_ours(status: os.stat_result, others: int = 0o077) -> str | None:
    """Return the reason why a file or directory is not private to this user; None: it is private.
    `others`: bits that its mode must not have.
    """
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}"
    return open_to_others(status, others)


def open_to_others(status: os.stat_result, others: int) -> str | None:
    if mode := stat.S_IMODE(status.st_mode) & others:
        return f"others may use it (mode bits {mode:03o})"
    return None


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
