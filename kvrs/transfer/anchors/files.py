"""Memory in the directory of a node's agent that outlives its processes: a file per instance, and
arenas of weights.

A process opens its files itself, one process at a time, and locks them. The kernel releases the
lock when the process can no longer write, whether or not an agent runs. So the agent knows which
memory is in use, and releases the rest.

No proof of the secret is required: the directory's name is derived from the secret, and any process
of the agent's user can open its files.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from kvrs.errors import KvrsError
from kvrs.ids import InstanceId
from kvrs.transfer.anchors.ledger import EPOCH_AT, HEADER_BYTES, epoch_block, header_of, read_header
from kvrs.transfer.shared_memory.regions import lock, reserve
from kvrs.transfer.store.directory import PrivateDirectory

log = logging.getLogger(__name__)

_MEMORY = "memory-"
_WEIGHTS = "weights-"
_UNFINISHED = ".new"
_ATTACHING = "attaching"  # Name of the file that a process locks while it attaches memory.
# Time for a killed process to return its memory to the system, at 45 ms per GB.
_DYING_S = 2.0
# Time limit for waiting for another process that attaches memory, many GB of which the kernel
# clears first, or writes weights.
_TIMEOUT_S = 120.0
_POLL_S = 0.02


class AnchorError(KvrsError):
    """Memory cannot be attached; the message names its owner and the cause."""


class NoAgentError(AnchorError):
    """No agent runs, or it has ended and removed its directory."""


class AnchoredFiles:
    """The files of one agent's directory. Every method may block while memory is cleared."""

    def __init__(self, directory: PrivateDirectory, *, reserved_bytes: int = 0) -> None:
        """`reserved_bytes`: bytes of the file system that stay free for checkpoints."""
        self._directory, self._reserved_bytes = directory, reserved_bytes
        self._unused_since_s: dict[str, float] = {}

    @classmethod
    @contextmanager
    def of_agent(cls, path: Path, wait_s: float, reserved_bytes: int) -> Iterator["AnchoredFiles"]:
        """The files in an agent's directory; waits for an agent that starts later.

        Raises:
            NoAgentError: no agent has made the directory in that time.
            AnchorError: other users may use the directory.
        """
        give_up_s = time.monotonic() + wait_s
        while True:
            try:
                directory = PrivateDirectory(path)
                break
            except PermissionError as error:
                raise AnchorError(f"{path}: {error}") from None
            except OSError as error:
                if time.monotonic() > give_up_s:
                    raise NoAgentError(f"{path}: {error.strerror}") from None
            time.sleep(_POLL_S)
        with directory:
            yield cls(directory, reserved_bytes=reserved_bytes)

    def memory(self, instance: InstanceId, epoch: int, kind: str, size: int) -> tuple[bool, int]:
        """Attach an instance's memory. Returns whether it is new, and thus all zeros, and a
        descriptor, which keeps the memory in use while open or mapped. If another process still
        uses the old memory, it is fenced and keeps that memory, and this process gets new memory.

        Raises:
            NoAgentError: the agent has ended.
            AnchorError: `epoch` is not above that of the last start, or there is not enough memory.
        """
        name, what = f"{_MEMORY}{quote(instance, safe='')}", f"memory of {instance!r}"
        with self._alone(), ExitStack() as undo:
            with suppress(FileNotFoundError):
                if (adopted := self._adopt(name, what, epoch, kind, size)) is not None:
                    return False, adopted
                self._directory.unlink(name)
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

    def weights(self, key: str, size: int) -> tuple[int, int | None]:
        """Return a descriptor to read an arena of weights, which keeps the arena in use while open,
        and a descriptor to write it, or None if the arena is complete. Waits while another process
        writes it.

        Raises:
            NoAgentError: the agent has ended.
            AnchorError: the arena has another size, or there is not enough memory.
        """
        name = f"{_WEIGHTS}{quote(key, safe='')}"
        give_up_s = time.monotonic() + _TIMEOUT_S
        while True:
            with self._alone(), ExitStack() as undo:
                with suppress(FileNotFoundError):
                    return self._open_arena(name, size), None
                if not self._is_used(name + _UNFINISHED):
                    with suppress(FileNotFoundError):
                        self._directory.unlink(name + _UNFINISHED)
                    to_write = self._make(undo, name + _UNFINISHED, size, "weights")
                    # This descriptor shares the lock that marks the arena as used: the writer's
                    # descriptor is closed before `commit`, and without the lock the arena would
                    # look like a dead writer's.
                    to_read = self._open_arena(name + _UNFINISHED, size)
                    undo.pop_all()
                    return to_read, to_write
            if time.monotonic() > give_up_s:
                raise AnchorError("another process writes the weights and does not end")
            time.sleep(_POLL_S)

    def has_weights(self, key: str) -> bool:
        """Return whether the arena of weights is complete."""
        return f"{_WEIGHTS}{quote(key, safe='')}" in self._directory.names()

    def commit(self, key: str) -> None:
        """Make a written arena available to all readers. Its writer has unmapped it and closed its
        descriptor; descriptors for reading may stay open.

        Raises:
            NoAgentError: the agent has ended.
            AnchorError: a process can still write it.
        """
        name = f"{_WEIGHTS}{quote(key, safe='')}"
        with self._alone():
            fd = self._open(name + _UNFINISHED, os.O_RDONLY)
            try:
                # The kernel grants a read lease only if nothing has the file open for writing.
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            except OSError as error:
                raise AnchorError(f"a process can still write these weights: {error}") from None
            finally:
                os.close(fd)
            self._directory.rename(name + _UNFINISHED, name)

    # The agent calls the methods below.

    def end_orphans(self, orphan_s: float, now_s: float) -> None:
        """Release the memory of each file that no process has used for `orphan_s`."""
        before = self._unused_since_s
        # Skip this round while a process attaches.
        with suppress(AnchorError), self._alone(wait_s=0.0):
            self._unused_since_s = {
                name: before.get(name, now_s) for name in self._names() if not self._is_used(name)
            }
            for name, since_s in self._unused_since_s.items():
                if now_s - since_s >= orphan_s:
                    log.info("memory is used by no process", extra={"region": name})
                    self._directory.unlink(name)

    def clear(self) -> None:
        """Unlink all files of memory and weights; processes keep their mappings."""
        for name in [*self._names(), _ATTACHING]:
            with suppress(FileNotFoundError):
                self._directory.unlink(name)

    @contextmanager
    def _alone(self, wait_s: float = _TIMEOUT_S) -> Iterator[None]:
        try:
            fd = self._open(_ATTACHING, os.O_RDWR | os.O_CREAT)
            try:
                if not lock(fd, wait_s):
                    raise AnchorError("another process attaches memory and does not end")
                yield
            finally:
                os.close(fd)
        except FileNotFoundError:
            raise NoAgentError(f"{self._directory.path}: the agent has ended") from None

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
        """Make a new file with all its memory allocated; return its descriptor. `what` names the
        file in errors.
        """
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
