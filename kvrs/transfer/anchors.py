"""Memory in the directory of a node's agent that outlives its processes: a file per instance, and
arenas of weights.

A process opens its files itself, one process at a time, and locks them. The kernel releases the
lock when the process can no longer write, whether or not an agent runs. So the agent knows which
memory is in use, and releases the rest.

No proof of the secret is required: the directory's name is derived from the secret, and any process
of the agent's user can open its files.

The ledger in front of an instance's pages: a record per page, and per running stream the extent
of its pages.

The order of writes makes a SIGKILL at any moment harmless:

1. A page's record is written after its last token was computed or has arrived, and cleared before
   the page is given to another sequence. A page with a record is not written.
2. A record is one store of up to 64 bytes under a seal (see `sealed`). A torn or moved record has
   a wrong seal.
3. A record has the checksum of its page. A page is adopted only if the checksum is that of what
   lies there.
4. A stream's row names its last full page; the pages before it are found by the tags of their
   parents, so that a row is written once per page.

Only the process that serves the instance writes here. It reads the epoch in the header before each
batch: another one there means that a later process has the instance.
"""

import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from kvrs.errors import KvrsError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.frames import checksum
from kvrs.protocol.pages import TAG_BYTES, Tag
from kvrs.transfer.sealed import MORE_BYTES, SealedBlocks, sealed, unsealed
from kvrs.transfer.shared_memory import lock, reserve
from kvrs.transfer.store.directory import PrivateDirectory

log = logging.getLogger(__name__)

HEADER_BYTES = 4096
EPOCH_AT = 1024
FORMAT = 2  # Format number of a ledger; pages behind a ledger of another format are not adopted.
# Tag of the page, tag of the page before it in the sequence, number of the write, checksum of the
# page.
_RECORD = struct.Struct("<16s16sQQ")
# Tag of the stream's last full page, number of its full pages; the stream's id follows.
_ROW = struct.Struct("<16sI")
_RECORD_BYTES = 64
_ROW_BYTES = 192
_NOTE_BYTES = 4096
_LONGEST_ID_BYTES = _ROW_BYTES - _ROW.size - MORE_BYTES
assert _RECORD.size + MORE_BYTES <= _RECORD_BYTES
assert TAG_BYTES == 16


def header_of(kind: str, epoch: int) -> bytes:
    return sealed(kind.encode()).ljust(EPOCH_AT, b"\0") + epoch_block(epoch)


def epoch_block(epoch: int) -> bytes:
    return sealed(epoch.to_bytes(8, "little"))


def read_header(block: "bytes | memoryview") -> tuple[str, int] | None:
    """Read the kind of the memory, and the epoch of the last process that attached it; None: the
    header is incomplete.
    """
    kind, epoch = unsealed(block), unsealed(block[EPOCH_AT:HEADER_BYTES])
    if kind is None or epoch is None:
        return None
    return kind.decode(), int.from_bytes(epoch, "little")


