"""Files of memory in an agent's directory: sets of an instance, and arenas of weights.

A set is a ledger and pools of one generation. A process that uses a file holds a lock on the
description that it was given: the kernel ends it with the process, after the process can write no
more, and whether or not an agent runs. So an agent that starts finds out which memory is in use.
"""

import fcntl
import os
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from urllib.parse import quote, unquote

from xxhash import xxh3_64_intdigest

from kvrs.ids import InstanceId
from kvrs.transfer.anchors.messages import AnchorError
from kvrs.transfer.store.directory import StoreDirectory

_MEMORY = "memory-"
_WEIGHTS = "weights-"
_UNFINISHED = ".new"
# A process that was killed gives its memory back to the system first, 45 ms for each GB.
_DYING_S = 2.0
_LOOK_S = 0.002

HEADER_BYTES = 4096
_MAGIC = b"KVRSMEM1"
_FACTS = struct.Struct("<8sQ32sQ")  # magic, generation, kind, number of files
_EPOCH = struct.Struct("<Q")
_SEAL = struct.Struct("<Q")
_EPOCH_AT = 1024


@dataclass(frozen=True, slots=True)
class MemoryName:
    """The name of a file: which one of a set, 0 being its ledger."""

    instance: InstanceId
    generation: int
    index: int

    def __str__(self) -> str:
        return f"{_MEMORY}{quote(self.instance, safe='')}-{self.generation}.{self.index}"

    @classmethod
    def parse(cls, name: str) -> "MemoryName | None":
        stem, _, index = name.removeprefix(_MEMORY).rpartition(".")
        instance, _, generation = stem.rpartition("-")
        if not (name.isascii() and generation.isdecimal() and index.isdecimal()):
            return None
        found = cls(InstanceId(unquote(instance)), int(generation), int(index))
        return found if str(found) == name else None


@dataclass(frozen=True, slots=True)
class LedgerHeader:
    """The description of a set of memory in the header of its ledger."""

    generation: int
    kind: str
    files: int
    epoch: int  # Of the last process that attached it.

    def encode(self) -> bytes:
        facts = _FACTS.pack(_MAGIC, self.generation, self.kind.encode(), self.files)
        return _sealed(facts).ljust(_EPOCH_AT, b"\0") + epoch_bytes(self.epoch)


def read_header(block: bytes) -> LedgerHeader | None:
    """None: it is torn, or of another version."""
    facts, epoch = block[: _FACTS.size], read_epoch(block)
    if block[: _FACTS.size + _SEAL.size] != _sealed(facts) or epoch is None:
        return None
    magic, generation, kind, files = _FACTS.unpack(facts)
    return LedgerHeader(generation, kind.decode(), files, epoch) if magic == _MAGIC else None


def epoch_bytes(epoch: int) -> bytes:
    return _sealed(_EPOCH.pack(epoch))


def read_epoch(block: "bytes | memoryview") -> int | None:
    """The epoch of a ledger's first block; None: it is torn."""
    sealed = bytes(block[_EPOCH_AT : _EPOCH_AT + _EPOCH.size + _SEAL.size])
    facts = sealed[: _EPOCH.size]
    return int(_EPOCH.unpack(facts)[0]) if sealed == _sealed(facts) else None


def _sealed(facts: bytes) -> bytes:
    return facts + _SEAL.pack(xxh3_64_intdigest(facts))


