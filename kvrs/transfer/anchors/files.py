"""Files of memory in an agent's directory: one for each instance, and arenas of weights.

A process that uses a file holds a lock on the description that it was given: the kernel ends it
with the process, after the process can write no more, and whether or not an agent runs. So an agent
that starts finds out which memory is in use.
"""

import fcntl
import logging
import os
from contextlib import ExitStack, suppress
from urllib.parse import quote

from kvrs.ids import InstanceId
from kvrs.transfer.anchors.ledger import EPOCH_AT, HEADER_BYTES, epoch_block, header_of, read_header
from kvrs.transfer.anchors.messages import AnchorError
from kvrs.transfer.shared_memory.regions import lock, reserve
from kvrs.transfer.store.directory import StoreDirectory

log = logging.getLogger(__name__)

_MEMORY = "memory-"
_WEIGHTS = "weights-"
_UNFINISHED = ".new"
# A process that was killed gives its memory back to the system first, 45 ms for each GB.
_DYING_S = 2.0


class AnchoredFiles:
    """Every method may block for as long as memory takes to be cleared."""

    def __init__(
        self, directory: StoreDirectory, *, orphan_s: float, reserved_bytes: int = 0
    ) -> None:
        """`reserved_bytes`: how much of the file system is for checkpoints."""
        self._directory, self._orphan_s = directory, orphan_s
        self._reserved_bytes = reserved_bytes
        self._unused_since_s: dict[str, float] = {}

    def attach(self, instance: InstanceId, epoch: int, kind: str, size: int) -> tuple[bool, int]:
        """Return whether the instance's memory is new, and a descriptor of it, locked. Memory that
        another process still uses is fenced and left to it.

        Raises:
            AnchorError: this start is not above the last one, or there is not enough memory.
        """
        name, what = f"{_MEMORY}{quote(instance, safe='')}", f"memory of {instance!r}"
        with suppress(FileNotFoundError):
            if (adopted := self._adopt(name, what, epoch, kind, size)) is not None:
                return False, adopted
            self._directory.unlink(name)
        with ExitStack() as undo:
            fd = self._make(undo, name, size, what)
            lock(fd)
            os.pwrite(fd, header_of(kind, epoch), 0)
            undo.pop_all()
            return True, fd

    def _adopt(self, name: str, what: str, epoch: int, kind: str, size: int) -> int | None:
        with ExitStack() as undo:
            fd = self._open(name, os.O_RDWR)
            undo.callback(os.close, fd)
            found, last = read_header(os.pread(fd, HEADER_BYTES, 0)) or ("", -1)
            is_free = last <= epoch and lock(fd, _DYING_S)
            if last >= epoch and not is_free:
                raise AnchorError(
                    f"{what} was attached by start {last}; allowed: a later start, not {epoch}"
                )
            # From here on a process of an earlier start ends itself before its next batch.
            os.pwrite(fd, epoch_block(epoch), EPOCH_AT)
            if not is_free or (found, os.fstat(fd).st_size) != (kind, size):
                return None
            undo.pop_all()
            return fd

    def open_weights(self, key: str, size: int) -> list[int]:
        """Descriptors of the arena: one to read it, locked, and behind it one to write it where it
        is new; none where another process writes it.

        Raises:
            AnchorError: it has another size, or there is not enough memory.
        """
        name, unfinished = f"{_WEIGHTS}{key}", f"{_WEIGHTS}{key}{_UNFINISHED}"
        with suppress(FileNotFoundError):
            return [self._open_arena(name, size)]
        if self._is_used(unfinished):
            return []
        with suppress(FileNotFoundError):
            self._directory.unlink(unfinished)
        with ExitStack() as undo:
            to_write = self._make(undo, unfinished, size, "weights")
            # Not the lock of the other one, which its process closes before it commits: between
            # the two the arena would be taken for a dead writer's.
            to_read = self._open_arena(unfinished, size)
            undo.pop_all()
            return [to_read, to_write]

    def commit_weights(self, key: str) -> None:
        """Let an arena be read by all from now on, and be written by none.

        Raises:
            AnchorError: there is none, or a process can still write it.
        """
        name, unfinished = f"{_WEIGHTS}{key}", f"{_WEIGHTS}{key}{_UNFINISHED}"
        try:
            fd = self._open(unfinished, os.O_RDONLY)
        except FileNotFoundError:
            raise AnchorError("there are no weights to commit under this key") from None
        try:
            # A lease for reading is granted only if the file is open for writing nowhere.
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            raise AnchorError(f"a process can still write these weights: {error}") from None
        finally:
            os.close(fd)
        self._directory.rename(unfinished, name)

    def end_orphans(self, now_s: float) -> None:
        """Give back memory that no process has used for `orphan_s`."""
        before = self._unused_since_s
        self._unused_since_s = {
            name: before.get(name, now_s) for name in self._names() if not self._is_used(name)
        }
        for name, since_s in self._unused_since_s.items():
            if now_s - since_s >= self._orphan_s:
                log.info("memory is used by no process", extra={"region": name})
                self._directory.unlink(name)

    def clear(self) -> None:
        """Unlink everything; processes keep what they have mapped."""
        for name in self._names():
            self._directory.unlink(name)

    def _names(self) -> list[str]:
        return [name for name in self._directory.names() if name.startswith((_MEMORY, _WEIGHTS))]

    def _open(self, name: str, flags: int) -> int:
        try:
            return self._directory.open_own(name, flags)
        except PermissionError as error:
            raise AnchorError(f"{name} in {self._directory.path}: {error}") from None

    def _open_arena(self, name: str, size: int) -> int:
        fd = self._open(name, os.O_RDONLY)
        if (found := os.fstat(fd).st_size) != size:
            os.close(fd)
            raise AnchorError(f"{name} has {found} bytes; allowed: {size}, of this model")
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def _is_used(self, name: str) -> bool:
        try:
            fd = self._directory.open_own(name, os.O_RDONLY)
        except OSError:
            return False
        try:
            return not lock(fd)
        finally:
            os.close(fd)

    def _make(self, undo: ExitStack, name: str, size: int, what: str) -> int:
        """A new file with all of its memory."""
        left = self._reserved_bytes - self._directory.used_bytes()
        room = self._directory.free_bytes() - max(0, left)
        if size > room:
            raise AnchorError(
                f"{what}: {size} bytes; allowed: at most {max(0, room)}, which "
                f"{self._directory.path} has left"
            )
        fd = self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        undo.callback(self._directory.unlink, name)
        undo.callback(os.close, fd)
        try:
            reserve(fd, 0, size)
        except OSError as error:
            raise AnchorError(f"{what}: {size} bytes: {error.strerror}") from None
        return fd
