"""Checksums of rows, by which an agent finds bytes that have changed behind the ledger: by faulty
memory, or by a copy that went to a wrong place.

A thread (`regions.py`) makes the checksum of a row soon after the row is complete, within a share
of one core. It belongs to the sequence that the ledger had before and after the bytes were read, so
a row that is written again has none until the next one is made. From then on each read of the row
is compared with it. A row that differs is refused: it is neither listed nor served until it is
written again.

The agent makes checksums, not the engine: no thread of the engine reads rows, and the engine's
memory of them would be as damaged as the rows. What changes before its checksum is not found.
"""

import os
import threading
from array import array

from xxhash import xxh3_128

from kvrs.protocol.rows import CHECKSUM_BYTES


class RowChecksums:
    """The checksum of each row of a region, and the sequence that it belongs to. Any thread may
    call its methods.
    """

    def __init__(self, rows: int) -> None:
        self._sequences = array("Q", bytes(8 * rows))
        self._checksums = bytearray(CHECKSUM_BYTES * rows)
        # Sequence of each refused row.
        self._refused: dict[int, int] = {}
        self._lock = threading.Lock()

    def has(self, row: int, sequence: int) -> bool:
        return self._sequences[row] >= sequence

    def is_refused(self, row: int, sequence: int) -> bool:
        return self._refused.get(row) == sequence

    def agrees(self, row: int, sequence: int, checksum: bytes) -> bool:
        """Compare a row with its checksum, or take this one if the row has none at this sequence.
        Return False, and refuse the row from here on, if they differ.
        """
        at = row * CHECKSUM_BYTES
        with self._lock:
            known = self._sequences[row]
            if known < sequence:
                self._sequences[row] = sequence
                self._checksums[at : at + CHECKSUM_BYTES] = checksum
            elif known == sequence and self._checksums[at : at + CHECKSUM_BYTES] != checksum:
                self._refused[row] = sequence
                return False
        return True


def checksum_of(memory: int, at: int, size: int, piece: memoryview) -> bytes | None:
    """Return the checksum of bytes of a file, read in pieces; None: the file is shorter."""
    summed, end = xxh3_128(), at + size
    while at < end:
        part = piece[: end - at]
        if os.preadv(memory, [part], at) != len(part):
            return None
        summed.update(part)
        at += len(part)
    return summed.digest()
