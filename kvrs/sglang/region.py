"""Shared memory for pages of SGLang's KV. A new page replaces the least recently used row, and a
ledger records the page of each row, which outlives this process.
"""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvrs.transfer.rows.ledger import RowLedger


class PageRegion:
    """Shared memory for pages, and the ledger of its rows. Threads may use the object at the same
    time.
    """

    def __init__(self, rows: int, row_bytes: int) -> None:
        """Make a region of `rows` rows. The kernel allocates memory only as rows are filled.

        Raises:
            OSError: the memory cannot be allocated.
        """
        self.rows, self.row_bytes = rows, row_bytes
        self.memory = os.memfd_create("kvrs-pages", os.MFD_CLOEXEC)
        # Other users of the machine must not open the memory for writing.
        os.fchmod(self.memory, 0o600)
        os.ftruncate(self.memory, rows * row_bytes)
        self._bytes = memoryview(mmap.mmap(self.memory, rows * row_bytes))
        self.ledger = RowLedger(rows, row_bytes)
        # Index of the row of each page; the least recently used page is first.
        self._row_of: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(reversed(range(rows)))
        self._lock = threading.Lock()

    def put(self, key: bytes, fill: Callable[[memoryview], object]) -> None:
        """Keep a page under a key: `fill` writes its bytes. A page that is already kept is not
        written again.
        """
        with self._lock:
            if key in self._row_of:
                self._row_of.move_to_end(key)
                return
            row = self._free.pop() if self._free else self._row_of.popitem(last=False)[1]
            self.ledger.writing(row)
            try:
                fill(self._row(row))
            except BaseException:
                self._free.append(row)
                raise
            self.ledger.holds(row, key)
            self._row_of[key] = row

    def take(self, key: bytes, use: Callable[[memoryview], object]) -> bool:
        """Call `use` with the bytes of a page; return False: no such page is kept."""
        with self._lock:
            if (row := self._row_of.get(key)) is None:
                return False
            self._row_of.move_to_end(key)
            use(self._row(row))
            return True

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._row_of for key in keys]

    def clear(self) -> None:
        """Forget all pages. The ledger starts a new epoch, so readers find none of them."""
        with self._lock:
            for row in self._row_of.values():
                self.ledger.writing(row)
            self._free += self._row_of.values()
            self._row_of.clear()
            self.ledger.describe(self.row_bytes)

    def close(self) -> None:
        """Close the ledger: agents serve no page of the region any more."""
        with self._lock:
            self._row_of.clear()
            self.ledger.close()

    def _row(self, row: int) -> memoryview:
        return self._bytes[row * self.row_bytes : (row + 1) * self.row_bytes]
