"""Ledger in shared memory of the key in each row of an engine's host memory, which outlives the
engine: a sequence lock per row.

The writer is the engine's only thread that assigns rows:

    writing   before a copy into the row is planned      sequence becomes the next odd number
    holds     after all copies into it have completed    key, then sequence becomes even

A reader trusts a row whose sequence is even and not 0 and whose key is the one that it looks for;
while the writer lives, only if the entry is the same after the bytes were read. The writer may die
between any two stores: the row then stays odd, or its key is complete.

A row that a running stream needs is protected: a bit beside its key, which the reader takes as a
hint. Entries are read and written in one aligned store of 8 bytes for the sequence. On processors
that reorder stores (any but x86-64) only a dead writer's rows are trusted.
"""

import fcntl
import mmap
import os
import platform
import secrets
import struct

from kvrs.errors import TransferError

MAX_KEY_BYTES = 55
MAX_ROWS = 1 << 22  # Most rows of a ledger; a larger one is refused. Rows of 2 MiB would have 8 TB.
EPOCH_BYTES = 16
# True if this processor keeps loads and stores in order, without which no rows of a living engine
# are read.
ORDERED = platform.machine() in {"x86_64", "AMD64"}

_MAGIC = b"kvrsrows"
_VERSION = 2
# Magic, version, bytes of an entry, number of rows, bytes of a row, epoch. Behind it a word is 1
# once the writer has withdrawn all rows.
_HEADER = struct.Struct(f"<8sIIQQ{EPOCH_BYTES}s")
_CLOSED_AT = _HEADER.size
_ENTRY_BYTES = 64
_WORDS = _ENTRY_BYTES // 8  # Words of 8 bytes in an entry, and in the header.
_KEY_AT = 8
# Bit of the byte in front of a key that a protected row has; the byte's other bits are the key's
# length.
_PROTECTED = 0x80
assert _HEADER.size + 8 <= _ENTRY_BYTES
assert _KEY_AT + 1 + MAX_KEY_BYTES == _ENTRY_BYTES
# The memory keeps its size, so truncation cannot kill a reader that has mapped it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class RowLedger:
    """The writer's side of a ledger, for one thread. The memory is released with the last process
    that has it open.

    A lock on the memory's file (`client.py`) shows that the writer's process lives. The lock would
    be lost if this process closed any descriptor or map of the memory: it closes none, and makes no
    `LedgerView`, whose map would be closed with it.
    """

    def __init__(self, rows: int, row_bytes: int = 0) -> None:
        """`row_bytes`: see `describe`."""
        assert 0 < rows <= MAX_ROWS
        self.rows = rows
        size = (rows + 1) * _ENTRY_BYTES
        self.descriptor = os.memfd_create("kvrs-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(self.descriptor, 0o600)  # Other users can open the memory for reading only.
        os.ftruncate(self.descriptor, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = mmap.mmap(self.descriptor, size)
        self._words = memoryview(self._memory).cast("Q")
        self.describe(row_bytes)

    def describe(self, row_bytes: int) -> None:
        """Write the size of a row and a new epoch into the header; called before the ledger is
        passed to a reader.
        """
        header = _HEADER.pack(
            _MAGIC, _VERSION, _ENTRY_BYTES, self.rows, row_bytes, secrets.token_bytes(EPOCH_BYTES)
        )
        self._memory[: _HEADER.size] = header

    def writing(self, row: int) -> None:
        """Note that the row has no key until `holds`: its contents are about to be overwritten."""
        at = (row + 1) * _WORDS
        self._words[at] = (self._words[at] + 1) | 1

    def holds(self, row: int, key: bytes, *, protected: bool = False) -> None:
        """Note that the row has all bytes of `key`. A key above `MAX_KEY_BYTES` is not noted, so
        its row is not shared.
        """
        at = (row + 1) * _WORDS
        if not self._words[at] & 1 or len(key) > MAX_KEY_BYTES:
            return
        start = at * 8 + _KEY_AT
        size = len(key) | protected * _PROTECTED
        self._memory[start : start + 1 + len(key)] = bytes((size,)) + key
        self._words[at] += 1

    def protect(self, row: int, *, protected: bool) -> None:
        """Set whether a running stream needs the row."""
        at = (row + 1) * _ENTRY_BYTES + _KEY_AT
        size = self._memory[at] & ~_PROTECTED
        self._memory[at] = size | protected * _PROTECTED

    def close(self) -> None:
        """Withdraw all rows for good, because their keys no longer describe their contents, as
        after a change of weights.
        """
        self._words[_CLOSED_AT // 8] = 1
        for row in range(self.rows):
            self.writing(row)
        self._memory[_CLOSED_AT - EPOCH_BYTES : _CLOSED_AT] = secrets.token_bytes(EPOCH_BYTES)


class LedgerView:
    """The reader's side of a living or a dead writer's ledger."""

    def __init__(self, descriptor: int) -> None:
        """Map the ledger behind a descriptor, which stays the caller's.

        Raises:
            TransferError: the file is not a ledger, its size is not fixed, or it has another
                version.
        """
        size = os.fstat(descriptor).st_size
        most = (MAX_ROWS + 1) * _ENTRY_BYTES
        if not _ENTRY_BYTES <= size <= most or size % _ENTRY_BYTES:
            raise TransferError(
                f"ledger: {size} bytes; allowed: a header and entries of {_ENTRY_BYTES}, at most "
                f"{most}"
            )
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK:
                raise TransferError("ledger: it can be cut; allowed: memory sealed against that")
            self._memory = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise TransferError(f"ledger: {error.strerror}; allowed: a sealed memfd") from None
        magic, version, entry_bytes, rows, row_bytes, _ = _HEADER.unpack_from(self._memory)
        if (magic, version, entry_bytes) != (_MAGIC, _VERSION, _ENTRY_BYTES):
            raise TransferError(
                f"ledger: {magic!r} version {version}; allowed: {_MAGIC!r} version {_VERSION}"
            )
        if (rows + 1) * _ENTRY_BYTES != size:
            raise TransferError(f"ledger: {rows} rows in {size} bytes")
        self.rows: int = rows
        self.row_bytes: int = row_bytes
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")

    @property
    def epoch(self) -> bytes:
        """The ledger's epoch: random bytes, which change whenever all rows become invalid."""
        return self._memory[_CLOSED_AT - EPOCH_BYTES : _CLOSED_AT]

    @property
    def is_closed(self) -> bool:
        return self._words[_CLOSED_AT // 8] != 0

    def sequences(self) -> list[int]:
        """Return the sequence of every row; zeros once the writer has withdrawn all rows."""
        if self.is_closed:
            return [0] * self.rows
        return self._words[_WORDS::_WORDS].tolist()

    def entry(self, row: int) -> tuple[bytes, int] | None:
        """Return the key and the sequence of a row; None: the row is empty, or being written."""
        at = (row + 1) * _WORDS
        if not (sequence := self._words[at]) or sequence & 1:
            return None
        start = at * 8 + _KEY_AT
        size = self._memory[start] & ~_PROTECTED
        key = self._memory[start + 1 : start + 1 + size]
        return (key, sequence) if self.still(row, sequence) else None

    def protected(self) -> list[int]:
        """Return the numbers of the rows that running streams need."""
        if self.is_closed:
            return []
        sizes = self._bytes[_ENTRY_BYTES + _KEY_AT :: _ENTRY_BYTES].tolist()
        return [row for row, size in enumerate(sizes) if size & _PROTECTED]

    def still(self, row: int, sequence: int) -> bool:
        """Return whether the row has not been written since its entry had this sequence."""
        return self._words[(row + 1) * _WORDS] == sequence and not self.is_closed

    def release(self) -> None:
        self._words.release()
        self._bytes.release()
        self._memory.close()