@dataclass(frozen=True, slots=True)
class LedgerLayout:
    """Layout behind the header: a note of the process for its successor, rows of streams, records,
    then pages.
    """

    pages: int
    rows: int

    @property
    def rows_at(self) -> int:
        return HEADER_BYTES + _NOTE_BYTES

    @property
    def records_at(self) -> int:
        return self.rows_at + self.rows * _ROW_BYTES

    @property
    def size_bytes(self) -> int:
        """Size of the ledger; the pages begin behind it."""
        end = self.records_at + self.pages * _RECORD_BYTES
        return -(-end // HEADER_BYTES) * HEADER_BYTES


@dataclass(frozen=True, slots=True)
class KeptPages:
    """Pages that an earlier process left: each page's number and tag, the oldest write first, and
    the tags of each stream's leading full pages.
    """

    pages: list[tuple[int, Tag]] = field(default_factory=list)
    streams: dict[StreamId, list[Tag]] = field(default_factory=dict)
    # Number of records that were incomplete, or whose checksum was not that of their page.
    damaged: int = 0


class PageLedger:
    """The records of one instance's pages."""

    def __init__(
        self,
        memory: memoryview,
        layout: LedgerLayout,
        epoch: int,
        page: Callable[[int], memoryview],
    ) -> None:
        """`memory` begins with the header; `page` returns a page's bytes."""
        assert memory.nbytes >= layout.size_bytes
        self._header = memory[:HEADER_BYTES]
        self._note = SealedBlocks(memory, HEADER_BYTES, _NOTE_BYTES)
        self._rows = SealedBlocks(memory, layout.rows_at, _ROW_BYTES)
        self._records = SealedBlocks(memory, layout.records_at, _RECORD_BYTES)
        self._layout = layout
        self._epoch = epoch_block(epoch)
        self._page = page
        self._writes = 0
        self._free_rows = list(range(layout.rows - 1, -1, -1))
        self._row_of: dict[StreamId, int] = {}
        # Adopted streams of the process before that this process does not run yet; their rows may
        # be reused.
        self._left: dict[StreamId, None] = {}

    @property
    def is_current(self) -> bool:
        """True while no later process has attached the instance's memory."""
        return self._header[EPOCH_AT : EPOCH_AT + len(self._epoch)] == self._epoch

    # The scheduler calls the methods below for pages, and then for streams.

    def record(self, page: int, tag: Tag, parent: Tag) -> None:
        """Record that the page holds the tokens of `tag`, behind the page of `parent`. The caller
        does so once the page is no longer written.
        """
        self._writes += 1
        facts = _RECORD.pack(tag, parent, self._writes, checksum(self._page(page)))
        self._records.write(page, facts)

    def clear(self, page: int) -> None:
        """Clear the page's record. The caller does so before the page is written again."""
        self._records.clear(page)

    def note_stream(self, stream: StreamId, pages: int, last: Tag) -> None:
        """Note that the stream's first full pages are recorded, up to the one with tag `last`."""
        name, row = stream.encode(), self._row_of.get(stream)
        if row is None:
            if len(name) > _LONGEST_ID_BYTES or (row := self._take_row()) is None:
                return
            self._row_of[stream] = row
        self._left.pop(stream, None)
        self._rows.write(row, _ROW.pack(last, pages) + name)

    def end_stream(self, stream: StreamId) -> None:
        row = self._row_of.pop(stream, None)
        if row is not None:
            self._left.pop(stream, None)
            self._rows.clear(row)
            self._free_rows.append(row)

    # A process calls the methods below at its start and at its end.

    def adopt(self) -> KeptPages:
        """Verify the pages of the process before, and return the correct ones; records of the
        others are cleared.
        """
        found: dict[Tag, tuple[int, int, Tag]] = {}
        damaged = 0
        for page in range(self._layout.pages):
            if self._records.is_clear(page):
                continue
            if (facts := self._records.read(page)) is not None:
                tag, parent, write, page_checksum = _RECORD.unpack(facts)
                if tag not in found and checksum(self._page(page)) == page_checksum:
                    found[Tag(tag)] = write, page, Tag(parent)
                    continue
            damaged += 1
            self.clear(page)
        self._writes = max((write for write, _, _ in found.values()), default=0)
        kept = KeptPages(
            [(page, tag) for tag, (_, page, _) in sorted(found.items(), key=lambda each: each[1])],
            self._adopt_rows({tag: parent for tag, (_, _, parent) in found.items()}),
            damaged,
        )
        if damaged:
            log.warning("records of pages were damaged", extra={"records": damaged})
        return kept

    def forget(self) -> None:
        """Clear all records and rows that the process before has left."""
        for row in range(self._layout.rows):
            self._rows.clear(row)
        for page in range(self._layout.pages):
            self.clear(page)

    def drop(self) -> None:
        """Clear the header: no process can adopt the pages, and this process ends before its next
        batch.
        """
        self._header[:] = bytes(HEADER_BYTES)

    def write_note(self, note: bytes) -> None:
        """Write facts for the next process, which then need not determine them again."""
        self._note.write(0, note)

    def read_note(self) -> bytes | None:
        """Return the note that the process before has written; None: there is no complete note."""
        return self._note.read(0)

    def _adopt_rows(self, parents: dict[Tag, Tag]) -> dict[StreamId, list[Tag]]:
        streams: dict[StreamId, list[Tag]] = {}
        self._free_rows.clear()
        for row in range(self._layout.rows - 1, -1, -1):
            if (facts := self._rows.read(row)) is not None:
                last, pages = _ROW.unpack_from(facts)
                stream = StreamId(facts[_ROW.size :].decode())
                chain = _chain(Tag(last), pages, parents)
                if chain is not None and stream not in streams:
                    streams[stream] = chain
                    self._row_of[stream] = row
                    self._left[stream] = None
                    continue
            self._rows.clear(row)
            self._free_rows.append(row)
        return streams

    def _take_row(self) -> int | None:
        if not self._free_rows and self._left:
            self.end_stream(next(iter(self._left)))
        return self._free_rows.pop() if self._free_rows else None


def _chain(last: Tag, pages: int, parents: dict[Tag, Tag]) -> list[Tag] | None:
    """Return the tags of a stream's first `pages` pages, of which `last` is the last; None: one of
    them was not kept.
    """
    chain: list[Tag] = []
    tag = last
    while len(chain) < pages:
        if tag not in parents:
            return None
        chain.append(tag)
        tag = parents[tag]
    # The first page's parent is the root of model and tenant, which is no page.
    return chain[::-1] if chain and tag not in parents else None


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
