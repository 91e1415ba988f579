"""Lookup and loading of pages by key in this server's region, at its node's agent, and at agents of
other nodes.

HiCache's own threads make the calls, which wait for agents up to a deadline. All agents are asked
at once, so a hanging agent delays no other; it is then skipped for a while (`RowClient`).

Shared memory for pages of SGLang's KV. A new page replaces the least recently used row, and a
ledger records the page of each row, which outlives this process.
"""

import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby, takewhile
from typing import NamedTuple

from kvrs.engines.proof import RowProofs
from kvrs.transfer.rows.client import RowClient
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


# Most agents of other nodes that are asked, in the order of the configuration from the own node on.
MAX_ASKED = 16
_AT_ONCE_BYTES = 64 << 20  # Most bytes of pages that are loaded from agents at a time.
_CALLERS = 2  # Number of HiCache's threads that call: one looks up, another loads.


class LoadedPages(NamedTuple):
    """Numbers of pages that were loaded, by where they came from."""

    own: int = 0
    agents: int = 0

    @property
    def pages(self) -> int:
        return self.own + self.agents


class Pages:
    """The pages that this server can load: from its own region, and from agents."""

    def __init__(
        self,
        region: PageRegion,
        agents: Sequence[RowClient],
        proofs: RowProofs,
        lookup_s: float,
        load_s: float,
    ) -> None:
        """Keep the region, and the agents in the order of preference, the own node's first."""
        self.region, self._agents, self.proofs = region, agents, proofs
        self._lookup_s, self._load_s = lookup_s, load_s
        self._threads = ThreadPoolExecutor(
            _CALLERS * max(1, len(agents)), thread_name_prefix="kvrs-pages"
        )

    def count(self, keys: Sequence[bytes]) -> int:
        """Return how many leading pages the region or an agent holds. A last page that is to be
        compared does not count, so that SGLang computes it.
        """
        holders = [*takewhile(bool, self._holders(keys))]
        agent = holders[-1] if holders else None
        if not isinstance(agent, RowClient):
            return len(holders)
        at = self.proofs.leave_out([True] * len(holders))
        if at is None:
            return len(holders)
        self.proofs.fetch(keys[at], keys[at], self.region.row_bytes, agent, self._load_s)
        return at

    def load(self, keys: Sequence[bytes], use: Callable[[int, memoryview], object]) -> LoadedPages:
        """Call `use` with the index and the bytes of each page of `keys`, until a page is missing.
        Pages from agents are also kept in the own region, since agents may soon drop them.
        """
        found = LoadedPages()
        some = max(1, _AT_ONCE_BYTES // self.region.row_bytes)
        holders = [*takewhile(bool, self._holders(keys))]
        for holder, places in groupby(range(len(holders)), key=holders.__getitem__):
            run = [*places]
            for at in range(0, len(run), some):
                part = run[at : at + some]
                if isinstance(holder, RowClient):
                    count = self._fetch(holder, keys, part, use)
                    found = found._replace(agents=found.agents + count)
                else:
                    count = self._read(keys, part, use)
                    found = found._replace(own=found.own + count)
                if count < len(part):
                    return found
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for agent in self._agents:
            agent.close()

    def _holders(self, keys: Sequence[bytes]) -> list[PageRegion | RowClient | None]:
        """Return the holder of each page, the region or an agent; None: no holder."""
        found: list[PageRegion | RowClient | None] = [
            self.region if held else None for held in self.region.held(keys)
        ]
        lacking = [at for at, holder in enumerate(found) if holder is None]
        usable = [agent for agent in self._agents if agent.is_usable]
        if not lacking or not usable:
            return found
        wanted = [keys[at] for at in lacking]
        ask = partial(_ask, keys=wanted, timeout_s=self._lookup_s)
        for agent, answer in zip(usable, self._threads.map(ask, usable), strict=True):
            for at, held in zip(lacking, answer, strict=True):
                if held and found[at] is None:
                    found[at] = agent
        return found

    def _read(
        self, keys: Sequence[bytes], part: Sequence[int], use: Callable[[int, memoryview], object]
    ) -> int:
        return len([*takewhile(lambda at: self.region.take(keys[at], partial(use, at)), part)])

    def _fetch(
        self,
        agent: RowClient,
        keys: Sequence[bytes],
        part: Sequence[int],
        use: Callable[[int, memoryview], object],
    ) -> int:
        rows = [memoryview(bytearray(self.region.row_bytes)) for _ in part]
        wanted = [(keys[at], row) for at, row in zip(part, rows, strict=True)]
        count = agent.load(wanted, self._load_s)
        for at, row in zip(part[:count], rows, strict=False):
            use(at, row)
            self.region.put(keys[at], partial(_copy, row))
        return count


def _ask(agent: RowClient, *, keys: Sequence[bytes], timeout_s: float) -> Sequence[bool]:
    return agent.find(keys, timeout_s)


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source