class Regions:
    """Every method may block for as long as memory takes to be cleared."""

    def __init__(self, directory: StoreDirectory, reserved_bytes: int = 0) -> None:
        """`reserved_bytes`: how much of the file system is for checkpoints."""
        self._directory = directory
        self._reserved_bytes = reserved_bytes

    # Memory of instances.

    def sets(self) -> dict[InstanceId, dict[int, list[MemoryName]]]:
        """All files by instance and generation."""
        found: dict[InstanceId, dict[int, list[MemoryName]]] = {}
        for name in map(MemoryName.parse, self._names(_MEMORY)):
            if name is not None:
                found.setdefault(name.instance, {}).setdefault(name.generation, []).append(name)
        return found

    def attach(
        self, instance: InstanceId, epoch: int, kind: str, sizes: Sequence[int]
    ) -> tuple[int, bool, list[int]]:
        """Descriptors of an instance's memory, each locked, with its generation, and whether it is
        new. Memory that another process still uses is fenced and left to it.

        Raises:
            AnchorError: this start is not above the last one, or there is not enough memory.
        """
        last = 0
        for generation, names in sorted(self.sets().get(instance, {}).items()):
            last = generation
            adopted = self._adopt(names, epoch, kind, sizes)
            if adopted is not None:
                return generation, False, adopted
            self._unlink(names)
        return last + 1, True, self._make(instance, last + 1, epoch, kind, sizes)

    def _adopt(
        self, names: list[MemoryName], epoch: int, kind: str, sizes: Sequence[int]
    ) -> list[int] | None:
        names = sorted(names, key=lambda name: name.index)
        with ExitStack() as opened:
            fds = []
            for name in names:
                fds.append(self._open(str(name), os.O_RDWR))
                opened.callback(os.close, fds[-1])
            header = read_header(os.pread(fds[0], HEADER_BYTES, 0))
            is_late = header is not None and header.epoch > epoch
            is_free = not is_late and _lock_all(fds)
            if header is not None and header.epoch >= epoch and not is_free:
                raise AnchorError(
                    f"memory of {names[0].instance!r} was attached by start {header.epoch}; "
                    f"allowed: a later start, not {epoch}"
                )
            if names[0].index == 0:
                # From here on a process of an earlier start ends itself before its next batch.
                os.pwrite(fds[0], epoch_bytes(epoch), _EPOCH_AT)
            indexes = [name.index for name in names]
            if (
                not is_free
                or header is None
                or (header.kind, header.generation) != (kind, names[0].generation)
                or indexes != list(range(len(sizes)))
                or [os.fstat(fd).st_size for fd in fds] != list(sizes)
            ):
                return None
            opened.pop_all()
            return fds

    def _make(
        self, instance: InstanceId, generation: int, epoch: int, kind: str, sizes: Sequence[int]
    ) -> list[int]:
        names = [MemoryName(instance, generation, index) for index in range(len(sizes))]
        self._check_room(f"memory of {instance!r}", sum(sizes))
        with ExitStack() as undo:
            fds = []
            for name, size in zip(names, sizes, strict=True):
                fd = self._open(str(name), os.O_RDWR | os.O_CREAT | os.O_EXCL)
                undo.callback(self._unlink, [name])
                undo.callback(os.close, fd)
                fcntl.flock(fd, fcntl.LOCK_EX)
                self._allocate(fd, size, f"memory of {instance!r}")
                fds.append(fd)
            header = LedgerHeader(generation, kind, len(sizes), epoch)
            os.pwrite(fds[0], header.encode(), 0)
            undo.pop_all()
            return fds

    def is_used(self, names: list[MemoryName]) -> bool:
        return any(self._is_locked(str(name)) for name in names)

    def drop(self, names: list[MemoryName]) -> None:
        self._unlink(names)

    # Arenas of weights.

    def arenas(self) -> list[str]:
        """Names of the arenas, whole or not."""
        return self._names(_WEIGHTS)

    def open_weights(self, key: str, size: int) -> list[int] | None:
        """Descriptors of the arena: one to read it, locked, and behind it one to write it where it
        is new. None: another process writes it.

        Raises:
            AnchorError: it has another size, or there is not enough memory.
        """
        name, unfinished = f"{_WEIGHTS}{key}", f"{_WEIGHTS}{key}{_UNFINISHED}"
        with suppress(FileNotFoundError):
            return [self._open_arena(name, size)]
        if self._is_locked(unfinished):
            return None
        with suppress(FileNotFoundError):
            self._directory.unlink(unfinished)
        self._check_room("weights", size)
        with ExitStack() as undo:
            to_write = self._open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            undo.callback(self._directory.unlink, unfinished)
            undo.callback(os.close, to_write)
            self._allocate(to_write, size, "weights")
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

    def is_arena_used(self, name: str) -> bool:
        return self._is_locked(name)

    def drop_arena(self, name: str) -> None:
        self._directory.unlink(name)

    def clear(self) -> None:
        """Unlink everything; processes keep what they have mapped."""
        for name in [*self._names(_MEMORY), *self._names(_WEIGHTS)]:
            self._directory.unlink(name)

    # Files.

    def _names(self, prefix: str) -> list[str]:
        return [name for name in self._directory.names() if name.startswith(prefix)]

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

    def _is_locked(self, name: str) -> bool:
        try:
            fd = self._directory.open_own(name, os.O_RDONLY)
        except OSError:
            return False
        try:
            return not _lock(fd)
        finally:
            os.close(fd)

    def _unlink(self, names: Sequence[MemoryName]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._directory.unlink(str(name))

    def _check_room(self, what: str, wanted_bytes: int) -> None:
        left = self._reserved_bytes - self._directory.used_bytes()
        room = self._directory.free_bytes() - max(0, left)
        if wanted_bytes > room:
            raise AnchorError(
                f"{what}: {wanted_bytes} bytes; allowed: at most {max(0, room)}, which "
                f"{self._directory.path} has left"
            )

    def _allocate(self, fd: int, size: int, what: str) -> None:
        try:
            # A write into a mapped page without memory would kill the process.
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            raise AnchorError(f"{what}: {size} bytes: {error.strerror}") from None


def _lock_all(fds: Sequence[int]) -> bool:
    """Lock files whose process may be dying. False: one is still in use."""
    give_up_s = time.monotonic() + _DYING_S
    for fd in fds:
        while not _lock(fd):
            if time.monotonic() > give_up_s:
                return False
            time.sleep(_LOOK_S)
    return True


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
